"""Data of the memory view, with as many samples as a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from msgspec.structs import replace

from shardscope.record import (
    AllocationTable,
    MemoryKind,
    MemoryProfile,
    MemorySample,
    Phase,
    Recording,
    compress_ranks,
    format_ranks,
)
from shardscope.record.units import format_bytes, plural
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.html.page_views import Allocations, MemoryCurve, PeakRow, PhaseRange
from shardscope.report.model.memory_peaks import most_bytes
from shardscope.report.text.memory_profile import (
    describe_basis,
    describe_room,
)

_KINDS = list(MemoryKind)
_MAX_SAMPLES = 1_500
_MAX_REMAINING_SAMPLES = 3_000  # of all curves but the first, together
_MIN_SAMPLES = 40
_MAX_ROWS = 5_000  # modules and kinds at the peak
_MAX_REMAINING_ROWS = 30  # on ranks other than the one that needs most
_MAX_CURVES = 64
_MAX_ALLOCATIONS = 40_000
_MAX_REMAINING_ALLOCATIONS = 40_000  # of all curves but the first, together


def make_memory(recording: Recording, index: Index) -> tuple[MemoryCurve, ...]:
    """Make curves, the rank that needs most first and in full; equal ranks share a curve."""
    ranks: dict[MemoryProfile, list[int]] = {}
    for profile in recording.memory:
        ranks.setdefault(replace(profile, rank=0), []).append(profile.rank)
    curves = sorted(ranks.items(), key=lambda item: (-most_bytes(item[0]), item[1]))[:_MAX_CURVES]
    num_remaining = max(1, len(curves) - 1)
    num_allocations = _MAX_REMAINING_ALLOCATIONS // num_remaining
    limit = min(_MAX_SAMPLES, max(_MIN_SAMPLES, _MAX_REMAINING_SAMPLES // num_remaining))
    return tuple(
        _make_curve(
            profile,
            index,
            ranks=same,
            max_samples=limit if at else _MAX_SAMPLES,
            max_rows=_MAX_REMAINING_ROWS if at else _MAX_ROWS,
            max_allocations=num_allocations if at else _MAX_ALLOCATIONS,
        )
        for at, (profile, same) in enumerate(curves)
    )


def thin_samples(profile: MemoryProfile, *, limit: int) -> list[MemorySample]:
    """Keep at most `limit` samples: first, last, the peak, and the highest of each interval."""
    samples = profile.samples
    if len(samples) <= limit:
        return list(samples)
    sizes = [sum(sample.num_bytes) for sample in samples]
    positions = {0, len(samples) - 1, find_peak(samples, profile)}
    num_stretches = max(1, limit - len(positions))
    for stretch in range(num_stretches):
        first = stretch * len(samples) // num_stretches
        last = (stretch + 1) * len(samples) // num_stretches
        positions.add(max(range(first, last), key=sizes.__getitem__))
    return [samples[at] for at in sorted(positions)]


def find_peak(samples: Sequence[MemorySample], profile: MemoryProfile) -> int:
    """Return the position of the peak, or of the largest sample if none has the peak's order."""
    matches = (at for at, sample in enumerate(samples) if sample.order == profile.peak_order)
    at = next(matches, None)
    if at is None:
        at = max(range(len(samples)), key=lambda at: sum(samples[at].num_bytes), default=-1)
    return at


def _make_curve(
    profile: MemoryProfile,
    index: Index,
    *,
    ranks: list[int],
    max_samples: int,
    max_rows: int,
    max_allocations: int,
) -> MemoryCurve:
    samples = thin_samples(profile, limit=max_samples)
    columns = _by_kind(samples)
    table = profile.allocations
    used_kinds = {use.kind for use in profile.at_peak}
    if table is not None:
        used_kinds |= {_KINDS[kind] for kind in set(table.kind)}
    kinds = [kind for kind in MemoryKind if kind in used_kinds or any(columns[kind])]
    positions = {kind: position for position, kind in enumerate(kinds)}
    at_peak = sorted(profile.at_peak, key=lambda use: -use.num_bytes)[:max_rows]
    return MemoryCurve(
        ranks=format_ranks(compress_ranks(sorted(set(ranks)))),
        kinds=tuple(kind.replace("_", " ") for kind in kinds),
        order=tuple(sample.order for sample in samples),
        num_bytes=tuple(columns[kind] for kind in kinds),
        module=tuple(index.module(sample.module) for sample in samples),
        phases=_find_phases(samples),
        peak=find_peak(samples, profile),
        peak_bytes=profile.peak_bytes,
        peak_phase=profile.peak_phase,
        peak_module=index.module(profile.peak_module),
        at_peak=tuple(
            PeakRow(
                kind=positions[use.kind],
                module=index.module(use.module),
                num_bytes=use.num_bytes,
            )
            for use in at_peak
        ),
        allocations=_make_allocations(table, index, positions, limit=max_allocations)
        if table is not None
        else None,
        first_peak_bytes=profile.first_peak_bytes,
        reserved_bytes=profile.reserved_bytes,
        needed_bytes=profile.needed_bytes,
        device_bytes=profile.device_bytes,
        room=_describe_room(profile),
        caveat=describe_basis(profile),
    )


def _make_allocations(
    table: AllocationTable, index: Index, positions: dict[MemoryKind, int], *, limit: int
) -> Allocations:
    """Make the columns of the `limit` largest rows."""
    rows = range(len(table.start))
    if len(rows) > limit:
        by_size = sorted(rows, key=table.num_bytes.__getitem__, reverse=True)
        left_out, chosen = by_size[limit:], sorted(by_size[:limit])
    else:
        left_out, chosen = [], list(rows)
    modules = [index.module(name) for name in table.modules]
    lines = [index.source(source) for source in table.sources]
    return Allocations(
        first=table.first_order - 1,
        last=table.last_order,
        start=tuple(table.start[row] for row in chosen),
        end=tuple(table.end[row] for row in chosen),
        num_bytes=tuple(table.num_bytes[row] for row in chosen),
        kind=tuple(positions[_KINDS[table.kind[row]]] for row in chosen),
        phase=tuple(table.phase[row] for row in chosen),
        module=tuple(_at(modules, table.module[row], index.module(None)) for row in chosen),
        line=tuple(_at(lines, table.source[row], NOWHERE) for row in chosen),
        phases=tuple(map(str, Phase)),
        note=_describe_left_out(table, left_out),
    )


def _at(positions: list[int], position: int, otherwise: int) -> int:
    return otherwise if position < 0 else positions[position]


def _describe_left_out(table: AllocationTable, left_out: list[int]) -> str:
    number = table.num_left_out + len(left_out)
    if not number:
        return ""
    size = max(table.max_left_out_bytes, *(table.num_bytes[row] for row in left_out), 0)
    return f"{plural(number, 'allocation')} of at most {format_bytes(size)} are not listed"


def _describe_room(profile: MemoryProfile) -> str:
    if profile.device_bytes is None:
        return ""
    return describe_room(profile.device_bytes, profile.needed_bytes).plain


def _by_kind(samples: Sequence[MemorySample]) -> dict[MemoryKind, tuple[int, ...]]:
    return {
        kind: tuple(sample.num_bytes[at] if at < len(sample.num_bytes) else 0 for sample in samples)
        for at, kind in enumerate(MemoryKind)
    }


def _find_phases(samples: Sequence[MemorySample]) -> tuple[PhaseRange, ...]:
    ranges, first = [], 0
    for phase, run in groupby(samples, key=lambda sample: sample.phase):
        last = first + len(list(run)) - 1
        ranges.append(PhaseRange(phase=phase, first=first, last=last))
        first = last + 1
    return tuple(ranges)
