"""The tensors to compare: each with the single device's runs of it, and what every rank has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from shardscope.numerics.noise import Floor, as_exact, epsilon, find_floor, is_inexact
from shardscope.parallel.parity.outcome import Key, Outcome, tie_names
from shardscope.record import TensorKind

__all__ = ["Case", "Runs", "cases"]


@final
@dataclass(frozen=True, eq=False)
class Runs:
    """All runs of the single device: as it is, exact, and with weights changed in their last place.

    `precision` is the lowest in which the parallel version is allowed to compute, if that is lower
    than the single device's.
    """

    reference: Outcome
    exact: Outcome | None = None
    jittered: tuple[tuple[Outcome, Outcome | None], ...] = ()
    precision: torch.dtype | None = None


@final
@dataclass(frozen=True, eq=False)
class Case:
    """One tensor of all runs: the single device's, exact if there is one, and each rank's."""

    kind: TensorKind
    name: str
    reference: torch.Tensor | None
    target: torch.Tensor | None  # what to be near: exact, or the reference itself
    floor: Floor | None  # None for whole numbers
    ranks: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]  # of the mesh
    precision: torch.dtype | None = None
    batch_axes: tuple[int, ...] = ()  # those of the mesh along which the batch is cut


def cases(
    runs: Runs,
    candidate: Outcome | Sequence[Outcome],
    sizes: Sequence[int] = (),
    *,
    batch_axes: Sequence[int] = (),
) -> Iterator[Case]:
    """The tensors to compare, in the single device's order; tied ones once."""
    ranks = [candidate] if isinstance(candidate, Outcome) else list(candidate)
    sizes = tuple(sizes) or (len(ranks),)
    tensors = [one.tensors() for one in ranks]
    table = _Table(runs)
    changed = runs.reference.changed.union(*(one.changed for one in ranks))
    skipped = {(TensorKind.GRADIENT, name) for name in _repeated_ties(runs.reference, ranks)}
    for key in dict.fromkeys((*table.references, *(key for one in tensors for key in one))):
        if key in skipped or (key[0] is TensorKind.BUFFER and key[1] not in changed):
            continue
        held = tuple(one.get(key) for one in tensors)
        if key[0] is TensorKind.GRADIENT:
            held = _stand_in(key[1], held, ranks)
        yield table.make_case(key, held, sizes, tuple(batch_axes))
    yield from _changed_parameters(runs.reference, ranks, sizes)


def _stand_in(
    name: str, held: tuple[torch.Tensor | None, ...], ranks: Sequence[Outcome]
) -> tuple[torch.Tensor | None, ...]:
    """For a rank that does not have the parameter, one that does answers."""
    answers = [one for one, rank in zip(held, ranks, strict=True) if name not in rank.absent]
    answer = answers[0] if answers else None
    return tuple(
        answer if name in rank.absent else one for one, rank in zip(held, ranks, strict=True)
    )


def _changed_parameters(
    reference: Outcome, ranks: Sequence[Outcome], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """Ranks hold only those that sharding changed: the others' are the original's."""
    for name in dict.fromkeys(name for one in ranks for name in one.parameters):
        original = reference.parameters.get(name)
        if original is not None:
            held = tuple(one.parameters.get(name, original) for one in ranks)
            target = as_exact(original)
            floor = find_floor(target, None, (), original.dtype)
            yield Case(TensorKind.PARAMETER, name, original, target, floor, held, sizes)


def _repeated_ties(reference: Outcome, ranks: Sequence[Outcome]) -> set[str]:
    """Names of tied parameters past the first, where they are tied in every run."""
    ties = [tie_names(one.gradients) for one in (reference, *ranks)]
    return {
        name
        for name, first in ties[0].items()
        if first != name and all(one.get(name) == one.get(first, "") for one in ties)
    }


@final
class _Table:
    """The runs of the single device, tensor by tensor."""

    def __init__(self, runs: Runs) -> None:
        self.references = runs.reference.tensors()
        self._exacts = {} if runs.exact is None else runs.exact.tensors()
        self._jittered = [
            (one.tensors(), {} if other is None else other.tensors())
            for one, other in runs.jittered
        ]
        self._precision = runs.precision

    def make_case(
        self,
        key: Key,
        held: tuple[torch.Tensor | None, ...],
        sizes: tuple[int, ...],
        batch_axes: tuple[int, ...],
    ) -> Case:
        reference, floor = self.references.get(key), None
        target = reference
        if reference is not None and is_inexact(reference):
            target, floor = self._find_target(key, reference)
        return Case(*key, reference, target, floor, held, sizes, self._precision, batch_axes)

    def _find_target(self, key: Key, reference: torch.Tensor) -> tuple[torch.Tensor, Floor]:
        exact = self._exacts.get(key)
        wide = None if exact is None or exact.shape != reference.shape else as_exact(exact)
        jittered = [
            (as_exact(one[key]), None if wide is None or key not in other else as_exact(other[key]))
            for one, other in self._jittered
            if key in one and one[key].shape == reference.shape
        ]
        own = as_exact(reference)
        floor = find_floor(own, wide, jittered, _coarser(reference.dtype, self._precision))
        return own if wide is None else wide, floor


def _coarser(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    if other is None or epsilon(other) <= epsilon(dtype):
        return dtype
    return other
