"""Figures of a page by view, which the browser subtracts from those of another page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from shardscope.report.html.page import Communication, Figure, Page
from shardscope.report.html.page_views import MemoryCurve

_SENT, _ISSUED = "bytes sent per rank (ring estimate)", "collectives per rank"
_AT_PEAK = "in use at the peak"


def list_figures(page: Page) -> tuple[Figure, ...]:
    """List the figures of every view that has data; those of ranks are of the one with most."""
    return (
        *_list_findings(page),
        *(_list_traffic(page.communication) if page.communication is not None else ()),
        *(_list_memory(page.memory[0]) if page.memory else ()),
        *_list_modules(page),
        *_list_sharding(page),
        *_list_coverage(page),
        *_list_compiler(page),
        *_list_proof(page),
    )


def _list_findings(page: Page) -> Iterator[Figure]:
    counts = Counter({"error": 0, "warning": 0, "info": 0})
    for finding in page.findings:
        counts[finding.severity] += finding.count
    for severity, count in counts.items():
        yield _count("overview", "findings", severity, count)
    rules: Counter[str] = Counter()
    for finding in page.findings:
        rules[finding.rule] += finding.count
    for rule, count in sorted(rules.items()):
        yield _count("overview", "findings by rule", rule, count)
    yield _count("overview", "findings", "gaps", len(page.gaps))


def _list_traffic(communication: Communication) -> Iterator[Figure]:
    """Sums by axis, kind, phase and cause, each of the rank that sends most in it."""
    traffic = communication.traffic
    names = communication.axes, communication.kinds, communication.phases, communication.causes
    sums: defaultdict[tuple[str, str], defaultdict[int, list[int]]] = defaultdict(
        lambda: defaultdict(lambda: [0, 0])
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
            total = sums[group][rank_set]
            total[0] += wire_bytes
            total[1] += count
    for (by, label), by_rank in sums.items():
        wire_bytes, count = max(by_rank.values())
        yield _bytes("communication", f"{_SENT}{by}", label, wire_bytes)
        yield _count("communication", f"{_ISSUED}{by}", label, count)


def _list_memory(curve: MemoryCurve) -> Iterator[Figure]:
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


def _list_modules(page: Page) -> Iterator[Figure]:
    """Count modules of each class; those whose class was not recorded are only names."""
    types = Counter(filter(None, page.modules.type))
    if types:
        yield _count("modules", "modules", "all", types.total())
    for kind, number in sorted(types.items()):
        yield _count("modules", "modules", kind, number)


def _list_sharding(page: Page) -> Iterator[Figure]:
    table = page.sharding
    if table is None:
        return
    for label, num_bytes in (
        ("all", table.global_bytes),
        ("on one rank", table.local_bytes),
        ("replicated", table.replicated_bytes),
    ):
        if num_bytes is not None:
            yield _bytes("sharding", "bytes of parameters", label, num_bytes)
    placements = Counter(placement or "not sharded" for placement in table.parameters.placement)
    for placement, number in sorted(placements.items()):
        yield _count("sharding", "tensors by placement", placement, number)


def _list_coverage(page: Page) -> Iterator[Figure]:
    for level in page.coverage:
        for verdict, count in zip(level.verdicts, level.counts, strict=True):
            yield _count("coverage", f"ops, {level.level}", verdict, count)


def _list_compiler(page: Page) -> Iterator[Figure]:
    for item in page.compiler.explanations if page.compiler is not None else ():
        for label, number in (
            ("graphs", len(item.graphs)),
            ("ops", sum(graph.num_ops for graph in item.graphs)),
            ("lines that break graphs", len(item.break_sites)),
            ("graph breaks", item.num_break_events),
            ("recompilations", len(item.recompiles)),
            ("functions that ran eagerly", len(item.skipped_frames)),
            ("guards", sum(len(frame.guard) + frame.left_out for frame in item.guards)),
        ):
            yield _count("compiler", item.target, label, number)


def _list_proof(page: Page) -> Iterator[Figure]:
    if page.proof is None:
        return
    for item in page.proof.parity:
        verdicts = Counter(item.tensors.is_fine)
        yield _count("proof", f"parity on {item.mesh}", "tensors that differ", verdicts[False])
        yield _count("proof", f"parity on {item.mesh}", "tensors that agree", verdicts[True])
    for program in page.proof.parallel:
        number = sum(len(row.modules) for row in program.inserted)
        yield _count("proof", program.program, "inserted collectives", number)
        fallbacks = sum(len(row.modules) for row in program.fallbacks)
        yield _count("proof", program.program, "ops that could not run sharded", fallbacks)


def _count(view: str, group: str, label: str, value: int) -> Figure:
    return Figure(view=view, group=group, label=label, unit="count", value=value)


def _bytes(view: str, group: str, label: str, value: int) -> Figure:
    return Figure(view=view, group=group, label=label, unit="bytes", value=value)
