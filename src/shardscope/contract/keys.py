"""The words that a contract file may use."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from shardscope.contract.limits import COMM_FIGURES, Figure
from shardscope.record import Severity

__all__ = [
    "ANY",
    "BOUNDS",
    "CEILINGS",
    "COMM_KEYS",
    "CONTRACT_KEYS",
    "FINDING_KEYS",
    "SELECTORS",
    "UNASKED",
    "Bound",
    "Side",
]


Side = Literal["exact", "most", "least"]


class Bound(NamedTuple):
    """What a key limits, and from which side."""

    figure: Figure
    side: Side


_SIDES: Final[tuple[tuple[str, Side], ...]] = (("", "exact"), ("min_", "least"), ("max_", "most"))
UNASKED = "unasked"
ANY = "any"
CEILINGS = {str(one): one for one in Figure if one not in (*COMM_FIGURES, Figure.FINDINGS)}
CONTRACT_KEYS = (*CEILINGS, UNASKED, "findings", "comm")
FINDING_KEYS = (ANY, *map(str, Severity), "rules")
BOUNDS = {
    f"{prefix}{figure}": Bound(figure, side) for figure in COMM_FIGURES for prefix, side in _SIDES
}
SELECTORS = {
    "module": "module",
    "phase": "phases",
    "axis": "axes",
    "kind": "kinds",
    "cause": "causes",
}
"""Keys of a limit on collectives, and what a record calls them."""
COMM_KEYS = (*SELECTORS, *BOUNDS)
