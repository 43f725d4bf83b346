"""The data that a program's ranks train on, and what a single process gets in its place.

Each rank notes the tensors that the program makes outside its model and that reach the model or the
loss: batches of data loaders, random numbers, slices of data sets. Where the tensors of ranks with
other samples begin to differ, the single process gets the samples of all of these ranks; what it
computes from them, such as masks and counts of tokens, follows by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, final

import torch

# Functions that return a part of a tensor.
_PARTS = frozenset(["__getitem__", "chunk", "index_select", "narrow", "split", "tensor_split"])


class DataKey(NamedTuple):
    """A tensor by the line and the function that make it, their count, and its position."""

    line: str
    function: str
    occurrence: int
    position: str


class DataUse(StrEnum):
    """How a single process gets the batches of ranks with other samples."""

    JOINED = "joined"
    """As one batch."""
    SEQUENCE = "sequence"
    """One after the other."""
    OWN = "own"
    """Not at all: it keeps its own data."""


class DataOrigin(StrEnum):
    """How a tensor comes to be."""

    LOADER = "loader"
    """Yielded by a data loader."""
    RANDOM = "random"
    """Drawn at random."""
    COMPUTED = "computed"
    """Returned by another function, or passed to the model or the loss as it is."""


@final
@dataclass(frozen=True, eq=False)
class DataTensor:
    """A tensor outside the model. `parents` are the noted tensors that it is computed from.

    With `is_item` it was put into a list of which a function made another tensor.
    """

    key: DataKey
    origin: DataOrigin
    parents: tuple[DataKey, ...]
    value: torch.Tensor
    is_item: bool = False


@final
@dataclass(frozen=True, eq=False)
class SharedData:
    """The values of one tensor on the ranks: a value for each group with the same samples."""

    values: tuple[torch.Tensor, ...]
    origin: DataOrigin

    def join(self, dim: int) -> torch.Tensor | None:
        """The samples of all groups along a dim; None if they do not fit together."""
        first = self.values[0]
        if len(self.values) == 1:
            return first
        if first.ndim == 0:
            is_same = all(torch.equal(value, first) for value in self.values)
            return first if is_same else None
        along = min(dim, first.ndim - 1)
        rests = {
            (value.dtype, *value.shape[:along], *value.shape[along + 1 :]) for value in self.values
        }
        return torch.cat(self.values, along) if len(rests) == 1 else None


@final
@dataclass(frozen=True, eq=False)
class DataPlan:
    """What a single process gets: for each tensor, its values on the ranks.

    `num_groups` is the number of groups of ranks with the same samples, whose batches are joined
    along `dim`, or come one after the other.
    """

    shared: dict[DataKey, SharedData] = field(default_factory=dict)
    num_groups: int = 1
    dim: int = 0
    use: DataUse = DataUse.JOINED

    def find(self, key: DataKey) -> SharedData | None:
        """What a single process gets for its own tensor with this key."""
        if self.use is not DataUse.SEQUENCE:
            return self.shared.get(key)
        occurrence, group = divmod(key.occurrence, self.num_groups)
        shared = self.shared.get(key._replace(occurrence=occurrence))
        if shared is None or len(shared.values) == 1:
            return shared
        return SharedData((shared.values[group],), shared.origin)


def plan_data(
    ranks: Sequence[Sequence[DataTensor]],
    groups: Sequence[Sequence[int]],
    *,
    dim: int = 0,
    use: DataUse = DataUse.JOINED,
) -> DataPlan:
    """What a single process gets in place of its own data.

    `ranks` has the tensors of each rank in order, `groups` the ranks with the same samples.
    """
    if use is DataUse.OWN:
        return DataPlan({}, len(groups), dim, use)
    first = [group[0] for group in groups]
    tables = [{tensor.key: tensor for tensor in ranks[rank]} for rank in first]
    differing = {
        key
        for key, tensor in tables[0].items()
        if any(not _has_same_value(table.get(key), tensor) for table in tables[1:])
    }
    # The tensors of a batch belong together, also if some of them are the same on all ranks.
    batches = {
        key._replace(position="") for key in differing if tables[0][key].origin is DataOrigin.LOADER
    }
    shared = {}
    replaced: set[DataKey] = set()
    for key, tensor in tables[0].items():
        is_loaded = tensor.origin is DataOrigin.LOADER
        is_joined = key in differing or (is_loaded and key._replace(position="") in batches)
        values = [table[key].value for table in tables if key in table]
        if replaced.intersection(tensor.parents):
            replaced.add(key)
            # Where a single process keeps its own data, it still takes a rank's share of it.
            is_share = is_joined and _is_part(tensor, tables[0]) and len(values) == len(tables)
            if is_share and all(value.shape == tensor.value.shape for value in values):
                shared[key] = SharedData(tuple(values), tensor.origin)
        elif not is_joined:
            if tensor.origin is not DataOrigin.COMPUTED:
                shared[key] = SharedData((tensor.value,), tensor.origin)
        elif len(values) == len(tables) and (is_loaded or _is_batch(tensor)):
            replaced.add(key)
            shared[key] = SharedData(tuple(values), tensor.origin)
    return DataPlan(shared, len(groups), dim, use)


def _has_same_value(tensor: DataTensor | None, reference: DataTensor) -> bool:
    return tensor is not None and is_equal(tensor.value, reference.value)


def is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and values."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _is_batch(tensor: DataTensor) -> bool:
    """Whether a tensor can be one of several samples, and not a number that a rank computes."""
    is_number = not tensor.parents and tensor.value.numel() <= 1
    return tensor.value.ndim > 0 and not is_number and not tensor.is_item


def _is_part(tensor: DataTensor, tensors: Mapping[DataKey, DataTensor]) -> bool:
    """Whether a tensor is some of the rows of another one, as `data[first:last]` is."""
    parents = [tensors[parent].value for parent in tensor.parents if parent in tensors]
    return tensor.key.function in _PARTS and any(
        parent.ndim == tensor.value.ndim > 0 and parent.shape[1:] == tensor.value.shape[1:]
        for parent in parents
    )


def group_by_data(ranks: Sequence[Sequence[DataTensor]]) -> list[list[int]]:
    """The ranks whose tensors are all the same, in groups."""
    groups: list[list[int]] = []
    for rank, tensors in enumerate(ranks):
        same = (group for group in groups if _has_same_data(ranks[group[0]], tensors))
        group = next(same, None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return groups


def _has_same_data(first: Sequence[DataTensor], second: Sequence[DataTensor]) -> bool:
    values = {tensor.key: tensor.value for tensor in first}
    return len(first) == len(second) and all(
        tensor.key in values and is_equal(values[tensor.key], tensor.value) for tensor in second
    )


def sort_rows(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """The rows of all tensors in an order of their own, to compare which samples they are."""
    if not tensors or tensors[0].ndim == 0:
        return None
    moved = [tensor.movedim(min(dim, tensor.ndim - 1), 0) for tensor in tensors]
    moved = [rows.flatten(1) if rows.ndim > 1 else rows[:, None] for rows in moved]
    if len({rows.shape[1:] for rows in moved}) > 1:
        return None
    rows = torch.cat([rows.to(torch.float64) for rows in moved])
    for column in reversed(range(min(rows.shape[1], 8))):
        rows = rows[rows[:, column].argsort(stable=True)]
    return rows


def list_reaching(
    tensors: Sequence[DataTensor], used: Iterator[DataKey] | Sequence[DataKey]
) -> list[DataTensor]:
    """The tensors that are used by the model or the loss, and those that they come from."""
    by_key = {tensor.key: tensor for tensor in tensors}
    reached: set[DataKey] = set()
    pending = list(used)
    while pending:
        key = pending.pop()
        if key in by_key and key not in reached:
            reached.add(key)
            pending += by_key[key].parents
    return [tensor for tensor in tensors if tensor.key in reached]
