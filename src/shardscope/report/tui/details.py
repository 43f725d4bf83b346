"""All that is known of the thing that was selected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardscope.record import (
    Collective,
    Finding,
    Gap,
    Module,
    Parameter,
    Phase,
    Recording,
    Source,
    describe_cause,
    format_ranks,
)
from shardscope.report.align import has_clock
from shardscope.report.fold import ModuleNode
from shardscope.report.layout import make_text, plural
from shardscope.report.problems import SEVERITY_STYLES
from shardscope.report.traffic import name_axis
from shardscope.report.tree import describe_kinds
from shardscope.report.tui.outline import Place
from shardscope.report.units import (
    NOT_RECORDED,
    Spread,
    format_bytes,
    format_count,
    format_duration,
    format_spread,
)

__all__ = ["Details"]

_MAX_PARAMETERS = 40
_MAX_TEXT = 2000

Line = tuple[str, Text]


@final
class Details:
    """Describes places, collectives, findings and gaps of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._world_size = recording.run.world_size
        self._has_clock = has_clock(recording)
        self._is_traced = bool(recording.collectives) or "trace" in recording.run.instruments
        self._groups = {group.name: group for group in recording.groups}
        self._modules: dict[str, Module] = {}
        for module in recording.modules:
            self._modules.setdefault(module.name, module)

    def describe_place(self, place: Place) -> RenderableType:
        """A module: what it is, what it says, what it holds."""
        node = place.node
        title = make_text(place.name or "|".join(node.types) or "model", "bold")
        lines = [
            ("class", make_text("|".join(node.types))),
            ("collectives", Text(self._describe_collectives(node))),
            ("itself", make_text(describe_kinds(node), "dim")),
            ("input", _format_bytes(node.input_bytes())),
            ("sent", _format_bytes(node.wire_bytes())),
            (
                "alike",
                Text(f"{len(place.paths):,}, figures per layer") if place.repeat > 1 else Text(),
            ),
        ]
        module = self._modules.get(place.paths[0])
        if module is None:
            return Group(title, _make_table(lines))
        return Group(title, _make_table([*lines, *_describe_module(module)]))

    def _describe_collectives(self, node: ModuleNode) -> str:
        """`13: forward 5, backward 8`, or that there are none, or that none were recorded."""
        counts = {phase: node.count(phase=phase) for phase in Phase}
        parts = [
            f"{phase} {format_spread(one, format_count)}"
            for phase, one in counts.items()
            if one.high
        ]
        if parts:
            return f"{format_spread(node.count(), format_count)}: {', '.join(parts)}"
        return "none" if self._is_traced else NOT_RECORDED

    def describe_call(self, call: Collective) -> RenderableType:
        """A collective: what, between whom, why, and the line that led to it."""
        title = make_text(f"{call.kind}[{name_axis(call, self._world_size)}]", "bold")
        return Group(title, _make_table(self._list_facts(call)), *_render_source(call.source))

    def _list_facts(self, call: Collective) -> Iterator[Line]:
        group = self._groups.get(call.group)
        ranks = f" = ranks {format_ranks(group.ranks)}" if group is not None else ""
        yield "cause", make_text(describe_cause(call.cause), "bold", width=_MAX_TEXT)
        yield "module", make_text("none" if call.owner is None else call.owner or "the root")
        if call.trigger not in (call.owner, None):
            yield "while running", make_text(call.trigger or "the root")
        yield "phase", make_text(call.phase)
        yield "input", Text(f"{format_bytes(call.input_bytes)} of {call.dtype}")
        yield "output", Text(format_bytes(call.output_bytes))
        yield "sent", Text(f"{format_bytes(call.wire_bytes)} (ring estimate)")
        yield "group", make_text(f"{call.group}, {plural(call.num_ranks, 'rank')}{ranks}")
        yield "reduces by", make_text(call.reduce_op or "")
        yield "peer", Text("" if call.peer is None else f"rank {call.peer:,}")
        yield "op", make_text(call.op)
        yield "issued", Text(self._describe_time(call))
        yield "thread", make_text(call.thread)

    def _describe_time(self, call: Collective) -> str:
        place = f"as number {call.order:,} of rank {call.rank:,}"
        if not self._has_clock or call.start_ns is None:
            return place
        return f"{place}, {format_duration(call.start_ns)} after the recording began"

    def describe_problem(self, problem: Finding | Gap) -> RenderableType:
        """A finding with its remedy, or a gap."""
        if isinstance(problem, Gap):
            return _describe_gap(problem)
        head = Text(f"{problem.severity} ", SEVERITY_STYLES[problem.severity])
        head.append_text(make_text(problem.rule, "bold"))
        lines = [("subject", make_text(problem.subject, width=_MAX_TEXT)), *_name_rank(problem)]
        return Group(
            head,
            _make_table(lines),
            make_text(problem.fact, width=_MAX_TEXT),
            make_text(f"→ {problem.remedy}", "green", width=_MAX_TEXT),
            *_render_source(problem.source),
        )


def _format_bytes(values: Spread) -> Text:
    return Text(format_spread(values, format_bytes) if values.high else "")


def _describe_gap(gap: Gap) -> RenderableType:
    head = Text("gap ", "bold yellow").append_text(make_text(gap.place, "bold"))
    lost = [Text("Records were lost: collectives may be missing here.")] if gap.is_loss else []
    fact = make_text(gap.fact, width=_MAX_TEXT)
    return Group(head, _make_table(_name_rank(gap)), fact, *lost)


def _name_rank(problem: Finding | Gap) -> Iterator[Line]:
    if problem.rank is not None:
        yield "rank", Text(f"{problem.rank:,}")


def _describe_module(module: Module) -> Iterator[Line]:
    yield "ranks", make_text(format_ranks(module.ranks))
    yield "also called", make_text(", ".join(module.aliases))
    for mark in module.marks:
        over = f" over {' × '.join(mark.axes)}" if mark.axes else ""
        yield "made", make_text(f"{mark.kind.replace('_', ' ')} {mark.detail}{over}")
    for one in module.parameters[:_MAX_PARAMETERS]:
        yield one.name, make_text(_describe_parameter(one), width=_MAX_TEXT)
    num_hidden = len(module.parameters) - _MAX_PARAMETERS
    if num_hidden > 0:
        yield "…", Text(f"{num_hidden:,} more")


def _describe_parameter(one: Parameter) -> str:
    shapes = dict.fromkeys(_format_shape(shape) for shape in (one.shape, one.local_shape))
    placed = zip(one.axes, one.placements, strict=False)
    facts = [
        f"{one.dtype} {' → '.join(shapes)}",
        " ".join(f"{axis}:{placement}" for axis, placement in placed) or "plain",
        _describe_size(one),
        f"rule {one.rule}" if one.rule else "",
        f"tied to {one.alias_group}" if one.alias_group else "",
        "buffer" if one.is_buffer else "",
    ]
    return ", ".join(filter(None, facts))


def _describe_size(one: Parameter) -> str:
    if one.local_bytes is None or one.global_bytes is None:
        return "size not recorded"
    return f"{format_bytes(one.local_bytes)} of {format_bytes(one.global_bytes)}"


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "()"


def _render_source(source: Source | None) -> Iterator[RenderableType]:
    """The place and, on a line of its own, what is written there."""
    if source is None:
        return
    function = f" in {source.function}" if source.function else ""
    yield make_text(f"{source.file}:{source.line}{function}", "cyan", width=_MAX_TEXT)
    if source.text.strip():
        yield Text("  ").append_text(make_text(source.text.strip(), "italic", width=_MAX_TEXT))


def _make_table(lines: Iterable[Line]) -> Table:
    """What has nothing to say is left out."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", max_width=24, overflow="fold")
    table.add_column(overflow="fold")
    for name, text in lines:
        if text.plain:
            table.add_row(make_text(name), text)
    return table
