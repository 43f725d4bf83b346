"""What ranks hold of a model's parameters, added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from shardscope.record import (
    Module,
    Parameter,
    RankSpan,
    Recording,
    RunInfo,
    count_ranks,
    expand_ranks,
)
from shardscope.report.units import sum_known

__all__ = ["Holdings", "is_replicated", "list_parameters", "sum_holdings"]


# These describe modules with all their parameters: where they found none, the model has none.
_LIST_PARAMETERS = frozenset({"trace", "audit", "memory"})


class Holdings(NamedTuple):
    """Of a model's parameters, tied ones counted once; local figures are of the fullest rank.

    None is what was not recorded.
    """

    num_parameters: int
    global_bytes: int | None
    local_bytes: int | None
    replicated_bytes: int | None  # of local_bytes, what other ranks hold as well


class _Held(NamedTuple):
    local_bytes: int = 0
    replicated_bytes: int = 0


def list_parameters(recording: Recording) -> Iterator[tuple[Module, Parameter, str]]:
    """Each parameter and buffer in each of its forms, with its full name."""
    for module in recording.modules:
        for one in module.parameters:
            yield module, one, f"{module.name}.{one.name}" if module.name else one.name


def sum_holdings(recording: Recording) -> Holdings | None:
    """All parameters, buffers left out; None where parameters were not recorded."""
    if not any(module.parameters for module in recording.modules):
        is_listed = bool(_LIST_PARAMETERS.intersection(recording.run.instruments))
        return Holdings(0, 0, 0, 0) if is_listed and recording.modules else None
    whole: dict[str, int | None] = {}
    held: defaultdict[tuple[RankSpan, ...], dict[str, _Held]] = defaultdict(dict)
    is_sized = True
    for module, one, name in list_parameters(recording):
        if not one.is_buffer:
            key = one.alias_group or name
            whole.setdefault(key, one.global_bytes)
            is_sized &= one.local_bytes is not None
            size = one.local_bytes or 0
            copies = size if is_replicated(module, one, recording.run) else 0
            held[module.ranks].setdefault(key, _Held(size, copies))
    if not whole:  # buffers only
        return Holdings(0, 0, 0, 0)
    fullest = _find_fullest(held)
    local = (fullest.local_bytes, fullest.replicated_bytes) if is_sized else (None, None)
    return Holdings(len(whole), sum_known(whole.values()), *local)


def is_replicated(module: Module, one: Parameter, run: RunInfo) -> bool:
    """Whether other ranks hold the same; a plain one is everybody's unless all ranks were asked."""
    if one.placements:
        sizes = {axis.name: axis.size for axis in run.axes}
        placed = zip(one.axes, one.placements, strict=False)
        return any(what.startswith("R") and sizes.get(axis) != 1 for axis, what in placed)
    if one.fsdp_group is not None:  # flat, and cut in a way that placements do not say
        return False
    if count_ranks(run.ranks) == run.world_size:
        return count_ranks(module.ranks) > 1
    return run.world_size > 1


def _find_fullest(held: dict[tuple[RankSpan, ...], dict[str, _Held]]) -> _Held:
    """A rank may share each of its modules with other ranks: those that share all are alike."""
    places: defaultdict[int, list[tuple[RankSpan, ...]]] = defaultdict(list)
    for ranks in held:
        # Where all share all, one rank stands for a million.
        for rank in expand_ranks(ranks) if len(held) > 1 else (0,):
            places[rank].append(ranks)
    sums: dict[tuple[tuple[RankSpan, ...], ...], _Held] = {}
    for place in map(tuple, places.values()):
        if place not in sums:
            mine = {key: one for ranks in place for key, one in held[ranks].items()}
            sums[place] = _Held(*(sum(column) for column in zip(*mine.values(), strict=True)))
    return max(sums.values(), default=_Held())
