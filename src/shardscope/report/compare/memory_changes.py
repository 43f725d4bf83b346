"""Compares memory, and matches the ranks of two recordings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from shardscope.record import MemoryProfile, Recording, compress_ranks, expand_ranks, format_ranks
from shardscope.record.units import format_bytes, plural
from shardscope.report.compare.changes import AT_PEAK, NO_MODULE, Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import CleanNames, Fact, match_facts


def list_common_ranks(before: Recording, after: Recording) -> tuple[int, ...]:
    """List ranks in both recordings; none if world sizes differ, as ranks do not correspond."""
    if before.run.world_size != after.run.world_size:
        return ()
    if before.run.ranks == after.run.ranks:
        return expand_ranks(before.run.ranks)
    return tuple(sorted({*expand_ranks(before.run.ranks)} & {*expand_ranks(after.run.ranks)}))


def note_ranks(before: Recording, after: Recording, common: tuple[int, ...]) -> str:
    """Describe which ranks were compared, unless that is obvious."""
    sizes = [before.run.world_size, after.run.world_size]
    if sizes[0] != sizes[1]:
        worlds = " and ".join(plural(size, "rank") for size in sizes)
        return f"the worlds have {worlds}: the busiest rank of each is compared"
    if not common:
        return "the recordings have no rank in common: the busiest rank of each is compared"
    if before.run.ranks != after.run.ranks:
        return f"only ranks that both recordings have are compared: {_name(common)}"
    return ""


def join_ranks(changes: Mapping[Iterable[int], Iterable[Change]]) -> list[Change]:
    """Join equal changes of several ranks; the result names the ranks unless all have it."""
    ranks: dict[Change, list[int]] = {}
    every: list[int] = []
    for own_ranks, rank_changes in changes.items():
        every.extend(own_ranks)
        for change in rank_changes:
            ranks.setdefault(change, []).extend(own_ranks)
    return [
        change if len(change_ranks) == len(every) else _add_ranks(change, change_ranks)
        for change, change_ranks in ranks.items()
    ]


def _add_ranks(change: Change, ranks: list[int]) -> Change:
    word = "rank" if len(ranks) == 1 else "ranks"
    return replace(change, what=f"{change.what}, {word} {_name(ranks)}")


def _name(ranks: Iterable[int]) -> str:
    return format_ranks(compress_ranks(sorted(ranks)))


Profiles = Sequence[MemoryProfile]


def compare_memory(
    before: Profiles, after: Profiles, common: tuple[int, ...], names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Compare peaks of common ranks, and modules of the rank that needs most memory."""
    first, second = _find_worst(before), _find_worst(after)
    by_rank = [{profile.rank: profile for profile in profiles} for profiles in (before, after)]
    ranks = [rank for rank in common if all(rank in profiles for profiles in by_rank)]
    pairs = {(rank,): (by_rank[0][rank], by_rank[1][rank]) for rank in ranks}
    yield from join_ranks(
        {
            pair_ranks: list(_compare_totals(*pair))
            for pair_ranks, pair in (pairs or {(0,): (first, second)}).items()
        }
    )
    yield from match_facts(
        Area.MEMORY, _list_holdings(first, names[0]), _list_holdings(second, names[1])
    )


def total_memory(before: Profiles, after: Profiles) -> AreaTotal:
    """Format the highest peak of each recording."""
    peaks = [format_bytes(_most(_find_worst(profiles))) for profiles in (before, after)]
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
    """Compare the values that both recordings have."""
    known = {
        label: field
        for label, field in _TOTALS.items()
        if getattr(before, field) is not None and getattr(after, field) is not None
    }
    facts = (list(_list_totals(profile, known)) for profile in (before, after))
    yield from match_facts(Area.MEMORY, *facts)


def _list_totals(profile: MemoryProfile, fields: Mapping[str, str]) -> Iterator[Fact]:
    sizes = {label: getattr(profile, field) for label, field in fields.items()}
    kinds: Counter[str] = Counter()
    for use in profile.at_peak:
        kinds[f"{_format_kind(use.kind)}{AT_PEAK}"] += use.num_bytes
    for label, size in (sizes | kinds).items():
        yield Fact(what=label, value=size, unit=Unit.BYTES, badness=size)
    if profile.device_bytes is not None and profile.needed_bytes is not None:
        fits = profile.needed_bytes <= profile.device_bytes
        words = "fits" if fits else "does not fit"
        label = f"on a device of {format_bytes(profile.device_bytes)}"
        yield Fact(what=label, value=words, unit=Unit.WORDS, badness=float(not fits))


def _list_holdings(profile: MemoryProfile, names: CleanNames) -> Iterator[Fact]:
    sizes: Counter[tuple[str, str]] = Counter()
    for use in profile.at_peak:
        module = NO_MODULE if use.module is None else names.clean(use.module)
        sizes[module, f"{_format_kind(use.kind)}{AT_PEAK}"] += use.num_bytes
    for (module, label), size in sizes.items():
        if size:
            yield Fact(module=module, what=label, value=size, unit=Unit.BYTES, badness=size)


def _format_kind(kind: str) -> str:
    return kind.replace("_", " ")
