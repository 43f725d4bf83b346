"""The two recordings that are compared, and what all areas want to know of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar, final

from shardscope.record import Recording
from shardscope.report.compare.holdings import Holdings
from shardscope.report.compare.names import clean_names
from shardscope.report.compare.rank_pairs import list_common_ranks, note_ranks
from shardscope.report.compare.traffic import CallTable

__all__ = ["Pair"]

_Part = TypeVar("_Part")


@final
class Pair:
    """Each of its pairs has the first recording's first."""

    def __init__(self, before: Recording, after: Recording) -> None:
        self.both = (before, after)
        self.common = list_common_ranks(before, after)
        self.names = clean_names(before, after)

    def take(self, read: Callable[[Recording], _Part]) -> tuple[_Part, _Part]:
        """The same part of both."""
        return read(self.both[0]), read(self.both[1])

    @cached_property
    def calls(self) -> tuple[CallTable, CallTable]:
        """Collectives."""
        before, after = self.both
        return CallTable(before, self.names[0]), CallTable(after, self.names[1])

    @cached_property
    def holdings(self) -> tuple[Holdings, Holdings]:
        """Parameters."""
        before, after = self.both
        return (
            Holdings(before, self.names[0], self.common),
            Holdings(after, self.names[1], self.common),
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Clean names of all modules of either."""
        return tuple(sorted({*self.names[0].names, *self.names[1].names}))

    def note_ranks(self) -> str:
        """Which ranks were compared, where that is not plain."""
        return note_ranks(*self.both, self.common)
