"""Which collectives make a figure what it is, the most telling first."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from shardscope.contract.breach import Evidence
from shardscope.contract.limits import COMM_FIGURES, Contract, Figure, Limit, Selector
from shardscope.contract.said import Said
from shardscope.contract.traffic import Facet, Reading, Traffic, facet_of, is_within, matches
from shardscope.record import Source

__all__ = ["find_evidence"]


class _Pile(NamedTuple):
    """What sets one line of evidence apart from another."""

    module: str | None
    facet: Facet
    reason: str
    source: Source | None


def find_evidence(
    limit: Limit, contract: Contract, traffic: Traffic, reading: Reading
) -> tuple[Evidence, ...]:
    """What counts, in piles: those that the contract does not speak of elsewhere, then by size."""
    piles: dict[_Pile, list[Said]] = defaultdict(list)
    for one in traffic.list_said(reading, limit.selector):
        piles[_Pile(one.module, facet_of(one), one.reason, one.source)].append(one)
    narrower = [
        other.selector
        for other in contract.limits
        if other.module is not None and _narrowness(other.selector) > _narrowness(limit.selector)
    ]
    evidence = {pile: _describe(limit, pile, said) for pile, said in piles.items()}
    ranked = sorted(
        evidence,
        key=lambda pile: (
            any(_counts(one, pile, traffic) for one in narrower),
            -evidence[pile].num_bytes,
        ),
    )
    return tuple(evidence[pile] for pile in ranked)


def _narrowness(selector: Selector) -> int:
    return sum(bool(part) or part == "" for part in selector)


def _counts(selector: Selector, pile: _Pile, traffic: Traffic) -> bool:
    """Whether a limit with this selector counts the pile."""
    if not matches(selector, pile.facet):
        return False
    if selector.module is None:
        return True
    fits = traffic.names.fit(selector.module)
    return any(is_within(pile.module, module) for module in fits)


def _describe(limit: Limit, pile: _Pile, said: list[Said]) -> Evidence:
    # Of bytes those that the limit is on; of counts those on the wire, which cost time.
    figure = Figure.WIRE_BYTES if limit.figure is Figure.COUNT else limit.figure
    place = (Figure.BYTES, Figure.OUTPUT_BYTES, Figure.WIRE_BYTES).index(figure)
    assert figure in COMM_FIGURES
    return Evidence(
        what=f"{pile.facet.kind}[{pile.facet.axis}], {pile.facet.phase}",
        cause=pile.reason,
        module=pile.module,
        count=len(said),
        num_bytes=sum(one.sizes[place] for one in said),
        source=pile.source,
    )
