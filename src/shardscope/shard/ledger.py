"""What was taken and given back, in order; what each piece was for is known only later.

A gradient is made by an op like any other, and becomes one when autograd puts it in its place. So
an allocation is written down as it happens and may be claimed for a kind at any time after.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple, final

from shardscope.record import MemoryKind, Phase

__all__ = ["Allocation", "Event", "Ledger", "Place", "Shares"]

Shares = Mapping[Hashable, tuple[int, int]]
"""What is in an allocation: by anything that tells the parts apart, the owner and the bytes."""


class Place(NamedTuple):
    """When in the step, and in which module, by its index."""

    phase: Phase
    module: int


_CLAIMS = (  # the strongest last
    MemoryKind.TEMPORARIES,
    MemoryKind.COMMUNICATION,
    MemoryKind.GATHERED,
    MemoryKind.GRADIENTS,
    MemoryKind.OPTIMIZER_STATE,
    MemoryKind.PARAMETERS,
)


@final
class Allocation:
    """Bytes in use from event `start` to event `end`, or to the end of all where that is None."""

    __slots__ = (
        "end",
        "is_buffer",
        "is_communicated",
        "is_on_host",
        "kind",
        "num_bytes",
        "owner",
        "place",
        "shares",
        "start",
    )

    def __init__(self, num_bytes: int, place: Place) -> None:
        self.num_bytes = num_bytes
        self.place = place
        self.owner = place.module  # of what no share names
        self.shares: dict[Hashable, tuple[int, int]] = {}
        self.start = 0
        self.end: int | None = None
        self.kind: MemoryKind | None = None  # as claimed
        self.is_buffer = False  # made empty, to be written to
        self.is_communicated = False
        self.is_on_host = False

    def claim(self, kind: MemoryKind, shares: Shares | None = None) -> None:
        """It is of this kind, unless a stronger claim was made.

        `shares` name the modules whose it is. One storage may hold the gradients or parameters of
        many modules, as FSDP's and DDP's buffers do: claims of the same kind add their shares.
        """
        strength = _CLAIMS.index(kind) - (-1 if self.kind is None else _CLAIMS.index(self.kind))
        if strength > 0:
            self.kind = kind
            if shares:
                self.shares = dict(shares)
        elif strength == 0:
            for part, share in (shares or {}).items():
                self.shares.setdefault(part, share)

    def split(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """The owners of an allocation of `num_bytes`, each with its part, which add up to all.

        Padding and rounding are divided as the shares are.
        """
        total = sum(size for _, size in self.shares.values())
        if not total:
            yield self.owner, num_bytes
            return
        upto = given = 0
        for owner, size in self.shares.values():
            upto += size
            part = num_bytes * upto // total - given
            given += part
            yield owner, part


class Event(NamedTuple):
    """An allocation begins or ends."""

    allocation: Allocation
    is_start: bool


@final
class Ledger:
    """Allocations and releases in the order in which they happened."""

    def __init__(self) -> None:
        self.before: list[Allocation] = []  # there when the first step began
        self.events: list[Event] = []

    def begin(self, num_bytes: int, place: Place) -> Allocation:
        """Something is allocated now."""
        allocation = Allocation(num_bytes, place)
        allocation.start = len(self.events)
        self.events.append(Event(allocation, True))
        return allocation

    def find_before(self, num_bytes: int, place: Place) -> Allocation:
        """Something is met that was there before the first step."""
        allocation = Allocation(num_bytes, place)
        allocation.start = -1
        self.before.append(allocation)
        return allocation

    def has_backward(self) -> bool:
        """Whether anything was allocated in backward."""
        return any(event.allocation.place.phase is Phase.BACKWARD for event in self.events)

    def end(self, allocation: Allocation) -> None:
        """It is given back now."""
        allocation.end = len(self.events)
        self.events.append(Event(allocation, False))

    def use_briefly(self, num_bytes: int, place: Place) -> None:
        """Something is allocated and given back within one op."""
        if num_bytes > 0:
            self.end(self.begin(num_bytes, place))
