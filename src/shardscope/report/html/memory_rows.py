"""Data of the memory view, with as many samples as a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from msgspec.structs import replace

from shardscope.record import (
    MemoryKind,
    MemoryProfile,
    MemorySample,
    Recording,
    compress_ranks,
    format_ranks,
)
from shardscope.report.html.page_index import Index
from shardscope.report.html.page_views import MemoryCurve, PeakRow, PhaseRange
from shardscope.report.text.memory_profile import ESTIMATE, describe_room, most_bytes

_MAX_SAMPLES = 1_500
_MAX_REMAINING_SAMPLES = 3_000  # of all curves but the first, together
_MIN_SAMPLES = 40
_MAX_ROWS = 5_000  # modules and kinds at the peak
_MAX_REMAINING_ROWS = 30  # on ranks other than the one that needs most
_MAX_CURVES = 64


def make_memory(recording: Recording, index: Index) -> tuple[MemoryCurve, ...]:
    """Make curves, the rank that needs most first and in full; equal ranks share a curve."""
    ranks: dict[MemoryProfile, list[int]] = {}
    for profile in recording.memory:
        ranks.setdefault(replace(profile, rank=0), []).append(profile.rank)
    curves = sorted(ranks.items(), key=lambda item: (-most_bytes(item[0]), item[1]))[:_MAX_CURVES]
    num_remaining = max(1, len(curves) - 1)
    limit = min(_MAX_SAMPLES, max(_MIN_SAMPLES, _MAX_REMAINING_SAMPLES // num_remaining))
    return tuple(
        _make_curve(
            profile,
            index,
            ranks=same,
            max_samples=limit if at else _MAX_SAMPLES,
            max_rows=_MAX_REMAINING_ROWS if at else _MAX_ROWS,
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
    profile: MemoryProfile, index: Index, *, ranks: list[int], max_samples: int, max_rows: int
) -> MemoryCurve:
    samples = thin_samples(profile, limit=max_samples)
    columns = _by_kind(samples)
    used_kinds = {use.kind for use in profile.at_peak}
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
        first_peak_bytes=profile.first_peak_bytes,
        reserved_bytes=profile.reserved_bytes,
        needed_bytes=profile.needed_bytes,
        device_bytes=profile.device_bytes,
        room=_describe_room(profile),
        caveat=ESTIMATE,
    )


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
