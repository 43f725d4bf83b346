"""Calls that a dump has as columns, made into records one at a time, when a sentence needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from msgspec import Struct

from shardscope.hang.evidence import (
    CallColumns,
    CallSignature,
    CallSite,
    CallState,
    view_integers,
    view_numbers,
)
from shardscope.record.base import CollectiveKind, Phase, Source

_MAX_HOLES = 4  # positions per call, above which columns are not stored densely
_FREE_HOLES = 4096


class DumpedCall(Struct, frozen=True, gc=False):
    """A call as a dump has it: the fields of a `Collective` that are known.

    Sizes are None where they are not recorded; `is_located` says whether module and phase are.
    """

    rank: int
    order: int
    group: str
    group_order: int
    kind: CollectiveKind | None
    op: str = ""
    dtype: str = ""
    num_ranks: int = 0
    input_bytes: int | None = None
    output_bytes: int | None = None
    num_elements: int | None = None
    reduce_op: str | None = None
    peer: int | None = None
    is_rooted: bool = False
    is_from_any: bool = False
    is_located: bool = False
    owner: str | None = None
    phase: Phase | None = None
    source: Source | None = None
    api: str = ""
    thread: str = ""
    start_ns: int | None = None
    state: CallState = CallState.UNKNOWN


@final
class RankColumns:
    """The calls of a rank in a group, as columns, with the names that its records get."""

    def __init__(
        self,
        rank: int,
        group: str,
        num_ranks: int,
        columns: CallColumns,
        signatures: tuple[CallSignature, ...],
        sites: tuple[CallSite, ...],
    ) -> None:
        self.rank, self.group, self.num_ranks = rank, group, num_ranks
        self.columns, self.signatures, self.sites = columns, signatures, sites
        self.positions = view_integers(columns.positions)
        self.orders = view_integers(columns.orders)
        self.signature_ids = view_numbers(columns.signatures)
        self.site_ids = view_numbers(columns.sites)
        self.created_ns = view_integers(columns.created_ns)

    def make_call(self, index: int) -> DumpedCall:
        """The call at an index of the columns."""
        signature = self.signatures[self.signature_ids[index]]
        sites = self.sites
        site = sites[self.site_ids[index]] if sites else CallSite()
        return DumpedCall(
            rank=self.rank,
            order=self.orders[index],
            group=self.group,
            group_order=max(0, self.positions[index]),
            kind=signature.kind,
            op=signature.op,
            dtype=signature.dtype,
            num_ranks=self.num_ranks,
            input_bytes=signature.input_bytes,
            output_bytes=signature.output_bytes,
            num_elements=signature.num_elements,
            reduce_op=signature.reduce_op,
            peer=signature.peer,
            is_rooted=signature.is_rooted,
            is_from_any=signature.is_from_any,
            is_located=site.is_located,
            owner=site.module,
            phase=site.phase,
            source=site.source,
            api=site.api,
            thread=site.thread,
            start_ns=self.created_ns[index] or None,
            state=CallState(self.columns.states[index]),
        )

    def make_unlisted(self, position: int) -> DumpedCall:
        """A call that the rank has issued and that its dump does not list."""
        return DumpedCall(
            rank=self.rank,
            order=-1,
            group=self.group,
            group_order=position,
            kind=None,
            num_ranks=self.num_ranks,
        )


@final
class DumpedCollectives(Mapping[int, DumpedCall]):
    """The collectives of a rank in a group, by position."""

    def __init__(self, columns: RankColumns) -> None:
        self._columns = columns
        positions = columns.positions
        self._indices: dict[int, int] | range
        first = positions[0] if len(positions) else 0
        size = len(positions)
        if size and first >= 0 and positions[size - 1] - first == size - 1 and _is_dense(positions):
            self._first, self._indices = first, range(size)
        else:
            self._first = 0
            self._indices = {
                position: index for index, position in enumerate(positions) if position >= 0
            }

    def __getitem__(self, position: int) -> DumpedCall:
        return self._columns.make_call(self._find(position))

    def _find(self, position: int) -> int:
        index = position - self._first
        if isinstance(self._indices, range) and index not in self._indices:
            raise KeyError(position)
        return self._indices[index]

    def __contains__(self, position: object) -> bool:
        if not isinstance(position, int):
            return False
        return position - self._first in self._indices

    def __iter__(self) -> Iterator[int]:
        return (index + self._first for index in self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def state_at(self, position: int) -> CallState:
        """How far the collective at a position has come."""
        if position not in self:
            return CallState.UNKNOWN
        return CallState(self._columns.columns.states[self._find(position)])

    def map_signatures(self, numbers: list[int]) -> tuple[int, list[int]]:
        """The first position, and for each position from there the number of its signature.

        `numbers` gives a number for each signature of the rank; 0 is for positions without a call.
        """
        ids = self._columns.signature_ids
        if isinstance(self._indices, range):
            return self._first, [numbers[number] for number in ids]
        if not self._indices:
            return 0, []
        first, last = min(self._indices), max(self._indices)
        if last - first > _MAX_HOLES * len(self._indices) + _FREE_HOLES:
            first = last - _FREE_HOLES
        dense = [0] * (last - first + 1)
        for position, index in self._indices.items():
            if position >= first:
                dense[position - first] = numbers[ids[index]]
        return first, dense


def _is_dense(positions: memoryview[int]) -> bool:
    """Whether positions rise by 1 each."""
    first = positions[0]
    return positions.tolist() == list(range(first, first + len(positions)))
