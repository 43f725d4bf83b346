"""Totals of the parameters that ranks hold, and placements parsed from their text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from shardscope.record import (
    Module,
    Parameter,
    RankSpan,
    Recording,
    RunInfo,
    count_ranks,
    expand_ranks,
)
from shardscope.report.model.traffic_totals import sum_known

# These instruments record all parameters: if there are none, the model has none.
_LIST_PARAMETERS = frozenset({"trace", "audit", "memory"})


class Holdings(NamedTuple):
    """Totals of a model's parameters; local bytes are those of the rank that holds most.

    Tied parameters count once. None means not recorded.
    """

    num_parameters: int
    global_bytes: int | None
    local_bytes: int | None
    replicated_bytes: int | None  # part of local_bytes that other ranks also hold


class _LocalSizes(NamedTuple):
    local_bytes: int = 0
    replicated_bytes: int = 0


def list_parameters(recording: Recording) -> Iterator[tuple[Module, Parameter, str]]:
    """Yield each parameter and buffer, in each of its forms on ranks, with its full name."""
    for module in recording.modules:
        for parameter in module.parameters:
            yield (
                module,
                parameter,
                f"{module.name}.{parameter.name}" if module.name else parameter.name,
            )


def sum_holdings(recording: Recording) -> Holdings | None:
    """Sum all parameters without buffers; None if parameters were not recorded."""
    if not any(module.parameters for module in recording.modules):
        is_listed = bool(_LIST_PARAMETERS.intersection(recording.run.instruments))
        return Holdings(0, 0, 0, 0) if is_listed and recording.modules else None
    global_bytes: dict[str, int | None] = {}
    by_ranks: defaultdict[tuple[RankSpan, ...], dict[str, _LocalSizes]] = defaultdict(dict)
    is_sized = True
    for module, parameter, name in list_parameters(recording):
        if not parameter.is_buffer:
            key = parameter.alias_group or name
            global_bytes.setdefault(key, parameter.global_bytes)
            is_sized &= parameter.local_bytes is not None
            size = parameter.local_bytes or 0
            copies = size if is_replicated(module, parameter, recording.run) else 0
            by_ranks[module.ranks].setdefault(key, _LocalSizes(size, copies))
    if not global_bytes:  # buffers only
        return Holdings(0, 0, 0, 0)
    fullest = _find_fullest(by_ranks)
    local = (fullest.local_bytes, fullest.replicated_bytes) if is_sized else (None, None)
    return Holdings(len(global_bytes), sum_known(global_bytes.values()), *local)


def is_replicated(module: Module, parameter: Parameter, run: RunInfo) -> bool:
    """Whether other ranks hold the same data.

    A plain tensor is assumed to be replicated unless all ranks were recorded.
    """
    if parameter.placements:
        sizes = {axis.name: axis.size for axis in run.axes}
        placed = zip(parameter.axes, parameter.placements, strict=False)
        return any(
            placement.startswith(("R", "Invariant")) and sizes.get(axis) != 1
            for axis, placement in placed
        )
    if parameter.fsdp_group is not None:  # flat parameter: sharded, but without placements
        return False
    if count_ranks(run.ranks) == run.world_size:
        return count_ranks(module.ranks) > 1
    return run.world_size > 1


def _find_fullest(by_ranks: dict[tuple[RankSpan, ...], dict[str, _LocalSizes]]) -> _LocalSizes:
    """Return the sizes of the rank that holds most; ranks with the same modules are summed once."""
    spans_by_rank: defaultdict[int, list[tuple[RankSpan, ...]]] = defaultdict(list)
    for ranks in by_ranks:
        # If all ranks have the same modules, it is enough to sum one rank.
        for rank in expand_ranks(ranks) if len(by_ranks) > 1 else (0,):
            spans_by_rank[rank].append(ranks)
    sums: dict[tuple[tuple[RankSpan, ...], ...], _LocalSizes] = {}
    for rank_spans in map(tuple, spans_by_rank.values()):
        if rank_spans not in sums:
            sizes = {key: size for ranks in rank_spans for key, size in by_ranks[ranks].items()}
            sums[rank_spans] = _LocalSizes(
                *(sum(column) for column in zip(*sizes.values(), strict=True))
            )
    return max(sums.values(), default=_LocalSizes())


# As in recordings (Shard(0), StridedShard(0)), as torch prints them (Shard(dim=0)), and as in
# parallel programs (S(0)).
_SHARD = re.compile(r"(_?Strided)?S(?:hard)?\((?:dim=)?(-?\d{1,9})\b")
_WORDS = {1: ("elements",), 2: ("rows", "columns")}


class AxisSharding(Struct, frozen=True):
    """A tensor's placement along one mesh axis; `dim` is None unless the placement shards."""

    axis: str
    size: int  # of the axis, 0 if it is not known
    placement: str
    dim: int | None
    is_strided: bool = False  # shards what later axes have left


def read_shardings(
    axes: Sequence[tuple[str, int]], placements: Sequence[str], num_dims: int
) -> tuple[AxisSharding, ...]:
    """Parse the placements, one for each axis."""
    shardings = []
    for (axis, size), placement in zip(axes, placements, strict=False):
        match = _SHARD.match(placement)
        dim = _find_dim(int(match[2]), num_dims) if match is not None else None
        is_strided = match is not None and match[1] is not None
        shardings.append(AxisSharding(axis, size, placement, dim, is_strided))
    return tuple(shardings)


def _find_dim(dim: int, num_dims: int) -> int | None:
    dim = dim + num_dims if dim < 0 else dim
    return dim if 0 <= dim < num_dims else None


def order_shardings(shardings: Sequence[AxisSharding]) -> list[AxisSharding]:
    """List the placements that shard, in the order in which they apply.

    Strided ones come last, innermost first: FSDP shards after tensor parallelism but its axis comes
    first in the mesh.
    """
    plain = [
        sharding for sharding in shardings if sharding.dim is not None and not sharding.is_strided
    ]
    return [
        *plain,
        *(
            sharding
            for sharding in reversed(shardings)
            if sharding.dim is not None and sharding.is_strided
        ),
    ]


def describe_shardings(shardings: Sequence[AxisSharding], num_dims: int) -> str:
    """`rows sharded 8 ways over tp and again 16 ways over cp, replicated over dp (128)`."""
    times: dict[str, list[str]] = {}
    for sharding in order_shardings(shardings):
        number = f"{sharding.size:,} ways " if sharding.size else ""
        times.setdefault(_name_dim(sharding, num_dims), []).append(f"{number}over {sharding.axis}")
    sharded = [
        f"{dim_name} sharded {' and again '.join(words)}" for dim_name, words in times.items()
    ]
    return ", ".join(
        [
            *sharded,
            *(_describe_unsharded(sharding) for sharding in shardings if sharding.dim is None),
        ]
    )


def _name_dim(sharding: AxisSharding, num_dims: int) -> str:
    words = _WORDS.get(num_dims)
    return f"dim {sharding.dim}" if words is None or sharding.dim is None else words[sharding.dim]


def _describe_unsharded(sharding: AxisSharding) -> str:
    number = f" ({sharding.size:,})" if sharding.size else ""
    if sharding.placement.startswith(("R", "Invariant")):
        return f"replicated over {sharding.axis}{number}"
    if "Partial" in sharding.placement or sharding.placement.startswith("P"):
        return f"partial sums over {sharding.axis}{number}"
    return f"{sharding.placement} over {sharding.axis}{number}"
