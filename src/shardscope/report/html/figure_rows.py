"""Figures of a page by view, which the browser subtracts from those of another page.

Collectives and memory have figures of their own rows; all others are sums of parts, so that the
browser can sum those that are selected.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from shardscope.record.traffic import (
    TrafficTotals,
    choose_busiest,
)
from shardscope.report.html.page import Communication, FindingItem, Page
from shardscope.report.html.page_figures import Figure, FigureParts
from shardscope.report.html.page_views import (
    ExplanationItem,
    LevelCoverage,
    MemoryCurve,
    OpRow,
    Parameters,
    TensorTable,
)

_SENT, _ISSUED = "bytes sent per rank (ring estimate)", "collectives per rank"
_AT_PEAK = "in use at the peak"
_MAX_MODULES = 50_000  # positions of modules in all parts; more make a page too large


class _Part(NamedTuple):
    """What is counted once in a figure, and all by which it can be selected.

    It is selected if any of its modules and phases is; without ranks it concerns all.
    """

    value: int = 1
    modules: tuple[int, ...] = ()
    axis: str = ""
    kind: str = ""
    phases: tuple[str, ...] = ()
    ranks: str = ""


_Summed = tuple[Figure, Sequence[_Part]]


def make_figures(page: Page) -> tuple[tuple[Figure, ...], FigureParts]:
    """Make the figures of every view that has data; those of ranks are of the one with most."""
    summed = [
        *_sum_findings(page),
        *(_sum_traffic(page.communication) if page.communication is not None else ()),
        *(_sum_memory(page.memory[0]) if page.memory else ()),
        *_sum_modules(page),
        *_sum_sharding(page),
        *(item for level in page.coverage for item in _sum_coverage(level)),
        *_sum_compiler(page),
        *_sum_proof(page),
    ]
    num_modules = sum(len(part.modules) for _, parts in summed for part in parts)
    if num_modules > _MAX_MODULES:
        summed = [_forget_modules(*item) for item in summed]
    return tuple(figure for figure, _ in summed), _make_columns(summed)


def _forget_modules(figure: Figure, parts: Sequence[_Part]) -> _Summed:
    """The same figure, which can no longer be selected by module."""
    follows = tuple(facet for facet in figure.follows if facet != "module")
    rest = [part._replace(modules=()) for part in parts] if follows else []
    return replace(figure, follows=follows), rest


def _make_columns(summed: Iterable[_Summed]) -> FigureParts:
    """Join equal parts of a figure to one."""
    sums: Counter[tuple[int, _Part]] = Counter()
    for position, (_, parts) in enumerate(summed):
        for part in parts:
            sums[position, part._replace(value=0)] += part.value
    has_modules = any(part.modules for _, part in sums)
    return FigureParts(
        figure=tuple(position for position, _ in sums),
        modules=tuple(part.modules for _, part in sums) if has_modules else (),
        axis=tuple(part.axis for _, part in sums),
        kind=tuple(part.kind for _, part in sums),
        phases=tuple(" ".join(part.phases) for _, part in sums),
        ranks=tuple(part.ranks for _, part in sums),
        value=tuple(sums.values()),
    )


def _count(
    view: str, group: str, label: str, parts: Sequence[_Part], follows: tuple[str, ...] = ()
) -> _Summed:
    """Sum parts to a number; `follows` names the facets by which they can be selected."""
    value = sum(part.value for part in parts)
    figure = Figure(view=view, group=group, label=label, unit="count", value=value, follows=follows)
    return figure, parts if follows else ()


def _number(view: str, group: str, label: str, value: int, unit: str = "count") -> _Summed:
    """A number that is no sum of parts."""
    return Figure(view=view, group=group, label=label, unit=unit, value=value), ()


def _bytes(view: str, group: str, label: str, value: int) -> _Summed:
    return _number(view, group, label, value, "bytes")


def _sum_findings(page: Page) -> Iterator[_Summed]:
    severities: dict[str, list[_Part]] = {"error": [], "warning": [], "info": []}
    rules: defaultdict[str, list[_Part]] = defaultdict(list)
    for finding in page.findings:
        parts = _split_finding(finding)
        severities[finding.severity] += parts
        rules[finding.rule] += parts
    follows = ("module", "rank")
    for severity, parts in severities.items():
        yield _count("overview", "findings", severity, parts, follows)
    for rule, parts in sorted(rules.items()):
        yield _count("overview", "findings by rule", rule, parts, follows)
    gaps = [_Part(ranks=gap.ranks) for gap in page.gaps]
    yield _count("overview", "findings", "gaps", gaps, ("rank",))


def _split_finding(finding: FindingItem) -> list[_Part]:
    """Findings of several layers, where each has a module of its own; else all of them at once."""
    if len(finding.modules) == finding.count:
        return [_Part(1, (module,), ranks=finding.ranks) for module in finding.modules]
    return [_Part(finding.count, finding.modules, ranks=finding.ranks)]


def _sum_traffic(communication: Communication) -> Iterator[_Summed]:
    """Sums by axis, kind, phase and cause, each of the rank that sends most in it."""
    traffic = communication.traffic
    names = communication.axes, communication.kinds, communication.phases, communication.causes
    sums: defaultdict[tuple[str, str], defaultdict[int, TrafficTotals]] = defaultdict(
        lambda: defaultdict(TrafficTotals)
    )
    columns = (traffic.rank_set, traffic.axis, traffic.kind, traffic.phase, traffic.cause)
    figures = traffic.wire_bytes, traffic.count
    for rank_set, axis, kind, phase, cause, wire_bytes, count in zip(
        *columns, *figures, strict=True
    ):
        axis_name, kind_name, phase_name, cause_name = (
            values[at] if at >= 0 else "not listed"
            for values, at in zip(names, (axis, kind, phase, cause), strict=True)
        )
        for group in (
            ("", "all"),
            ("", f"{kind_name}[{axis_name}]"),
            (", by phase", phase_name),
            (", by kind, axis and phase", f"{kind_name}[{axis_name}] in {phase_name}"),
            (", by cause", cause_name),
        ):
            sums[group][rank_set] += TrafficTotals(count=count, wire_bytes=wire_bytes)
    for (by, label), by_rank_set in sums.items():
        busiest = choose_busiest(by_rank_set.values())
        yield _bytes("communication", f"{_SENT}{by}", label, busiest.wire_bytes)
        yield _number("communication", f"{_ISSUED}{by}", label, busiest.count)


def _sum_memory(curve: MemoryCurve) -> Iterator[_Summed]:
    for label, num_bytes in (
        ("peak of a step", curve.peak_bytes),
        ("peak of the first step", curve.first_peak_bytes),
        ("reserved", curve.reserved_bytes),
        ("needed on a device", curve.needed_bytes),
    ):
        if num_bytes is not None:
            yield _bytes("memory", "most on a rank", label, num_bytes)
    by_kind = Counter(dict.fromkeys(curve.kinds, 0))
    for use in curve.at_peak:
        by_kind[curve.kinds[use.kind]] += use.num_bytes
    for kind, num_bytes in by_kind.items():
        yield _bytes("memory", _AT_PEAK, kind, num_bytes)


def _sum_modules(page: Page) -> Iterator[_Summed]:
    """Count modules of each class; those whose class was not recorded are only names."""
    types: defaultdict[str, list[_Part]] = defaultdict(list)
    for position, name in enumerate(page.modules.type):
        if name:
            types[name].append(_Part(modules=(position,)))
    if types:
        every = [part for parts in types.values() for part in parts]
        yield _count("modules", "modules", "all", every, ("module",))
    for name, parts in sorted(types.items()):
        yield _count("modules", "modules", name, parts, ("module",))


def _sum_sharding(page: Page) -> Iterator[_Summed]:
    table = page.sharding
    if table is None:
        return
    for label, num_bytes in (
        ("all", table.global_bytes),
        ("on one rank", table.local_bytes),
        ("replicated", table.replicated_bytes),
    ):
        if num_bytes is None:
            continue
        parts = _split_bytes(table.parameters, label)
        if parts and sum(part.value for part in parts) == num_bytes:
            figure, _ = _bytes("sharding", "bytes of parameters", label, num_bytes)
            yield replace(figure, follows=("module",)), parts
        else:
            yield _bytes("sharding", "bytes of parameters", label, num_bytes)
    placements: defaultdict[str, list[_Part]] = defaultdict(list)
    parameters = table.parameters
    for placement, module, ranks in zip(
        parameters.placement, parameters.module, parameters.ranks, strict=True
    ):
        placements[placement or "not sharded"].append(_Part(modules=(module,), ranks=ranks))
    for placement, parts in sorted(placements.items()):
        yield _count("sharding", "tensors by placement", placement, parts, ("module", "rank"))


def _split_bytes(parameters: Parameters, label: str) -> list[_Part]:
    """Bytes by parameter, tied ones once; none if ranks hold different parameters."""
    columns = {"all": parameters.global_bytes, "on one rank": parameters.local_bytes}
    if label not in columns or len(set(parameters.ranks)) != 1:
        return []
    parts: dict[str, _Part] = {}
    for row, num_bytes in enumerate(columns[label]):
        if not parameters.is_buffer[row]:
            key = parameters.alias_group[row] or parameters.name[row]
            parts.setdefault(key, _Part(num_bytes or 0, (parameters.module[row],)))
    return list(parts.values())


def _sum_coverage(level: LevelCoverage) -> Iterator[_Summed]:
    for verdict in level.verdicts:
        parts = [
            _Part(modules=op.modules, phases=_list_phases(op))
            for op in level.ops
            if op.verdict == verdict
        ]
        yield _count("coverage", f"ops, {level.level}", verdict, parts, ("module", "phase"))


def _list_phases(op: OpRow) -> tuple[str, ...]:
    counts = {"forward": op.num_forward, "backward": op.num_backward}
    return tuple(phase for phase, count in counts.items() if count)


def _sum_compiler(page: Page) -> Iterator[_Summed]:
    for item in page.compiler.explanations if page.compiler is not None else ():
        for label, number in _count_compiled(item).items():
            part = _Part(number, ranks=item.ranks)
            yield _count("compiler", item.target, label, [part], ("rank",))


def _count_compiled(item: ExplanationItem) -> dict[str, int]:
    return {
        "graphs": len(item.graphs),
        "ops": sum(graph.num_ops for graph in item.graphs),
        "lines that break graphs": len(item.break_sites),
        "graph breaks": item.num_break_events,
        "recompilations": len(item.recompiles),
        "functions that ran eagerly": len(item.skipped_frames),
        "guards": sum(len(frame.guard) + frame.left_out for frame in item.guards),
    }


def _sum_proof(page: Page) -> Iterator[_Summed]:
    if page.proof is None:
        return
    for item in page.proof.parity:
        for label, is_fine in (("tensors that differ", False), ("tensors that agree", True)):
            parts = _split_tensors(item.tensors, is_fine=is_fine)
            group = f"parity on {item.mesh}"
            yield _count("proof", group, label, parts, ("module", "phase", "rank"))
    for program in page.proof.parallel:
        inserted = [
            _Part(1, (module,), row.axis, row.kind, (row.phase,))
            for row in program.inserted
            for module in row.modules
        ]
        follows = ("module", "axis", "kind", "phase")
        yield _count("proof", program.program, "inserted collectives", inserted, follows)
        fallbacks = [
            _Part(1, (module,), row.axis) for row in program.fallbacks for module in row.modules
        ]
        label = "ops that could not run sharded"
        yield _count("proof", program.program, label, fallbacks, ("module", "axis"))


def _split_tensors(tensors: TensorTable, *, is_fine: bool) -> list[_Part]:
    columns = zip(tensors.is_fine, tensors.module, tensors.phase, tensors.ranks, strict=True)
    return [
        _Part(modules=(module,), phases=(phase,), ranks=ranks)
        for is_tensor_fine, module, phase, ranks in columns
        if is_tensor_fine == is_fine
    ]
