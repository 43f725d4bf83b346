"""Which elements of the original's parameters each rank holds, and under which name.

A parallel model may rename a parameter, fuse several, transpose one, or hold different experts on
each rank. To trace them, the model is sharded once more with weights that are marks: every element
is a unique number. Where a mark turns up, the rank holds that element, and the gradient at that
index is the gradient of that element.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch
from torch import nn

from shardscope.parallel.equivalence.names import named_parameters, tie_names
from shardscope.parallel.equivalence.step_result import StepResult
from shardscope.parallel.equivalence.tensor_shards import ranks_by_distance
from shardscope.parallel.equivalence.training import Table, TrainingValues

T = TypeVar("T")
Named = Mapping[str, torch.Tensor]

# A mark is an index plus this fraction; scaling it or adding to it changes the fraction.
_FRACTION = 323_567 / 2**20


def is_unclear(reference: StepResult, ranks: Sequence[StepResult]) -> bool:
    """Whether names and shapes do not determine which elements each rank holds."""
    ties = tie_names(reference.parameters)
    for rank in ranks:
        known = {first for name, first in ties.items() if name not in rank.absent}
        has_new_shape = any(
            tensor.shape != reference.parameters[name].shape
            for name, tensor in rank.parameters.items()
            if name in reference.parameters
        )
        if rank.added or has_new_shape or any(ties.get(n, n) not in known for n in rank.absent):
            return True
    return False


def mark_weights(model: nn.Module) -> None:
    """Overwrite all parameters of a float64 model with marks."""
    with torch.no_grad():
        for _, start, parameter in _marked(dict(named_parameters(model))):
            marks = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
            parameter.copy_((marks + _FRACTION).reshape(parameter.shape))


def _marked(named: Named) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Each parameter that can hold marks, with its first mark; tied parameters under one name."""
    start = 1
    for name, first in tie_names(named).items():
        if name == first and named[name].dtype.is_floating_point:
            yield name, start, named[name]
            start += named[name].numel()


@final
@dataclass(frozen=True, eq=False)
class _Part:
    """A parameter of a rank that holds elements of the original's parameters.

    `indices` maps the name of an original parameter to the flattened indices of the elements:
    in this parameter, and in the original.
    """

    name: str
    shape: torch.Size
    indices: dict[str, tuple[torch.Tensor, torch.Tensor]]


@final
@dataclass(frozen=True, eq=False)
class _Elements:
    """Elements of an original parameter that a rank holds, with their values if it has them.

    `indices` are flattened indices into the original. A rank may hold several copies of a tied
    parameter; `copy` is the index of the copy.
    """

    copy: int
    indices: torch.Tensor
    values: torch.Tensor | None


@final
class TracedWeights:
    """Where each rank holds which elements, found by marks, on a mesh of these sizes."""

    def __init__(self, original: Named, ranks: Sequence[StepResult], sizes: Sequence[int]) -> None:
        self._original = original
        self._sizes = tuple(sizes)
        self._ranks = [list(_read_marks(rank.parameters, original)) for rank in ranks]
        self._moved = self._find_moved([set(rank.parameters) for rank in ranks])

    def _find_moved(self, names: Sequence[set[str]]) -> list[str]:
        """The original's parameters that some rank holds in another form."""
        untraced = [
            rank_names.difference(part.name for part in parts)
            for rank_names, parts in zip(names, self._ranks, strict=True)
        ]
        moved = []
        for origin, _, _ in _marked(self._original):
            holders = [[part for part in parts if origin in part.indices] for parts in self._ranks]
            is_in_place = all(
                parts and all(self._is_in_place(part, origin) for part in parts)
                for parts in holders
            )
            # Where a rank computed the parameter from others, it is matched by name.
            is_computed = any(origin in rank_names for rank_names in untraced)
            if any(holders) and not is_in_place and not is_computed:
                moved.append(origin)
        return moved

    def _is_in_place(self, part: _Part, origin: str) -> bool:
        original = self._original[origin]
        is_named = self._original.get(part.name) is original
        is_full = len(part.indices) == 1 and part.shape == original.shape
        return is_named and is_full and bool((part.indices[origin][1].diff() == 1).all())

    def rename_modules(self, rank: int) -> dict[str, str]:
        """The original's names of a rank's modules that hold another module's parameters."""
        renamed: dict[str, set[str]] = {}
        for name, origin in self._find_origins(rank).items():
            parts, origin_parts = name.split("."), origin.split(".")
            if len(parts) != len(origin_parts) or parts[-1] != origin_parts[-1]:
                continue
            end = max((i + 1 for i in range(len(parts)) if parts[i] != origin_parts[i]), default=0)
            if end:
                renamed.setdefault(".".join(parts[:end]), set()).add(".".join(origin_parts[:end]))
        return {name: names.pop() for name, names in renamed.items() if len(names) == 1}

    def apply(self, ranks: Sequence[StepResult]) -> list[StepResult]:
        """The results with full gradients, and parameters under the original's names."""
        gradients = self._put_together([rank.gradients for rank in ranks])
        raw_gradients = self._put_together([rank.raw_gradients for rank in ranks])
        reduced_gradients = self._put_together([rank.reduced_gradients for rank in ranks])
        training = self._apply_to_training(ranks)
        moved = {name for origin in self._moved for name in self._find_aliases(origin)}
        resolved = []
        for index, (rank, rank_gradients) in enumerate(zip(ranks, gradients, strict=True)):
            origins = self._find_origins(index)
            ties = {new: origins.get(rank.ties.get(old, old), new) for old, new in origins.items()}
            resolved.append(
                replace(
                    rank,
                    gradients=rank_gradients,
                    raw_gradients=raw_gradients[index],
                    reduced_gradients=reduced_gradients[index],
                    local_squares=_rename(rank.local_squares, origins),
                    distributed=frozenset(origins.get(n, n) for n in rank.distributed),
                    raw_squares=_rename(rank.raw_squares, origins),
                    reduced_squares=_rename(rank.reduced_squares, origins),
                    clipped_squares=_rename(rank.clipped_squares, origins),
                    parameters={
                        origins.get(name, name): tensor for name, tensor in rank.parameters.items()
                    },
                    absent=rank.absent - moved,
                    added=rank.added.difference(part.name for part in self._ranks[index]),
                    ties=rank.ties | ties,
                    frozen=frozenset(origins.get(name, name) for name in rank.frozen),
                    regions={},  # known only for the names before this renaming
                    training=training[index],
                )
            )
        return resolved

    def _apply_to_training(self, ranks: Sequence[StepResult]) -> list[TrainingValues]:
        """What the ranks' training observed, with full tensors and the original's names."""
        tables: list[dict[Table, dict[str, torch.Tensor]]] = [{} for _ in ranks]
        for key in dict.fromkeys(key for rank in ranks for key in rank.training.tables):
            of_ranks = [rank.training.tables.get(key, {}) for rank in ranks]
            named, scalars = self._put_together(of_ranks), self._name_scalar_state(of_ranks)
            for rank_tables, rank_named, rank_scalars in zip(tables, named, scalars, strict=True):
                rank_tables[key] = rank_named | rank_scalars
        return [
            replace(
                rank.training,
                tables=rank_tables,
                settings={
                    setting: _rename(values, self._find_origins(index))
                    for setting, values in rank.training.settings.items()
                },
                stale=frozenset(
                    _rename(dict.fromkeys(rank.training.stale), self._find_origins(index))
                ),
            )
            for index, (rank, rank_tables) in enumerate(zip(ranks, tables, strict=True))
        ]

    def find_missing_elements(self) -> dict[str, str]:
        """Original parameters of which no rank holds some elements, with those elements as text."""
        missing_elements = {}
        for origin in self._moved:
            is_covered = torch.zeros(self._original[origin].numel(), dtype=torch.bool)
            for part in itertools.chain(*self._ranks):
                if origin in part.indices:
                    is_covered[part.indices[origin][1]] = True
            if not bool(is_covered.all()):
                missing_elements[origin] = _describe(
                    ~is_covered.reshape(self._original[origin].shape)
                )
        return missing_elements

    def _put_together(self, ranks: Sequence[Named]) -> list[dict[str, torch.Tensor]]:
        result = []
        for rank, named in enumerate(ranks):
            replaced = {part.name for part in self._ranks[rank] if not self._is_unmoved(part)}
            result.append({name: tensor for name, tensor in named.items() if name not in replaced})
        for origin in self._moved:
            aliases = self._find_aliases(origin)
            elements_of = [
                list(self._find_elements(origin, rank, named)) for rank, named in enumerate(ranks)
            ]
            for rank, named in enumerate(result):
                # A rank that holds a tied parameter twice has two gradients for it.
                copies = sorted({part.copy for part in elements_of[rank]}) or [0]
                names = [aliases[copy] for copy in copies] if len(copies) > 1 else aliases[:1]
                for copy, name in zip(copies, names, strict=True):
                    full = self._fill(origin, copy, rank, elements_of)
                    if full is not None:
                        named[name] = full
        return result

    def _name_scalar_state(self, ranks: Sequence[Named]) -> list[dict[str, torch.Tensor]]:
        """The optimizer's state of entire parameters, not of their elements, such as step counts.

        It is that of every original parameter that the rank's parameter holds elements of; a rank
        without it gets that of the nearest rank.
        """
        own = [
            {
                self._find_aliases(origin)[copy]: named[part.name]
                for origin in self._moved
                for copy, part in self._find_copies(origin, rank)
                if part.name in named and named[part.name].numel() != math.prod(part.shape)
            }
            for rank, named in enumerate(ranks)
        ]
        return [
            dict(ChainMap(*(own[near] for near in ranks_by_distance(self._sizes, rank))))
            for rank in range(len(ranks))
        ]

    def _find_origins(self, rank: int) -> dict[str, str]:
        """The original names of a rank's parameters that hold elements of a single parameter.

        Each copy of a tied parameter gets a name of its own.
        """
        fused = {part.name for part in self._ranks[rank] if len(part.indices) > 1}
        return {
            part.name: self._find_aliases(origin)[copy]
            for origin, _, _ in _marked(self._original)
            for copy, part in self._find_copies(origin, rank)
            if part.name not in fused
        }

    def _find_aliases(self, origin: str) -> list[str]:
        """All names of a parameter; a tied parameter has several."""
        tensor = self._original[origin]
        return [name for name, candidate in self._original.items() if candidate is tensor]

    def _is_unmoved(self, part: _Part) -> bool:
        return not any(origin in self._moved for origin in part.indices)

    def _find_copies(self, origin: str, rank: int) -> Iterator[tuple[int, _Part]]:
        """The parts of an original parameter on a rank, each with the index of its copy.

        A part under a name of the original parameter is that copy; any other part belongs
        to the first copy whose same elements the rank does not hold yet.
        """
        aliases = self._find_aliases(origin)
        if len(aliases) == 1:
            yield from ((0, part) for part in self._ranks[rank] if origin in part.indices)
            return
        is_covered = torch.zeros(len(aliases), self._original[origin].numel(), dtype=torch.bool)
        parts = [part for part in self._ranks[rank] if origin in part.indices]
        for part in sorted(parts, key=lambda part: part.name not in aliases):
            _, indices = part.indices[origin]
            free = (
                copy for copy in range(len(aliases)) if not bool(is_covered[copy, indices].any())
            )
            is_named = part.name in aliases
            copy = aliases.index(part.name) if is_named else next(free, len(aliases) - 1)
            is_covered[copy, indices] = True
            yield copy, part

    def _find_elements(self, origin: str, rank: int, named: Named) -> Iterator[_Elements]:
        """The elements of an original parameter that a rank holds."""
        for copy, part in self._find_copies(origin, rank):
            own_indices, indices = part.indices[origin]
            tensor = named.get(part.name)
            is_there = tensor is not None and tensor.numel() == math.prod(part.shape)
            values = None
            if tensor is not None and is_there:
                values = tensor.detach().cpu().flatten()[own_indices]
            yield _Elements(copy, indices, values)

    def _fill(
        self, origin: str, copy: int, rank: int, elements_of: Sequence[Sequence[_Elements]]
    ) -> torch.Tensor | None:
        """The full tensor of a copy on a rank: its own elements, then those of the nearest ranks.

        None if the rank holds elements without a value, such as without a gradient.
        """
        original = self._original[origin]
        if any(part.values is None for part in elements_of[rank] if part.copy == copy):
            return None
        suggestions = [
            part
            for neighbour in ranks_by_distance(self._sizes, rank)
            for part in elements_of[neighbour]
        ]
        same_copy = [part for part in suggestions if part.copy == copy]
        different_copies = [part for part in suggestions if part.copy != copy]
        present = [part for part in (*same_copy, *different_copies) if part.values is not None]
        if not present:
            return None
        values = [part.values for part in present if part.values is not None]
        full = torch.zeros(original.numel(), dtype=values[0].dtype)
        is_set = torch.zeros(original.numel(), dtype=torch.bool)
        for part, part_values in zip(present, values, strict=True):
            is_new = ~is_set[part.indices]
            full[part.indices[is_new]] = part_values[is_new].to(full.dtype)
            is_set[part.indices] = True
        return full.reshape(original.shape)


def _rename(named: Mapping[str, T], origins: Mapping[str, str]) -> dict[str, T]:
    return {origins.get(name, name): value for name, value in named.items()}


def _read_marks(parameters: Named, original: Named) -> Iterator[_Part]:
    """The parameters of a rank that contain marks."""
    marked = [(name, start) for name, start, _ in _marked(original)]
    total = sum(tensor.numel() for _, _, tensor in _marked(original))
    starts = torch.tensor([start for _, start in marked])
    for name, tensor in parameters.items():
        if not tensor.dtype.is_floating_point:
            continue
        numbers = tensor.detach().cpu().double().flatten()
        indices = (numbers - _FRACTION).round().long()
        is_mark = (indices.double() + _FRACTION == numbers) & (indices >= 1) & (indices <= total)
        mark_indices = is_mark.nonzero().flatten()  # without padding
        if not len(mark_indices):  # a new parameter, or computed from the original's
            continue
        sources = torch.bucketize(indices[mark_indices], starts, right=True) - 1
        elements_by_origin = {}
        for source in torch.unique(sources).tolist():
            origin, start = marked[source]
            chosen = mark_indices[sources == source]
            elements_by_origin[origin] = (chosen, indices[chosen] - start)
        yield _Part(name, tensor.shape, elements_by_origin)


def _describe(is_missing: torch.Tensor) -> str:
    """The bounding box of the missing elements as text, such as `[8:16, :]`."""
    parts = []
    for dim in range(is_missing.ndim):
        remaining_dims = [
            remaining_dim for remaining_dim in range(is_missing.ndim) if remaining_dim != dim
        ]
        along = is_missing.any(remaining_dims) if remaining_dims else is_missing
        indices = along.nonzero().flatten()
        first, last = int(indices[0]), int(indices[-1])
        is_all = first == 0 and last == is_missing.shape[dim] - 1
        parts.append(":" if is_all else f"{first}:{last + 1}")
    return f"[{', '.join(parts)}]"
