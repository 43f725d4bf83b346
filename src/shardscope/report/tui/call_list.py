"""The collectives of a place: found, filtered and sorted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, final

from msgspec import Struct

from shardscope.record import Collective, Phase, Recording, describe_cause
from shardscope.report.traffic import name_axis
from shardscope.report.tui.outline import Place

__all__ = ["FACETS", "SORTS", "CallList", "Filter"]

FACETS = ("phase", "axis", "kind", "rank")


class Filter(Struct, frozen=True):
    """Which collectives to keep; None keeps all."""

    phase: str | None = None
    axis: str | None = None
    kind: str | None = None
    rank: str | None = None

    @property
    def words(self) -> str:
        """`phase backward, axis tp`; nothing if all are kept."""
        chosen = ((facet, getattr(self, facet)) for facet in FACETS)
        return ", ".join(f"{facet} {value}" for facet, value in chosen if value is not None)


SORTS: dict[str, Callable[[Collective], Any]] = {
    "order": lambda call: (call.rank, call.order),
    "sent": lambda call: (-call.wire_bytes, call.rank, call.order),
    "input": lambda call: (-call.input_bytes, call.rank, call.order),
    "module": lambda call: (call.owner or "", call.rank, call.order),
    "cause": lambda call: (describe_cause(call.cause), call.rank, call.order),
}


@final
class CallList:
    """All collectives of a recording, by the module they belong to."""

    def __init__(self, recording: Recording) -> None:
        self._world_size = recording.run.world_size
        self._calls = sorted(recording.collectives, key=SORTS["order"])
        self._by_owner: dict[str | None, list[int]] = defaultdict(list)
        for index, call in enumerate(self._calls):
            self._by_owner[call.owner].append(index)
        self.choices = self._list_choices(recording)

    def _list_choices(self, recording: Recording) -> dict[str, list[str]]:
        """What each facet may be, of what occurs."""
        met = {facet: set[str]() for facet in ("axis", "kind")}
        phases, ranks = set[Phase](), set[int]()
        for call in recording.collectives:
            met["axis"].add(self.name_axis(call))
            met["kind"].add(str(call.kind))
            phases.add(call.phase)
            ranks.add(call.rank)
        return {
            "phase": [str(phase) for phase in Phase if phase in phases],
            "axis": sorted(met["axis"]),
            "kind": sorted(met["kind"]),
            "rank": [str(rank) for rank in sorted(ranks)],
        }

    def name_axis(self, call: Collective) -> str:
        """The mesh axis it ran along, or how many ranks it spanned."""
        return name_axis(call, self._world_size)

    def choose(
        self, place: Place, chosen: Filter, *, sort: str = "order", is_reversed: bool = False
    ) -> Sequence[Collective]:
        """The collectives of a place and of all below it."""
        found = [self._calls[index] for index in self._gather(place)]
        if chosen.words:
            found = [call for call in found if self._passes(call, chosen)]
        if sort != "order":
            found.sort(key=SORTS[sort])
        return found[::-1] if is_reversed else found

    def _gather(self, place: Place) -> list[int]:
        """Positions of its collectives, in order."""
        if place.is_nowhere:
            return self._by_owner.get(None, [])
        above = set(place.paths)
        owners = (one for one in self._by_owner if one is not None and _is_below(one, above))
        return sorted(index for owner in owners for index in self._by_owner[owner])

    def _passes(self, call: Collective, chosen: Filter) -> bool:
        return (
            chosen.phase in (None, call.phase)
            and chosen.kind in (None, call.kind)
            and chosen.rank in (None, str(call.rank))
            and (chosen.axis is None or chosen.axis == self.name_axis(call))
        )


def _is_below(owner: str, above: set[str]) -> bool:
    if "" in above or owner in above:
        return True
    end = owner.rfind(".")
    while end >= 0:
        if owner[:end] in above:
            return True
        end = owner.rfind(".", 0, end)
    return False
