"""Which rank of one recording is compared with which of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from shardscope.record import Recording, compress_ranks, expand_ranks, format_ranks
from shardscope.report.compare.changes import Change
from shardscope.report.layout import plural

__all__ = ["join_ranks", "list_common_ranks", "note_ranks"]


def list_common_ranks(before: Recording, after: Recording) -> tuple[int, ...]:
    """Ranks that are in both; none where the worlds differ, as a rank is another there."""
    if before.run.world_size != after.run.world_size:
        return ()
    if before.run.ranks == after.run.ranks:
        return expand_ranks(before.run.ranks)
    return tuple(sorted({*expand_ranks(before.run.ranks)} & {*expand_ranks(after.run.ranks)}))


def note_ranks(before: Recording, after: Recording, common: tuple[int, ...]) -> str:
    """A sentence on what was compared with what, where that is not plain."""
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
    """Changes that several ranks share become one, which names the ranks unless all share it."""
    ranks: dict[Change, list[int]] = {}
    every: list[int] = []
    for mine, some in changes.items():
        every.extend(mine)
        for change in some:
            ranks.setdefault(change, []).extend(mine)
    return [
        change if len(mine) == len(every) else _add_ranks(change, mine)
        for change, mine in ranks.items()
    ]


def _add_ranks(change: Change, ranks: list[int]) -> Change:
    word = "rank" if len(ranks) == 1 else "ranks"
    return replace(change, what=f"{change.what}, {word} {_name(ranks)}")


def _name(ranks: Iterable[int]) -> str:
    return format_ranks(compress_ranks(sorted(ranks)))
