"""Exports a recording's metrics as TensorBoard scalars, in an event file."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

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
from shardscope.record.recording import name_axis
from shardscope.record.text import sanitize_text
from shardscope.report.export.protobuf import (
    make_bytes,
    make_double,
    make_float,
    make_text,
    make_varint,
)
from shardscope.report.model.traffic_totals import TrafficTotals, count_traffic

Scalars = Iterator[tuple[str, float]]


def list_scalars(recording: Recording) -> dict[str, float]:
    """Yield metrics by name, such as `comm_by_axis/tp/wire_bytes`.

    Communication is given per rank, as the mean over ranks, so that parts add up to their total;
    other metrics are those of the rank with the largest value. What was not recorded has no metric;
    `run/` describes what the metrics cover.
    """
    makers = (
        _list_traffic,
        _list_memory,
        _list_compiler,
        _list_coverage,
        _list_findings,
        _list_run,
    )
    return {sanitize_text(name): value for make in makers for name, value in make(recording)}


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
    sums: dict[str, TrafficTotals] = defaultdict(TrafficTotals)
    if name == "comm":
        sums[""] = TrafficTotals()  # zero collectives are a result, too
    for call in recording.collectives:
        sums[read(call)] += count_traffic(call)
    for part, totals in sorted(sums.items()):
        prefix = f"{name}/{part}" if part else name
        yield f"{prefix}/count", totals.count / num_ranks
        yield f"{prefix}/input_bytes", totals.input_bytes / num_ranks
        yield f"{prefix}/wire_bytes", totals.wire_bytes / num_ranks


def _list_memory(recording: Recording) -> Scalars:
    if not recording.memory:
        return
    most = max(recording.memory, key=lambda profile: profile.peak_bytes)
    for name in ("peak_bytes", "first_peak_bytes", "reserved_bytes", "needed_bytes"):
        value = getattr(most, name)
        if value is not None:
            yield f"memory/{name}", value
    bytes_by_kind: Counter[MemoryKind] = Counter()
    for use in most.at_peak:
        bytes_by_kind[use.kind] += use.num_bytes
    for kind in MemoryKind:
        yield f"memory_at_peak/{kind}_bytes", bytes_by_kind[kind]


def _list_compiler(recording: Recording) -> Scalars:
    explanations = recording.explanations
    if not explanations:
        return
    yield "compiler/graphs", max(explanation.num_graphs for explanation in explanations)
    yield "compiler/graph_breaks", max(explanation.num_break_sites for explanation in explanations)
    yield "compiler/recompiles", max(explanation.num_recompiles for explanation in explanations)
    yield (
        "compiler/skipped_frames",
        max(explanation.num_skipped_frames for explanation in explanations),
    )


def _list_coverage(recording: Recording) -> Scalars:
    for level in Level:
        coverages = [coverage for coverage in recording.coverage if coverage.level is level]
        for verdict in Verdict if coverages else ():
            yield (
                f"coverage/{level}/{verdict}",
                max(_count_ops(coverage, verdict) for coverage in coverages),
            )


def _count_ops(coverage: Coverage, verdict: Verdict) -> int:
    return sum(op.verdict is verdict for op in coverage.ops)


def _list_findings(recording: Recording) -> Scalars:
    severities = Counter(finding.severity for finding in recording.findings)
    for severity in Severity:
        yield f"findings/{severity}", severities[severity]
    yield "findings/gaps", len(recording.gaps)


def _list_run(recording: Recording) -> Scalars:
    """Yield metrics of the run itself: whether it is simulated, and its size."""
    run = recording.run
    yield "run/is_simulated", float(run.is_simulated)
    yield "run/recorded_ranks", count_ranks(run.ranks)
    yield "run/world_size", run.world_size
    if run.num_forwards is not None:
        yield "run/forward_passes", run.num_forwards


_VERSION = "brain.Event:2"
_CASTAGNOLI = 0x82F63B78  # polynomial of CRC-32C, lowest bit first
_MASK = 0xA282EAD8


def render_tensorboard(recording: Recording, *, step: int = 0) -> Iterator[bytes]:
    """Render an event file; TensorBoard reads files with `tfevents` in their names."""
    yield _frame(make_double(1, 0.0) + make_text(3, _VERSION))
    scalars = list_scalars(recording)
    yield _frame(make_double(1, 0.0) + make_varint(2, step) + make_bytes(5, _summarize(scalars)))


def _summarize(scalars: Mapping[str, float]) -> bytes:
    values = (make_text(1, tag) + make_float(2, value) for tag, value in scalars.items())
    return b"".join(make_bytes(1, value) for value in values)


def _frame(record: bytes) -> bytes:
    """Frame a record: its length and its data, each with a checksum."""
    length = struct.pack("<Q", len(record))
    return length + _checksum(length) + record + _checksum(record)


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    masked = (crc >> 15 | crc << 17) + _MASK  # a CRC of CRCs is weak
    return struct.pack("<I", masked & 0xFFFFFFFF)


def _make_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (_CASTAGNOLI if value & 1 else 0) for value in table]
    return table


_TABLE = _make_table()
