"""Memory of two recordings: peaks of each rank, and who holds what at the highest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from shardscope.record import MemoryProfile
from shardscope.report.compare.brief import AT_PEAK
from shardscope.report.compare.changes import NO_MODULE, Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import Fact, match_facts
from shardscope.report.compare.names import CleanNames
from shardscope.report.compare.rank_pairs import join_ranks
from shardscope.report.units import format_bytes

__all__ = ["compare_memory", "total_memory"]

Profiles = Sequence[MemoryProfile]


def compare_memory(
    before: Profiles, after: Profiles, common: tuple[int, ...], names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Peaks rank by rank where both have the same ranks; modules of the rank that needs most."""
    first, second = _find_worst(before), _find_worst(after)
    by_rank = [{one.rank: one for one in profiles} for profiles in (before, after)]
    ranks = [rank for rank in common if all(rank in one for one in by_rank)]
    pairs = {(rank,): (by_rank[0][rank], by_rank[1][rank]) for rank in ranks}
    yield from join_ranks(
        {
            mine: list(_compare_totals(*pair))
            for mine, pair in (pairs or {(0,): (first, second)}).items()
        }
    )
    yield from match_facts(
        Area.MEMORY, _list_holdings(first, names[0]), _list_holdings(second, names[1])
    )


def total_memory(before: Profiles, after: Profiles) -> AreaTotal:
    """The highest peaks."""
    peaks = [format_bytes(_most(_find_worst(one))) for one in (before, after)]
    return AreaTotal(area=Area.MEMORY, before=peaks[0], after=peaks[1])


def _find_worst(profiles: Profiles) -> MemoryProfile:
    return max(profiles, key=_most)


def _most(profile: MemoryProfile) -> int:
    return max(profile.peak_bytes, profile.first_peak_bytes or 0)


_TOTALS = {
    "peak": "peak_bytes",
    "peak of the first step": "first_peak_bytes",
    "reserved by the allocator": "reserved_bytes",
    "needed on a device": "needed_bytes",
}


def _compare_totals(before: MemoryProfile, after: MemoryProfile) -> Iterator[Change]:
    """What both recorded: a figure that one does not have says nothing of a change."""
    known = {
        what: field
        for what, field in _TOTALS.items()
        if getattr(before, field) is not None and getattr(after, field) is not None
    }
    facts = (list(_list_totals(profile, known)) for profile in (before, after))
    yield from match_facts(Area.MEMORY, *facts)


def _list_totals(profile: MemoryProfile, fields: Mapping[str, str]) -> Iterator[Fact]:
    sizes = {what: getattr(profile, field) for what, field in fields.items()}
    kinds: Counter[str] = Counter()
    for use in profile.at_peak:
        kinds[f"{_say(use.kind)}{AT_PEAK}"] += use.num_bytes
    for what, size in (sizes | kinds).items():
        yield Fact(what=what, value=size, unit=Unit.BYTES, badness=size)
    if profile.device_bytes is not None and profile.needed_bytes is not None:
        fits = profile.needed_bytes <= profile.device_bytes
        words = "fits" if fits else "does not fit"
        what = f"on a device of {format_bytes(profile.device_bytes)}"
        yield Fact(what=what, value=words, unit=Unit.WORDS, badness=float(not fits))


def _list_holdings(profile: MemoryProfile, names: CleanNames) -> Iterator[Fact]:
    held: Counter[tuple[str, str]] = Counter()
    for use in profile.at_peak:
        module = NO_MODULE if use.module is None else names.clean(use.module)
        held[module, f"{_say(use.kind)}{AT_PEAK}"] += use.num_bytes
    for (module, what), size in held.items():
        if size:
            yield Fact(module=module, what=what, value=size, unit=Unit.BYTES, badness=size)


def _say(kind: str) -> str:
    return kind.replace("_", " ")
