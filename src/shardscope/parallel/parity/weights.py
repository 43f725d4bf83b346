"""Which elements of the original's parameters each rank holds, and under which name.

A parallel model may rename a parameter, fuse several, transpose one, or hold other experts on each
rank. So it is sharded once more with weights that are marks: every element holds a number of its
own. Where a mark is found, there its element went, and the gradient there is that element's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from shardscope.parallel.parity.execute import named_parameters
from shardscope.parallel.parity.layouts import ranks_by_distance
from shardscope.parallel.parity.outcome import Outcome, tie_names

__all__ = ["TracedWeights", "is_unclear", "mark_weights"]

Named = Mapping[str, torch.Tensor]

# Beside its index a mark has a fraction, which a mark that was scaled or added to does not have.
_FRACTION = 323_567 / 2**20


def is_unclear(reference: Outcome, ranks: Sequence[Outcome]) -> bool:
    """Whether names and shapes do not say which elements of the parameters each rank holds."""
    ties = tie_names(reference.parameters)
    for rank in ranks:
        known = {first for name, first in ties.items() if name not in rank.absent}
        has_other_shape = any(
            tensor.shape != reference.parameters[name].shape
            for name, tensor in rank.parameters.items()
            if name in reference.parameters
        )
        if rank.added or has_other_shape or any(ties.get(n, n) not in known for n in rank.absent):
            return True
    return False


def mark_weights(model: nn.Module) -> None:
    """Write marks into all parameters of a model that is in double precision."""
    with torch.no_grad():
        for _, start, parameter in _marked(dict(named_parameters(model))):
            marks = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
            parameter.copy_((marks + _FRACTION).reshape(parameter.shape))


def _marked(named: Named) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Each parameter that can hold marks, with the first of them; tied ones under one name."""
    start = 1
    for name, first in tie_names(named).items():
        if name == first and named[name].dtype.is_floating_point:
            yield name, start, named[name]
            start += named[name].numel()


@final
@dataclass(frozen=True, eq=False)
class _Part:
    """A parameter of a rank that holds elements of the original's parameters.

    `places` has for each of those the indices of the elements, here and there, both flattened.
    """

    name: str
    shape: torch.Size
    places: dict[str, tuple[torch.Tensor, torch.Tensor]]


@final
@dataclass(frozen=True, eq=False)
class _Elements:
    """Elements of one of the original's parameters that a rank holds, with their values, if any.

    Of a tied parameter a rank may hold several copies; `copy` is the index of this one.
    """

    copy: int
    places: torch.Tensor
    values: torch.Tensor | None


@final
class TracedWeights:
    """Where marks were found, on every rank of a mesh of these sizes."""

    def __init__(self, original: Named, ranks: Sequence[Outcome], sizes: Sequence[int]) -> None:
        self._original = original
        self._sizes = tuple(sizes)
        self._ranks = [list(_read_marks(rank.parameters, original)) for rank in ranks]
        self._moved = self._find_moved([set(rank.parameters) for rank in ranks])

    def _find_moved(self, names: Sequence[set[str]]) -> list[str]:
        """The original's parameters that are not as they were on every rank."""
        untraced = [
            own.difference(part.name for part in parts)
            for own, parts in zip(names, self._ranks, strict=True)
        ]
        moved = []
        for origin, _, _ in _marked(self._original):
            holders = [[part for part in parts if origin in part.places] for parts in self._ranks]
            is_in_place = all(
                parts and all(self._is_in_place(part, origin) for part in parts)
                for parts in holders
            )
            # Where a rank computed the parameter anew, its name has to do.
            is_computed = any(origin in own for own in untraced)
            if any(holders) and not is_in_place and not is_computed:
                moved.append(origin)
        return moved

    def _is_in_place(self, part: _Part, origin: str) -> bool:
        original = self._original[origin]
        is_named = self._original.get(part.name) is original
        is_full = len(part.places) == 1 and part.shape == original.shape
        return is_named and is_full and bool((part.places[origin][1].diff() == 1).all())

    def rename_modules(self, rank: int) -> dict[str, str]:
        """The original's names of a rank's modules that hold another module's parameters."""
        renamed: dict[str, set[str]] = {}
        for name, origin in self._find_origins(rank).items():
            own, there = name.split("."), origin.split(".")
            if len(own) != len(there) or own[-1] != there[-1]:
                continue
            end = max((i + 1 for i in range(len(own)) if own[i] != there[i]), default=0)
            if end:
                renamed.setdefault(".".join(own[:end]), set()).add(".".join(there[:end]))
        return {name: names.pop() for name, names in renamed.items() if len(names) == 1}

    def apply(self, ranks: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes with full gradients, and weights under the original's names."""
        gradients = self._put_together([rank.gradients for rank in ranks])
        moved = {name for origin in self._moved for name in self._find_aliases(origin)}
        resolved = []
        for index, (rank, own) in enumerate(zip(ranks, gradients, strict=True)):
            origins = self._find_origins(index)
            ties = {new: origins.get(rank.ties.get(old, old), new) for old, new in origins.items()}
            resolved.append(
                replace(
                    rank,
                    gradients=own,
                    parameters={
                        origins.get(name, name): tensor for name, tensor in rank.parameters.items()
                    },
                    absent=rank.absent - moved,
                    added=rank.added.difference(part.name for part in self._ranks[index]),
                    ties=rank.ties | ties,
                    frozen=frozenset(origins.get(name, name) for name in rank.frozen),
                    regions={},  # those of tensors under other names
                )
            )
        return resolved

    def find_unheld(self) -> dict[str, str]:
        """The original's parameters of which some elements are on no rank, with those elements."""
        unheld = {}
        for origin in self._moved:
            is_covered = torch.zeros(self._original[origin].numel(), dtype=torch.bool)
            for part in itertools.chain(*self._ranks):
                if origin in part.places:
                    is_covered[part.places[origin][1]] = True
            if not bool(is_covered.all()):
                unheld[origin] = _describe(~is_covered.reshape(self._original[origin].shape))
        return unheld

    def _put_together(self, ranks: Sequence[Named]) -> list[dict[str, torch.Tensor]]:
        result = []
        for rank, named in enumerate(ranks):
            replaced = {part.name for part in self._ranks[rank] if not self._is_kept(part)}
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

    def _find_origins(self, rank: int) -> dict[str, str]:
        """For a rank's parameters that hold elements of a single parameter, the original's name.

        Of a tied parameter's names, each copy has its own.
        """
        fused = {part.name for part in self._ranks[rank] if len(part.places) > 1}
        return {
            part.name: self._find_aliases(origin)[copy]
            for origin, _, _ in _marked(self._original)
            for copy, part in self._find_copies(origin, rank)
            if part.name not in fused
        }

    def _find_aliases(self, origin: str) -> list[str]:
        """All names of a parameter, which may be tied."""
        tensor = self._original[origin]
        return [name for name, other in self._original.items() if other is tensor]

    def _is_kept(self, part: _Part) -> bool:
        return not any(origin in self._moved for origin in part.places)

    def _find_copies(self, origin: str, rank: int) -> Iterator[tuple[int, _Part]]:
        """The parts of an original's parameter on a rank, each with the index of its copy.

        A part that has a name of the original's parameter is that copy; any other belongs to the
        first copy of which the rank does not hold the same elements already.
        """
        aliases = self._find_aliases(origin)
        if len(aliases) == 1:
            yield from ((0, part) for part in self._ranks[rank] if origin in part.places)
            return
        is_covered = torch.zeros(len(aliases), self._original[origin].numel(), dtype=torch.bool)
        parts = [part for part in self._ranks[rank] if origin in part.places]
        for part in sorted(parts, key=lambda part: part.name not in aliases):
            _, places = part.places[origin]
            free = (
                copy for copy in range(len(aliases)) if not bool(is_covered[copy, places].any())
            )
            is_named = part.name in aliases
            copy = aliases.index(part.name) if is_named else next(free, len(aliases) - 1)
            is_covered[copy, places] = True
            yield copy, part

    def _find_elements(self, origin: str, rank: int, named: Named) -> Iterator[_Elements]:
        """The elements of an original's parameter that a rank holds."""
        for copy, part in self._find_copies(origin, rank):
            own, places = part.places[origin]
            tensor = named.get(part.name)
            is_there = tensor is not None and tensor.numel() == math.prod(part.shape)
            values = tensor.detach().cpu().flatten()[own] if tensor is not None else None
            yield _Elements(copy, places, values if is_there else None)

    def _fill(
        self, origin: str, copy: int, rank: int, elements_of: Sequence[Sequence[_Elements]]
    ) -> torch.Tensor | None:
        """The full tensor of a copy on a rank: its own elements, the others of the nearest ranks.

        None if it holds elements of which it has no value, such as no gradient.
        """
        original = self._original[origin]
        if any(part.values is None for part in elements_of[rank] if part.copy == copy):
            return None
        near = [
            part for other in ranks_by_distance(self._sizes, rank) for part in elements_of[other]
        ]
        same = [part for part in near if part.copy == copy]
        others = [part for part in near if part.copy != copy]
        present = [part for part in (*same, *others) if part.values is not None]
        if not present:
            return None
        values = [part.values for part in present if part.values is not None]
        full = torch.zeros(original.numel(), dtype=values[0].dtype)
        is_set = torch.zeros(original.numel(), dtype=torch.bool)
        for part, own in zip(present, values, strict=True):
            is_new = ~is_set[part.places]
            full[part.places[is_new]] = own[is_new].to(full.dtype)
            is_set[part.places] = True
        return full.reshape(original.shape)


def _read_marks(parameters: Named, original: Named) -> Iterator[_Part]:
    """The parameters of a rank in which marks are found."""
    marked = [(name, start) for name, start, _ in _marked(original)]
    total = sum(tensor.numel() for _, _, tensor in _marked(original))
    starts = torch.tensor([start for _, start in marked])
    for name, tensor in parameters.items():
        if not tensor.dtype.is_floating_point:
            continue
        numbers = tensor.detach().cpu().double().flatten()
        indices = (numbers - _FRACTION).round().long()
        is_mark = (indices.double() + _FRACTION == numbers) & (indices >= 1) & (indices <= total)
        own = is_mark.nonzero().flatten()  # the others are padding
        if not len(own):  # it is new, or was computed from the original's
            continue
        sources = torch.bucketize(indices[own], starts, right=True) - 1
        places = {}
        for source in torch.unique(sources).tolist():
            origin, start = marked[source]
            chosen = own[sources == source]
            places[origin] = (chosen, indices[chosen] - start)
        yield _Part(name, tensor.shape, places)


def _describe(is_missing: torch.Tensor) -> str:
    """The bounding box of some elements, as `[8:16, :]`."""
    parts = []
    for dim in range(is_missing.ndim):
        others = [other for other in range(is_missing.ndim) if other != dim]
        along = is_missing.any(others) if others else is_missing
        indices = along.nonzero().flatten()
        first, last = int(indices[0]), int(indices[-1])
        is_all = first == 0 and last == is_missing.shape[dim] - 1
        parts.append(":" if is_all else f"{first}:{last + 1}")
    return f"[{', '.join(parts)}]"
