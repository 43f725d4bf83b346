"""State of the browser: selected module, filter, sort order, and the matches of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from msgspec import Struct
from msgspec.structs import replace
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
from shardscope.record.recording import name_axis
from shardscope.record.units import (
    NOT_RECORDED,
    format_bytes,
    format_count,
    format_duration,
    plural,
)
from shardscope.report.model.clocks import has_clock
from shardscope.report.model.module_tree import ModuleNode, build_tree
from shardscope.report.model.traffic_totals import (
    Spread,
    fold_ranks,
    format_spread,
)
from shardscope.report.text.communication import describe_kinds
from shardscope.report.text.problems import SEVERITY_STYLES, describe_checks, sort_findings
from shardscope.report.text.style import make_text
from shardscope.report.tui.module_index import Chain, ModuleEntry, ModuleIndex

FACETS = ("phase", "axis", "kind", "rank")


class Filter(Struct, frozen=True):
    """Values that collectives must have; None allows all."""

    phase: str | None = None
    axis: str | None = None
    kind: str | None = None
    rank: str | None = None

    @property
    def words(self) -> str:
        """Describe the filter: `phase backward, axis tp`; empty if it allows all."""
        chosen = ((facet, getattr(self, facet)) for facet in FACETS)
        return ", ".join(f"{facet} {value}" for facet, value in chosen if value is not None)


SORTS: dict[str, Callable[[Collective], Any]] = {
    "order": lambda call: (call.rank, call.order),
    "sent": lambda call: (-call.wire_bytes, call.rank, call.order),
    "input": lambda call: (-call.input_bytes, call.rank, call.order),
    "module": lambda call: (call.owner or "", call.rank, call.order),
    "cause": lambda call: (describe_cause(call.cause), call.rank, call.order),
}


@final
class CallList:
    """All collectives of a recording, indexed by owner."""

    def __init__(self, recording: Recording) -> None:
        self._world_size = recording.run.world_size
        self._calls = sorted(recording.collectives, key=SORTS["order"])
        self._by_owner: dict[str | None, list[int]] = defaultdict(list)
        for index, call in enumerate(self._calls):
            self._by_owner[call.owner].append(index)
        self.choices = self._list_choices(recording)

    def _list_choices(self, recording: Recording) -> dict[str, list[str]]:
        """List the values of each facet that occur."""
        met = {facet: set[str]() for facet in ("axis", "kind")}
        phases, ranks = set[Phase](), set[int]()
        for call in recording.collectives:
            met["axis"].add(self.name_axis(call))
            met["kind"].add(str(call.kind))
            phases.add(call.phase)
            ranks.add(call.rank)
        return {
            "phase": [str(phase) for phase in Phase if phase in phases],
            "axis": sorted(met["axis"]),
            "kind": sorted(met["kind"]),
            "rank": [str(rank) for rank in sorted(ranks)],
        }

    def name_axis(self, call: Collective) -> str:
        """Return the mesh axis of a collective, or how many ranks it spans."""
        return name_axis(call, self._world_size)

    def choose(
        self, entry: ModuleEntry, chosen: Filter, *, sort: str = "order", is_reversed: bool = False
    ) -> Sequence[Collective]:
        """Return the filtered and sorted collectives of an entry and its descendants."""
        calls = [self._calls[index] for index in self._gather(entry)]
        if chosen.words:
            calls = [call for call in calls if self._passes(call, chosen)]
        if sort != "order":
            calls.sort(key=SORTS[sort])
        return calls[::-1] if is_reversed else calls

    def _gather(self, entry: ModuleEntry) -> list[int]:
        """Return the positions of the entry's collectives, in order."""
        if entry.is_nowhere:
            return self._by_owner.get(None, [])
        above = set(entry.paths)
        owners = (
            owner for owner in self._by_owner if owner is not None and _is_below(owner, above)
        )
        return sorted(index for owner in owners for index in self._by_owner[owner])

    def _passes(self, call: Collective, chosen: Filter) -> bool:
        return (
            chosen.phase in (None, call.phase)
            and chosen.kind in (None, call.kind)
            and chosen.rank in (None, str(call.rank))
            and (chosen.axis is None or chosen.axis == self.name_axis(call))
        )


def _is_below(owner: str, above: set[str]) -> bool:
    if "" in above or owner in above:
        return True
    end = owner.rfind(".")
    while end >= 0:
        if owner[:end] in above:
            return True
        end = owner.rfind(".", 0, end)
    return False


_MAX_PARAMETERS = 40
_MAX_TEXT = 2000

Line = tuple[str, Text]


@final
class Details:
    """Describes modules, collectives, findings and gaps of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._world_size = recording.run.world_size
        self._has_clock = has_clock(recording)
        self._is_traced = bool(recording.collectives) or "trace" in recording.run.instruments
        self._groups = {group.name: group for group in recording.groups}
        self._modules: dict[str, Module] = {}
        for module in recording.modules:
            self._modules.setdefault(module.name, module)

    def describe_entry(self, entry: ModuleEntry) -> RenderableType:
        """Describe a module: class, collectives, parameters."""
        node = entry.node
        title = make_text(entry.name or "|".join(node.types) or "model", "bold")
        lines = [
            ("class", make_text("|".join(node.types))),
            ("collectives", Text(self._describe_collectives(node))),
            ("itself", make_text(describe_kinds(node), "dim")),
            ("input", _format_bytes(node.input_bytes())),
            ("sent", _format_bytes(node.wire_bytes())),
            (
                "identical",
                Text(f"{len(entry.paths):,}, figures per layer") if entry.repeat > 1 else Text(),
            ),
        ]
        module = self._modules.get(entry.paths[0])
        if module is None:
            return Group(title, _make_table(lines))
        return Group(title, _make_table([*lines, *_describe_module(module)]))

    def _describe_collectives(self, node: ModuleNode) -> str:
        """Return `13: forward 5, backward 8`, or that there are none or none were recorded."""
        counts = {phase: node.count(phase=phase) for phase in Phase}
        parts = [
            f"{phase} {format_spread(count, format_count)}"
            for phase, count in counts.items()
            if count.high
        ]
        if parts:
            return f"{format_spread(node.count(), format_count)}: {', '.join(parts)}"
        return "none" if self._is_traced else NOT_RECORDED

    def describe_call(self, call: Collective) -> RenderableType:
        """Describe a collective: kind, ranks, cause and source line."""
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
        position = f"as number {call.order:,} of rank {call.rank:,}"
        if not self._has_clock or call.start_ns is None:
            return position
        return f"{position}, {format_duration(call.start_ns)} after the recording began"

    def describe_problem(self, problem: Finding | Gap) -> RenderableType:
        """Describe a finding with its remedy, or a gap."""
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
        options = f" ({', '.join(mark.options)})" if mark.options else ""
        yield "made", make_text(f"{mark.kind.replace('_', ' ')} {mark.detail}{over}{options}")
    for parameter in module.parameters[:_MAX_PARAMETERS]:
        yield parameter.name, make_text(_describe_parameter(parameter), width=_MAX_TEXT)
    num_hidden = len(module.parameters) - _MAX_PARAMETERS
    if num_hidden > 0:
        yield "…", Text(f"{num_hidden:,} more")


def _describe_parameter(parameter: Parameter) -> str:
    shapes = dict.fromkeys(
        _format_shape(shape) for shape in (parameter.shape, parameter.local_shape)
    )
    placed = zip(parameter.axes, parameter.placements, strict=False)
    facts = [
        f"{parameter.dtype} {' → '.join(shapes)}",
        " ".join(f"{axis}:{placement}" for axis, placement in placed) or "plain",
        _describe_size(parameter),
        f"rule {parameter.rule}" if parameter.rule else "",
        f"tied to {parameter.alias_group}" if parameter.alias_group else "",
        "buffer" if parameter.is_buffer else "",
    ]
    return ", ".join(filter(None, facts))


def _describe_size(parameter: Parameter) -> str:
    if parameter.local_bytes is None or parameter.global_bytes is None:
        return "size not recorded"
    return f"{format_bytes(parameter.local_bytes)} of {format_bytes(parameter.global_bytes)}"


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "()"


def _render_source(source: Source | None) -> Iterator[RenderableType]:
    """Yield the file and line and, on a line of its own, the code."""
    if source is None:
        return
    function = f" in {source.function}" if source.function else ""
    yield make_text(f"{source.file}:{source.line}{function}", "cyan", width=_MAX_TEXT)
    if source.text.strip():
        yield Text("  ").append_text(make_text(source.text.strip(), "italic", width=_MAX_TEXT))


def _make_table(lines: Iterable[Line]) -> Table:
    """Make a table of the lines that have text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", max_width=24, overflow="fold")
    table.add_column(overflow="fold")
    for name, text in lines:
        if text.plain:
            table.add_row(make_text(name), text)
    return table


@final
class BrowserState:
    """What the panes show, without widgets."""

    def __init__(self, recording: Recording) -> None:
        self._roots = build_tree(recording, fold_ranks(recording))
        self._is_folded = True
        self._match = 0
        self._sort = "order"
        self._is_reversed = False
        self._filter = Filter()
        self._term = ""
        self.index = ModuleIndex(self._roots)
        self.calls = CallList(recording)
        self.details = Details(recording)
        self.problems: list[Finding | Gap] = [*sort_findings(recording), *recording.gaps]
        self.checks = f"No findings ({describe_checks(recording)})."
        self.is_traced = "trace" in recording.run.instruments
        self.entry: ModuleEntry | None = None
        self.matches: list[Chain] = []

    @property
    def is_filtered(self) -> bool:
        """Whether the filter excludes collectives."""
        return bool(self._filter.words)

    @property
    def words(self) -> str:
        """Describe filter and sort order: `phase backward · by order`."""
        chosen = f"{self._filter.words} · " if self.is_filtered else ""
        return f"{chosen}{'reversed ' if self._is_reversed else ''}by {self._sort}"

    def list_calls(self) -> Sequence[Collective]:
        """List the collectives of the selected entry that pass the filter."""
        if self.entry is None:
            return ()
        return self.calls.choose(
            self.entry, self._filter, sort=self._sort, is_reversed=self._is_reversed
        )

    def filter_next(self, facet: str) -> None:
        """Filter by the next value of a facet; after the last, allow all."""
        values = [None, *self.calls.choices[facet]]
        now = values.index(getattr(self._filter, facet))
        self._filter = replace(self._filter, **{facet: values[(now + 1) % len(values)]})

    def clear_filter(self) -> None:
        """Allow all collectives."""
        self._filter = Filter()

    def sort_next(self) -> None:
        """Sort by the next column."""
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]

    def reverse_sort(self) -> None:
        """Reverse the sort order."""
        self._is_reversed = not self._is_reversed

    def fold(self) -> Chain | None:
        """Fold identical layers or show each; return the new entry of the selected module."""
        path = self.entry.paths[0] if self.entry is not None else ""
        self._is_folded = not self._is_folded
        self.index = ModuleIndex(self._roots, is_folded=self._is_folded)
        self.search(self._term)
        return self.index.find(path)

    def search(self, term: str) -> None:
        """Find entries by name or class."""
        self._term = term
        self._match = 0
        self.matches = self.index.search(term)

    def move_match(self, by: int) -> None:
        """Move to the next or previous match, cyclically."""
        self._match = (self._match + by) % max(1, len(self.matches))

    @property
    def match(self) -> Chain | None:
        """The current match of the search."""
        return self.matches[self._match] if self.matches else None

    @property
    def match_words(self) -> str:
        """Describe the current match: `2 of 12`; empty without a search."""
        if not self._term.strip():
            return ""
        position = f"{self._match + 1:,} of {len(self.matches):,}"
        return position if self.matches else f"no {self._term}"

    def find_entry(self, record: Collective | Finding | Gap) -> Chain | None:
        """Find the owner of a collective, or the first module or tensor that a finding names."""
        if isinstance(record, Gap):
            return None
        if isinstance(record, Collective):
            return None if record.owner is None else self.index.find(record.owner)
        return self.index.find(record.subject.partition(" (×")[0].partition(", ")[0])
