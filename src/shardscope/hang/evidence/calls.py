"""The calls of a rank in columns: 2,000 calls of 1,024 ranks are compared without a record each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, final

from msgspec import Struct

from shardscope.record.base import CollectiveKind, Phase, Source
from shardscope.record.recording import DroppedCollectives

TRANSFERS = (CollectiveKind.SEND, CollectiveKind.RECV)
_INTEGER: Final = "q"  # type codes of arrays
_NUMBER: Final = "I"


class CallState(IntEnum):
    """How far a call had come when its source was written."""

    UNKNOWN = 0
    ISSUED = 1
    STARTED = 2  # its kernel runs, or waits for the other ranks
    DONE = 3
    FAILED = 4  # given up: it timed out or was aborted


class CallSignature(Struct, frozen=True, gc=False):
    """A call without its position and time: equal calls of a rank share a signature.

    `kind` is None for an op that has no kind here. Sizes are None, `dtype` and `op` empty, where
    the source does not record them. `peer` is a global rank; `is_rooted` says whether the source
    records peers, roots and reductions of collectives.
    """

    kind: CollectiveKind | None
    op: str = ""
    dtype: str = ""
    input_bytes: int | None = None
    output_bytes: int | None = None
    reduce_op: str | None = None
    peer: int | None = None
    is_rooted: bool = False
    is_from_any: bool = False  # a receive from any rank
    num_elements: int | None = None  # where only these are recorded, not bytes


class CallSite(Struct, frozen=True, gc=False):
    """Where a rank issued calls. `is_located` says whether module and phase are recorded."""

    source: Source | None = None
    is_located: bool = False
    module: str | None = None
    phase: Phase | None = None
    api: str = ""
    thread: str = ""


class CallColumns(Struct, frozen=True, gc=False):
    """The calls of a rank in a group, oldest first, as columns of equal length.

    `group` indexes the groups of the rank, `signatures` and `sites` its signatures and sites.
    Collectives are at their `positions` in the group, transfers at -1. `orders` count all calls of
    the rank. Times are nanoseconds, 0 where not known. Columns of integers are bytes, which
    `view_integers` and `view_numbers` read. `num_issued` and `num_done` are positions that may be
    outside of the columns; `num_done` is None if completion is not recorded.
    `num_transfers` of the calls are sends and receives. `dropped` counts calls before those listed.
    """

    group: int
    positions: bytes
    orders: bytes
    signatures: bytes
    sites: bytes
    states: bytes
    created_ns: bytes
    started_ns: bytes
    done_ns: bytes
    duration_ns: bytes
    num_issued: int
    num_done: int | None = None
    num_transfers: int = 0
    dropped: tuple[DroppedCollectives, ...] = ()

    def __len__(self) -> int:
        return len(self.states)


def view_integers(column: bytes) -> memoryview[int]:
    """A column of 64-bit integers."""
    return memoryview(column).cast(_INTEGER)


def view_numbers(column: bytes) -> memoryview[int]:
    """A column of indices."""
    return memoryview(column).cast(_NUMBER)


def count_dropped(
    dropped: Iterable[DroppedCollectives],
) -> tuple[dict[tuple[CollectiveKind, int | None], int], int]:
    """How many calls of a rank in a group came before those that its stream has kept.

    Returns those of sends and receives, by kind and peer, and that of all others.
    """
    transfers: dict[tuple[CollectiveKind, int | None], int] = {}
    num_collectives = 0
    for record in dropped:
        if record.kind in TRANSFERS:
            key = record.kind, record.peer
            transfers[key] = transfers.get(key, 0) + record.num_collectives
        else:
            num_collectives += record.num_collectives
    return transfers, num_collectives


@final
class ColumnBuilder:
    """Collects the calls of a rank in a group."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._positions, self._orders = array(_INTEGER), array(_INTEGER)
        self._signatures, self._sites = array(_NUMBER), array(_NUMBER)
        self._states = bytearray()
        self._created, self._started = array(_INTEGER), array(_INTEGER)
        self._done, self._durations = array(_INTEGER), array(_INTEGER)
        self._num_transfers = 0
        self.num_issued = 0
        self.num_done: int | None = None
        self.dropped: tuple[DroppedCollectives, ...] = ()

    def add(
        self,
        position: int,
        order: int,
        signature: int,
        site: int = 0,
        state: int = 0,
        times: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> None:
        """Append a call; `times` are created, started, done and duration."""
        self._positions.append(position)
        self._orders.append(order)
        self._signatures.append(signature)
        self._sites.append(site)
        self._states.append(state)
        self._created.append(times[0])
        self._started.append(times[1])
        self._done.append(times[2])
        self._durations.append(times[3])
        if position >= self.num_issued:
            self.num_issued = position + 1

    def extend(
        self,
        positions: list[int],
        orders: list[int],
        signatures: list[int],
        sites: list[int],
        states: list[int],
        times: tuple[list[int], list[int], list[int], list[int]],
    ) -> None:
        """Append collectives at rising positions; `times` as those of `add`."""
        self._positions.extend(positions)
        self._orders.extend(orders)
        self._signatures.extend(signatures)
        self._sites.extend(sites)
        self._states.extend(states)
        self._created.extend(times[0])
        self._started.extend(times[1])
        self._done.extend(times[2])
        self._durations.extend(times[3])
        self.num_issued = max(self.num_issued, positions[-1] + 1)

    def add_transfer(
        self, order: int, signature: int, site: int, state: int, times: tuple[int, int, int, int]
    ) -> int:
        """Append a send or receive; its index."""
        self.add(-1, order, signature, site, state, times)
        self._num_transfers += 1
        return len(self._positions) - 1

    def set_state(self, index: int, state: int, times: tuple[int, int, int, int]) -> None:
        """Replace the state and the times of a call, but for when it was created."""
        self._states[index] = state
        self._started[index], self._done[index], self._durations[index] = times[1:]

    def set_signature(self, index: int, signature: int) -> None:
        """Replace the signature of a call."""
        self._signatures[index] = signature

    def signature_at(self, index: int) -> int:
        """The signature of a call."""
        return self._signatures[index]

    def build(self) -> CallColumns:
        """The columns."""
        return CallColumns(
            self._group,
            self._positions.tobytes(),
            self._orders.tobytes(),
            self._signatures.tobytes(),
            self._sites.tobytes(),
            bytes(self._states),
            self._created.tobytes(),
            self._started.tobytes(),
            self._done.tobytes(),
            self._durations.tobytes(),
            self.num_issued,
            self.num_done,
            self._num_transfers,
            self.dropped,
        )
