"""Which collectives make a figure what it is, the most telling first."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import NamedTuple, final

from shardscope.contract.breach import Evidence
from shardscope.contract.limits import Contract, Figure, Limit
from shardscope.contract.names import fold_numbers
from shardscope.contract.said import Said
from shardscope.contract.traffic import Facet, Reading, Traffic, facet_of, matches
from shardscope.record import Source

__all__ = ["Witness"]


class _Pile(NamedTuple):
    """What sets one line of evidence apart from another; layers of a stack share one."""

    shape: str | None
    facet: Facet
    reason: str
    source: Source | None


@final
class Witness:
    """Tells what counts towards a figure of a recording."""

    def __init__(self, contract: Contract, traffic: Traffic) -> None:
        self._contract = contract
        self._traffic = traffic

    def testify(self, limit: Limit, reading: Reading) -> tuple[Evidence, ...]:
        """What counts, in piles: first those that no limit names, then by size."""
        piles: dict[_Pile, list[Said]] = defaultdict(list)
        for one in self._traffic.list_said(reading, limit.selector):
            shape = one.module and fold_numbers(one.module)
            piles[_Pile(shape, facet_of(one), one.reason, one.source)].append(one)
        told = [
            (self._is_named(pile, said), _describe(limit, pile, said))
            for pile, said in piles.items()
        ]
        told.sort(key=lambda item: (item[0], -item[1].num_bytes))
        return tuple(evidence for _, evidence in told)

    def _is_named(self, pile: _Pile, said: list[Said]) -> bool:
        """Whether limits name the very modules that said it; what none names may be new."""
        return all((one.module, pile.facet) in self._named for one in said)

    @cached_property
    def _named(self) -> set[tuple[str | None, Facet]]:
        facets = {facet for _, facet in self._traffic.owned()}
        return {
            (module, facet)
            for limit in filter(_is_precise, self._contract.limits)
            for facet in facets
            if matches(limit.selector, facet)
            for module in _name(limit, self._traffic)
        }


def _is_precise(limit: Limit) -> bool:
    """Whether it says all there is to say of a collective, as recorded ones do."""
    return bool(limit.phases and limit.axes and limit.kinds)


def _name(limit: Limit, traffic: Traffic) -> tuple[str | None, ...]:
    """The modules that it names; without one, what is in none."""
    return (None,) if limit.module is None else traffic.names.fit(limit.module)


def _describe(limit: Limit, pile: _Pile, said: list[Said]) -> Evidence:
    # Of bytes those that the limit is on; of counts those on the wire, which cost time.
    figure = Figure.WIRE_BYTES if limit.figure is Figure.COUNT else limit.figure
    place = (Figure.BYTES, Figure.OUTPUT_BYTES, Figure.WIRE_BYTES).index(figure)
    return Evidence(
        what=f"{pile.facet.kind}[{pile.facet.axis}], {pile.facet.phase}",
        cause=pile.reason,
        module=said[0].module if len({one.module for one in said}) == 1 else pile.shape,
        count=len(said),
        num_bytes=sum(one.sizes[place] for one in said),
        source=pile.source,
    )
