"""Limits on collectives, from the arguments of an assertion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from shardscope.contract import Contract
from shardscope.contract.keys import BOUNDS, COMM_KEYS, SELECTORS
from shardscope.contract.place import Place
from shardscope.contract.reading import read_comm
from shardscope.errors import ContractError
from shardscope.record import CollectiveKind

__all__ = ["CommLimits", "read_comm_limits"]

_KINDS = tuple(map(str, CollectiveKind))
_WORDS = (*_KINDS, *COMM_KEYS)

Name = str | Sequence[str]


class CommLimits(TypedDict, total=False):
    """How many collectives of a kind, how many in all, how many bytes; of which they are."""

    all_reduce: int
    all_gather: int
    reduce_scatter: int
    all_to_all: int
    broadcast: int
    reduce: int
    gather: int
    scatter: int
    send: int
    recv: int
    barrier: int
    count: int
    min_count: int
    max_count: int
    bytes: int | str
    min_bytes: int | str
    max_bytes: int | str
    wire_bytes: int | str
    min_wire_bytes: int | str
    max_wire_bytes: int | str
    output_bytes: int | str
    min_output_bytes: int | str
    max_output_bytes: int | str
    module: str
    phase: Name
    axis: Name
    kind: Name
    cause: Name


def read_comm_limits(
    limits: Mapping[str, Any], per_module: Mapping[str, Mapping[str, Any]] | None, *, caller: str
) -> Contract:
    """A contract with the limits that the arguments set, under the names of a contract file."""
    place = Place(caller, {})
    common = {key: limits[key] for key in SELECTORS if key in limits and key != "module"}
    tables = list(_list_tables(place, limits))
    for pattern, some in (per_module or {}).items():
        at = place.at(pattern)
        table = at.as_table(some)
        tables += _list_tables(at, {**common, **table, "module": pattern})
    if not tables:
        raise ContractError(
            f'{caller} has no limit. Pass at least one, such as all_reduce=2 or max_bytes="64MiB".'
        )
    return Contract(tuple(limit for table in tables for limit, _ in read_comm(place, table)))


def _list_tables(place: Place, limits: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One table for each kind that is limited, and one for the limits on all kinds together."""
    place.check_keys(limits, _WORDS)
    selector = {key: _as_list(limits[key]) for key in SELECTORS if key in limits}
    bounds = {key: value for key, value in limits.items() if key in BOUNDS}
    for kind in _KINDS:
        if kind in limits:
            yield {**selector, "kind": kind, "count": limits[kind]}
    if bounds:
        yield {**selector, **bounds}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
