"""The figures of a recording that are worth following from step to step and from run to run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from shardscope.record import (
    Collective,
    Coverage,
    Level,
    MemoryKind,
    Recording,
    Severity,
    Verdict,
    count_ranks,
)
from shardscope.report.names import make_inert
from shardscope.report.traffic import Tally, name_axis, tally

__all__ = ["list_scalars"]

Scalars = Iterator[tuple[str, float]]


def list_scalars(recording: Recording) -> dict[str, float]:
    """Figures by name, as `comm_by_axis/tp/wire_bytes`.

    Communication is a rank's, the mean where ranks differ, so that parts add up to their whole;
    all else is that of the rank that has most. What was not recorded has no figure; `run/` says
    what the others are of.
    """
    makers = (
        _list_traffic,
        _list_memory,
        _list_compiler,
        _list_coverage,
        _list_findings,
        _list_run,
    )
    return {make_inert(name): value for make in makers for name, value in make(recording)}


def _list_traffic(recording: Recording) -> Scalars:
    run = recording.run
    if not recording.collectives and "trace" not in run.instruments:
        return
    num_ranks = max(1, count_ranks(run.ranks), len({call.rank for call in recording.collectives}))
    parts: dict[str, Callable[[Collective], str]] = {
        "axis": lambda call: name_axis(call, run.world_size),
        "kind": lambda call: str(call.kind),
        "phase": lambda call: str(call.phase),
    }
    yield from _sum_up("comm", recording, lambda _: "", num_ranks)
    for name, read in parts.items():
        yield from _sum_up(f"comm_by_{name}", recording, read, num_ranks)


def _sum_up(
    name: str, recording: Recording, read: Callable[[Collective], str], num_ranks: int
) -> Scalars:
    sums: dict[str, Tally] = defaultdict(Tally)
    if name == "comm":
        sums[""] = Tally()  # nothing said is a figure, too
    for call in recording.collectives:
        sums[read(call)] += tally(call)
    for part, one in sorted(sums.items()):
        place = f"{name}/{part}" if part else name
        yield f"{place}/count", one.count / num_ranks
        yield f"{place}/input_bytes", one.input_bytes / num_ranks
        yield f"{place}/wire_bytes", one.wire_bytes / num_ranks


def _list_memory(recording: Recording) -> Scalars:
    if not recording.memory:
        return
    most = max(recording.memory, key=lambda one: one.peak_bytes)
    for name in ("peak_bytes", "first_peak_bytes", "reserved_bytes", "needed_bytes"):
        value = getattr(most, name)
        if value is not None:
            yield f"memory/{name}", value
    held: Counter[MemoryKind] = Counter()
    for use in most.at_peak:
        held[use.kind] += use.num_bytes
    for kind in MemoryKind:
        yield f"memory_at_peak/{kind}_bytes", held[kind]


def _list_compiler(recording: Recording) -> Scalars:
    told = recording.explanations
    if not told:
        return
    yield "compiler/graphs", max(one.num_graphs for one in told)
    yield "compiler/graph_breaks", max(one.num_break_sites for one in told)
    yield "compiler/recompiles", max(one.num_recompiles for one in told)
    yield "compiler/skipped_frames", max(one.num_skipped_frames for one in told)


def _list_coverage(recording: Recording) -> Scalars:
    for level in Level:
        told = [one for one in recording.coverage if one.level is level]
        for verdict in Verdict if told else ():
            yield f"coverage/{level}/{verdict}", max(_count_ops(one, verdict) for one in told)


def _count_ops(coverage: Coverage, verdict: Verdict) -> int:
    return sum(one.verdict is verdict for one in coverage.ops)


def _list_findings(recording: Recording) -> Scalars:
    severities = Counter(one.severity for one in recording.findings)
    for severity in Severity:
        yield f"findings/{severity}", severities[severity]
    yield "findings/gaps", len(recording.gaps)


def _list_run(recording: Recording) -> Scalars:
    """What to know of the other figures: whether they are simulated, and what they are of."""
    run = recording.run
    yield "run/is_simulated", float(run.is_simulated)
    yield "run/recorded_ranks", count_ranks(run.ranks)
    yield "run/world_size", run.world_size
    if run.num_forwards is not None:
        yield "run/forward_passes", run.num_forwards
