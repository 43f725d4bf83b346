"""The tensors to compare: each with the single device's runs of it, and what every rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from shardscope.numerics.noise import Floor, as_exact, epsilon, find_floor, is_inexact
from shardscope.parallel.parity.layouts import find_submesh
from shardscope.parallel.parity.outcome import Key, Outcome, Region, tie_names
from shardscope.record import TensorKind

__all__ = ["Case", "Runs", "cases", "drop_extra_calls"]

Tensors = list[torch.Tensor]


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
    """One tensor of all runs: the single device's, exact if there is one, and each rank's.

    An output of a model that is called several times in a step is one tensor, of all calls. Where
    all ranks call it equally often, `calls` has what each rank returned in each call. Where full
    tensors were gathered, `regions` has what each rank holds of its own, if that is known.
    """

    kind: TensorKind
    name: str
    reference: torch.Tensor | None
    target: torch.Tensor | None  # what to be near: exact, or the reference itself
    floor: Floor | None  # None for integers
    ranks: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]  # of the mesh
    precision: torch.dtype | None = None
    batch_axes: tuple[int, ...] = ()  # those of the mesh along which the batch is sharded
    batch_dim: int = 0
    calls: tuple[tuple[torch.Tensor, ...], ...] = ()
    is_scalar: bool = False  # in each call
    regions: tuple[Region | None, ...] = ()

    def choose_ranks(self, ranks: Sequence[int]) -> Case:
        """The same case on some of the ranks."""
        return replace(
            self,
            ranks=tuple(self.ranks[rank] for rank in ranks),
            sizes=find_submesh(self.sizes, ranks),
            calls=tuple(self.calls[rank] for rank in ranks) if self.calls else (),
            regions=tuple(self.regions[rank] for rank in ranks) if self.regions else (),
        )


def cases(
    runs: Runs,
    candidate: Outcome | Sequence[Outcome],
    sizes: Sequence[int] = (),
    *,
    batch_axes: Sequence[int] = (),
    batch_dim: int = 0,
) -> Iterator[Case]:
    """The tensors to compare, in the single device's order; tied ones once."""
    ranks = [candidate] if isinstance(candidate, Outcome) else list(candidate)
    sizes = tuple(sizes) or (len(ranks),)
    table = _Table(runs, sizes, tuple(batch_axes), batch_dim)
    tensors = [rank.tensors() for rank in ranks]
    changed = runs.reference.changed.union(*(rank.changed for rank in ranks))
    added = frozenset().union(*(rank.added for rank in ranks))
    aliases = _find_aliases(runs.reference, ranks)
    for key in dict.fromkeys((*table.references, *(key for rank in tensors for key in rank))):
        kind, name = key
        is_unchanged = kind is TensorKind.BUFFER and name not in changed
        if is_unchanged or (name in added and key not in table.references):
            continue
        regions = tuple(rank.regions.get(key) for rank in ranks)
        if kind is not TensorKind.GRADIENT:
            for case in table.make_cases(key, [rank.get(key, []) for rank in tensors]):
                yield replace(case, regions=regions)
        elif aliases.get(name, name) == name:
            gradients = _find_gradients(name, aliases, ranks)
            yield replace(table.make_case(key, gradients), regions=regions)
    yield from _changed_parameters(runs.reference, ranks, sizes)


def _find_aliases(reference: Outcome, ranks: Sequence[Outcome]) -> dict[str, str]:
    """Names of tied parameters that need no comparison of their own, with the name that has one.

    A tie is broken where a rank has two gradients for it; a rank may well know it under one name.
    """
    ties = tie_names(reference.gradients)
    covered = {}
    for name, first in ties.items():
        group = [other for other, its_first in ties.items() if its_first == first]
        if len(group) > 1 and all(
            len({id(rank.gradients[other]) for other in group if other in rank.gradients}) < 2
            for rank in ranks
        ):
            covered[name] = first
    return covered


def _find_gradients(
    name: str, aliases: Mapping[str, str], ranks: Sequence[Outcome]
) -> tuple[torch.Tensor | None, ...]:
    """Each rank's gradient; for a rank that does not have the parameter, that of one that does."""
    names = [name, *(other for other, first in aliases.items() if first == name)]
    gradients = [
        next((rank.gradients[alias] for alias in names if alias in rank.gradients), None)
        for rank in ranks
    ]
    has_it = [any(alias not in rank.absent for alias in names) for rank in ranks]
    pairs = list(zip(gradients, has_it, strict=True))
    answer = next((gradient for gradient, is_there in pairs if is_there), None)
    return tuple(gradient if is_there else answer for gradient, is_there in pairs)


def _changed_parameters(
    reference: Outcome, ranks: Sequence[Outcome], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """Ranks hold only those that sharding changed: the others' are the original's."""
    for name in dict.fromkeys(name for rank in ranks for name in rank.parameters):
        original = reference.parameters.get(name)
        if original is not None:
            changed = next(rank.parameters[name] for rank in ranks if name in rank.parameters)
            tensors = tuple(
                rank.parameters.get(name, changed if name in rank.absent else original)
                for rank in ranks
            )
            target = as_exact(original)
            floor = find_floor(target, None, (), original.dtype)
            key = (TensorKind.PARAMETER, name)
            regions = tuple(rank.regions.get(key) for rank in ranks)
            yield Case(*key, original, target, floor, tensors, sizes, regions=regions)


@final
class _Table:
    """The runs of the single device, tensor by tensor."""

    def __init__(
        self, runs: Runs, sizes: tuple[int, ...], batch_axes: tuple[int, ...], batch_dim: int
    ) -> None:
        self.references = runs.reference.tensors()
        self._exacts = {} if runs.exact is None else runs.exact.tensors()
        self._jittered = [
            (rounded.tensors(), {} if exact is None else exact.tensors())
            for rounded, exact in runs.jittered
        ]
        self._precision = runs.precision
        self._sizes = sizes
        self._batch_axes = batch_axes
        self._batch_dim = batch_dim

    def make_cases(self, key: Key, ranks: Sequence[Tensors]) -> Iterator[Case]:
        """One case of all calls, or one for each where their tensors cannot be concatenated."""
        reference = self.references.get(key, [])
        ranks = [drop_extra_calls(calls, reference) for calls in ranks]
        counts = {len(calls) for calls in (reference, *ranks)}
        if counts <= {0, 1}:
            yield self.make_case(key, tuple(calls[0] if calls else None for calls in ranks))
            return
        # Losses are averaged, unless the runs can be compared call by call.
        is_averaged = len(counts) > 1 or bool(self._batch_axes)
        joined = [
            _concatenate(calls, self._batch_dim, is_averaged=is_averaged)
            for calls in (reference, *ranks)
        ]
        if all(tensor is not None for tensor in joined):
            is_even = len({len(calls) for calls in ranks}) == 1 and reference[0].ndim > 0
            calls = tuple(map(tuple, ranks)) if is_even else ()
            yield self.make_case(key, tuple(joined[1:]), is_averaged=is_averaged, calls=calls)
        elif len(counts) == 1:
            for call in range(len(reference)):
                yield self.make_case(key, tuple(calls[call] for calls in ranks), call=call)
        else:
            yield self.make_case(key, tuple(calls[-1] if calls else None for calls in ranks))

    def make_case(
        self,
        key: Key,
        ranks: tuple[torch.Tensor | None, ...],
        *,
        call: int | None = None,
        is_averaged: bool | None = None,
        calls: tuple[tuple[torch.Tensor, ...], ...] = (),
    ) -> Case:
        """The case of one call, by default the last; of all calls if `is_averaged` is given."""

        def choose(tensors: dict[Key, Tensors]) -> torch.Tensor | None:
            of_calls = tensors.get(key, [])
            if is_averaged is not None:
                return _concatenate(of_calls, self._batch_dim, is_averaged=is_averaged)
            return of_calls[-1 if call is None else call] if of_calls else None

        kind, name = key
        reference = choose(self.references)
        target, floor = reference, None
        if reference is not None and is_inexact(reference):
            exact = choose(self._exacts)
            jittered = [(choose(rounded), choose(other)) for rounded, other in self._jittered]
            target, floor = self._find_target(reference, exact, jittered)
        return Case(
            kind,
            name if call is None else f"{name} of call {call + 1}".lstrip(),
            reference,
            target,
            floor,
            ranks,
            self._sizes,
            self._precision,
            self._batch_axes,
            self._batch_dim,
            calls,
            is_scalar=all(tensor.ndim == 0 for tensor in self.references.get(key, [])),
        )

    def _find_target(
        self,
        reference: torch.Tensor,
        exact: torch.Tensor | None,
        jittered: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
    ) -> tuple[torch.Tensor, Floor]:
        wide = None if exact is None or exact.shape != reference.shape else as_exact(exact)
        moved = [
            (as_exact(rounded), None if wide is None or other is None else as_exact(other))
            for rounded, other in jittered
            if rounded is not None and rounded.shape == reference.shape
        ]
        own = as_exact(reference)
        floor = find_floor(own, wide, moved, _coarser(reference.dtype, self._precision))
        return own if wide is None else wide, floor


def drop_extra_calls(calls: Tensors, reference: Tensors) -> Tensors:
    """Without the first calls where there are more than the single device's, of the same shapes.

    Those are a warm-up, or a pipeline stage's that infers shapes.
    """
    last = calls[-len(reference) :] if reference else []
    is_alike = [call.shape for call in last] == [call.shape for call in reference]
    return last if len(calls) > len(reference) > 0 and is_alike else calls


def _concatenate(calls: Tensors, dim: int, *, is_averaged: bool) -> torch.Tensor | None:
    """The tensors of all calls as one along the batch, scalars averaged; None if not alike."""
    if not calls or len({(call.ndim, call.dtype) for call in calls}) > 1:
        return None
    if calls[0].ndim == 0:
        stacked = torch.stack(calls)
        return stacked.mean() if is_averaged and is_inexact(stacked) else stacked
    along = min(dim, calls[0].ndim - 1)
    rests = {(*call.shape[:along], *call.shape[along + 1 :]) for call in calls}
    return torch.cat(calls, along) if len(rests) == 1 else None


def _coarser(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    if other is None or epsilon(other) <= epsilon(dtype):
        return dtype
    return other
