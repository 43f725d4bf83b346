"""Pairs each tensor of the single device's runs with the same tensor of every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

from shardscope.numerics import (
    NoiseFloor,
    epsilon,
    find_floor,
    find_own_floor,
    is_inexact,
    to_fp64_on_cpu,
)
from shardscope.parallel.equivalence.modes import list_differing
from shardscope.parallel.equivalence.names import tie_names
from shardscope.parallel.equivalence.step_result import Region, StepResult
from shardscope.parallel.equivalence.tensor_shards import find_submesh
from shardscope.parallel.equivalence.training import CLIPPED, DECISION, Key, Table
from shardscope.record import TensorKind

Tensors = list[torch.Tensor]
_SCALARS = (TensorKind.LOSS, TensorKind.NORM, TensorKind.COUNTER, TensorKind.REPORTED)
OF_A_RANK = (TensorKind.OUTPUT, TensorKind.LOSS, TensorKind.REPORTED, TensorKind.COUNTER)
"""The kinds of tensors that each rank may compute of its own shard of the batch."""
_MAX_EXTRA = 1  # calls before those with samples, where micro-batches have another size
_CHANGEABLE = (TensorKind.BUFFER, TensorKind.COUNTER)  # compared where the step changed them


class Mesh(NamedTuple):
    """The sizes of a mesh, and the axes and the dim along which the batch is sharded."""

    sizes: tuple[int, ...]
    batch_axes: tuple[int, ...] = ()
    batch_dim: int = 0


@final
@dataclass(frozen=True, eq=False)
class Runs:
    """The single device's runs: its own precision, double precision, and perturbed runs.

    Each perturbed run has weights changed by one unit in the last place, and is a pair: in its
    own precision and in double precision. `precision` is the lowest dtype in which the parallel
    version may compute, if that is lower than the single device's.
    """

    reference: StepResult
    fp64: StepResult | None = None
    perturbed_runs: tuple[tuple[StepResult, StepResult | None], ...] = ()
    precision: torch.dtype | None = None


@final
@dataclass(frozen=True, eq=False)
class Case:
    """One tensor to compare: the single device's, in double precision if known, and each rank's.

    The outputs of several calls of the model in one step are concatenated into one tensor.
    Where all ranks call it equally often, `calls` holds what each rank returned in each call.
    For gathered tensors, `regions` holds the part that each rank stores, where that is known.
    `own_floor` is the noise around the reference where double precision gives another result.
    """

    kind: TensorKind
    name: str
    reference: torch.Tensor | None
    target: torch.Tensor | None  # the result in double precision, or the reference itself
    floor: NoiseFloor | None  # None for integers
    ranks: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]  # sizes of the mesh axes
    precision: torch.dtype | None = None
    batch_axes: tuple[int, ...] = ()  # mesh axes along which the batch is sharded
    batch_dim: int = 0
    calls: tuple[tuple[torch.Tensor, ...], ...] = ()
    is_scalar: bool = False  # in each call
    regions: tuple[Region | None, ...] = ()
    own_floor: NoiseFloor | None = None

    def choose_ranks(self, ranks: Sequence[int]) -> Case:
        """The same case, restricted to these ranks."""
        return replace(
            self,
            ranks=tuple(self.ranks[rank] for rank in ranks),
            sizes=find_submesh(self.sizes, ranks),
            calls=tuple(self.calls[rank] for rank in ranks) if self.calls else (),
            regions=tuple(self.regions[rank] for rank in ranks) if self.regions else (),
        )


def make_cases(
    runs: Runs,
    candidate: StepResult | Sequence[StepResult],
    sizes: Sequence[int] = (),
    *,
    batch_axes: Sequence[int] = (),
    batch_dim: int = 0,
) -> Iterator[Case]:
    """The tensors to compare, in the single device's order; each tied parameter once."""
    ranks = [candidate] if isinstance(candidate, StepResult) else list(candidate)
    sizes = tuple(sizes) or (len(ranks),)
    table = _Table(runs, sizes, tuple(batch_axes), batch_dim)
    tensors = [rank.tensors() for rank in ranks]
    changed = runs.reference.changed.union(*(rank.changed for rank in ranks))
    added = frozenset().union(*(rank.added for rank in ranks))
    aliases = _find_aliases(runs.reference, ranks)
    # A pipeline may call only its stages, which are parts of the model.
    has_parts_only = not any(rank.num_calls for rank in ranks) and any(r.gradients for r in ranks)
    for key in dict.fromkeys((*table.references, *(key for rank in tensors for key in rank))):
        kind, name = key
        is_unchanged = kind in _CHANGEABLE and name not in changed
        is_uncalled = kind is TensorKind.OUTPUT and has_parts_only
        if kind is TensorKind.GRADIENT or is_unchanged or is_uncalled:
            continue
        if name in added and key not in table.references:
            continue
        of_ranks = [rank.get(key, []) for rank in tensors]
        if key == DECISION:
            yield from _make_decision_cases(table.references.get(key, []), of_ranks, sizes)
            continue
        if kind in _SCALARS:
            yield from table.make_scalar_cases(key, of_ranks)
            continue
        regions = tuple(rank.regions.get(key) for rank in ranks)
        for case in table.make_cases_of_calls(key, of_ranks):
            yield replace(case, regions=regions)
    for of_parameters in dict.fromkeys(
        key for result in (runs.reference, *ranks) for key in result.tables()
    ):
        if of_parameters != CLIPPED or any(map(_changes_gradients, (runs.reference, *ranks))):
            yield from _make_parameter_cases(table, of_parameters, aliases, added, ranks)
    yield from _make_setting_cases(runs.reference, ranks, sizes)
    yield from _make_mode_cases(runs.reference, ranks, sizes)
    yield from _make_redrawn_cases(runs.reference, ranks, sizes)
    yield from _changed_parameters(runs.reference, ranks, sizes)


def _changes_gradients(result: StepResult) -> bool:
    """Whether the optimizer gets other gradients than those that are compared before clipping."""
    clipped = result.training.tables.get(CLIPPED, {})
    return any(
        name in result.gradients and not torch.equal(result.gradients[name], tensor)
        for name, tensor in clipped.items()
    )


def _make_parameter_cases(
    table: _Table,
    of_parameters: Table,
    aliases: Mapping[str, str],
    added: Collection[str],
    ranks: Sequence[StepResult],
) -> Iterator[Case]:
    """Cases of tensors that belong to parameters, such as gradients; tied parameters once."""
    kind, entry = of_parameters
    references = table.references_of(of_parameters)
    of_ranks = [rank.tables().get(of_parameters, {}) for rank in ranks]
    # An optimizer that is sharded by parameters has the state of one on some ranks only.
    absent = [
        rank.absent | (references.keys() - named.keys() if kind is TensorKind.STATE else set())
        for rank, named in zip(ranks, of_ranks, strict=True)
    ]
    for name in dict.fromkeys(name for named in (references, *of_ranks) for name in named):
        if aliases.get(name, name) != name or (name in added and name not in references):
            continue
        tensors = _find_of_parameter(name, aliases, of_ranks, absent)
        region_name = name if kind is TensorKind.GRADIENT else f"{name}\0{entry}"
        regions = tuple(rank.regions.get((kind, region_name)) for rank in ranks)
        case = table.make_parameter_case(of_parameters, name, tensors)
        yield replace(case, regions=regions)


def _find_aliases(reference: StepResult, ranks: Sequence[StepResult]) -> dict[str, str]:
    """Names of tied parameters that need no comparison, with the name that is compared instead.

    A tie is broken where a rank has two gradients for it; a rank may have it under one name
    only.
    """
    ties = tie_names(reference.gradients)
    covered = {}
    for name, first in ties.items():
        group = [alias for alias, first_alias in ties.items() if first_alias == first]
        if len(group) > 1 and all(
            len({id(rank.gradients[alias]) for alias in group if alias in rank.gradients}) < 2
            for rank in ranks
        ):
            covered[name] = first
    return covered


def _find_of_parameter(
    name: str,
    aliases: Mapping[str, str],
    of_ranks: Sequence[Mapping[str, torch.Tensor]],
    absent: Sequence[Collection[str]],
) -> tuple[torch.Tensor | None, ...]:
    """Each rank's tensor; a rank without the parameter gets that of a rank that has it."""
    names = [name, *(alias for alias, first in aliases.items() if first == name)]
    tensors = [
        next((named[alias] for alias in names if alias in named), None) for named in of_ranks
    ]
    has_it = [any(alias not in rank_absent for alias in names) for rank_absent in absent]
    pairs = list(zip(tensors, has_it, strict=True))
    answer = next((tensor for tensor, is_there in pairs if is_there), None)
    return tuple(tensor if is_there else answer for tensor, is_there in pairs)


def _make_setting_cases(
    reference: StepResult, ranks: Sequence[StepResult], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """A case for each setting of the optimizer: its values for all parameters in one tensor."""
    of_ranks = [rank.training.settings for rank in ranks]
    for setting, values in reference.training.settings.items():
        known = [settings.get(setting, {}) for settings in of_ranks]
        names = [name for name in values if any(name in of_rank for of_rank in known)]
        if not names:
            continue
        single = torch.tensor([values[name] for name in names], dtype=torch.float64)
        tensors = tuple(
            torch.tensor([of_rank.get(name, values[name]) for name in names], dtype=torch.float64)
            for of_rank in known
        )
        floor = find_floor(single, None, (), torch.float32)
        yield Case(TensorKind.SETTING, setting, single, single, floor, tensors, sizes)


def _make_decision_cases(
    reference: Tensors, ranks: Sequence[Tensors], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """A case of the last number that a scheduler decides by, if ranks have different ones.

    Ranks that agree decide alike, as a single device does that has a multiple of the number.
    """
    known = [numbers[-1] for numbers in ranks if numbers]
    floor = find_floor(known[0], None, (), torch.float32) if known else None
    if floor is not None and not all(floor.covers(number, known[0]) for number in known):
        single = reference[-1] if reference else known[0]
        tensors = tuple(numbers[-1] if numbers else known[0] for numbers in ranks)
        yield Case(*DECISION, single, single, floor, tensors, sizes)


def _make_mode_cases(
    reference: StepResult, ranks: Sequence[StepResult], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """A case for each module that ranks call in other modes than each other, or the original."""
    of_ranks = [rank.training.modes for rank in ranks]
    for name, single, modes in list_differing(reference.training.modes, of_ranks):
        tensors = tuple(torch.tensor(int(mode)) for mode in modes)
        wanted = torch.tensor(int(single))
        label = f"{name}.training".lstrip(".")
        yield Case(TensorKind.MODE, label, wanted, wanted, None, tensors, sizes)


def _make_redrawn_cases(
    reference: StepResult, ranks: Sequence[StepResult], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """A case for each module that draws other numbers on ranks when backward calls it again."""
    for name in sorted(frozenset().union(*(rank.draws.redrawn for rank in ranks))):
        if name not in reference.draws.redrawn:
            tensors = tuple(torch.tensor(int(name in rank.draws.redrawn)) for rank in ranks)
            none = torch.tensor(0)
            yield Case(TensorKind.REDRAWN, f"{name}.draws", none, none, None, tensors, sizes)


def _changed_parameters(
    reference: StepResult, ranks: Sequence[StepResult], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """Cases of parameters that sharding changed; a rank stores only those that it changed."""
    for name in dict.fromkeys(name for rank in ranks for name in rank.parameters):
        original = reference.parameters.get(name)
        if original is not None:
            changed = next(rank.parameters[name] for rank in ranks if name in rank.parameters)
            tensors = tuple(
                rank.parameters.get(name, changed if name in rank.absent else original)
                for rank in ranks
            )
            target = to_fp64_on_cpu(original)
            floor = find_floor(target, None, (), original.dtype)
            key = (TensorKind.PARAMETER, name)
            regions = tuple(rank.regions.get(key) for rank in ranks)
            yield Case(*key, original, target, floor, tensors, sizes, regions=regions)


@final
class _Table:
    """The single device's runs, indexed by tensor."""

    def __init__(
        self, runs: Runs, sizes: tuple[int, ...], batch_axes: tuple[int, ...], batch_dim: int
    ) -> None:
        self._reference = _Run(runs.reference)
        self._fp64 = None if runs.fp64 is None else _Run(runs.fp64)
        self._perturbed_runs = [
            (_Run(rounded), None if fp64 is None else _Run(fp64))
            for rounded, fp64 in runs.perturbed_runs
        ]
        self._precision = runs.precision
        self._sizes = sizes
        self._batch_axes = batch_axes
        self._batch_dim = batch_dim

    @property
    def references(self) -> dict[Key, Tensors]:
        """The single device's tensors, by kind and name."""
        return self._reference.tensors

    def references_of(self, of_parameters: Table) -> Mapping[str, torch.Tensor]:
        """The single device's tensors of parameters, such as gradients, by name."""
        return self._reference.tables.get(of_parameters, {})

    def make_cases_of_calls(self, key: Key, ranks: Sequence[Tensors]) -> Iterator[Case]:
        """One case for all calls, or one per call if their tensors cannot be concatenated."""
        reference = self.references.get(key, [])
        ranks = [drop_extra_calls(calls, reference, self._batch_dim) for calls in ranks]
        counts = {len(calls) for calls in (reference, *ranks) if calls}
        if counts <= {1}:
            yield self._make_call_case(key, tuple(calls[0] if calls else None for calls in ranks))
            return
        # Losses are averaged, unless the runs can be compared call by call.
        is_averaged = len(counts) > 1 or bool(self._batch_axes)
        joined = [
            _concatenate(calls, self._batch_dim, is_averaged=is_averaged)
            for calls in (reference, *ranks)
        ]
        # A rank without calls has no tensor.
        if reference and all(
            tensor is not None or not calls
            for tensor, calls in zip(joined, (reference, *ranks), strict=True)
        ):
            is_even = len({len(calls) for calls in ranks}) == 1 and reference[0].ndim > 0
            calls = tuple(map(tuple, ranks)) if is_even else ()
            yield self._make_call_case(key, tuple(joined[1:]), is_averaged=is_averaged, calls=calls)
        elif reference and len(counts) == 1:
            for call in range(len(reference)):
                of_call = tuple(calls[call] if calls else None for calls in ranks)
                yield self._make_call_case(key, of_call, call=call)
        else:
            yield self._make_call_case(key, tuple(calls[-1] if calls else None for calls in ranks))

    def make_scalar_cases(self, key: Key, ranks: Sequence[Tensors]) -> Iterator[Case]:
        """The case of a number that a step computes, on the ranks that have it.

        Of losses, the sum over micro-batches is compared, if their number differs, or the mean,
        whichever is nearer. Ranks may clip groups of parameters by a norm that they share.
        """
        reference = self.references.get(key, [])
        known = next((values for values in ranks if values), [])
        if not reference or not known:
            return
        ranks = [values or known for values in ranks]
        is_even = all(len(values) == len(reference) for values in ranks)
        if key[0] is TensorKind.NORM and not is_even:
            ranks = [_drop_repeated(values) for values in ranks]
            is_even = all(len(values) == len(reference) for values in ranks)
        if key[0] is TensorKind.NORM and not is_even:
            return
        if key[0] is not TensorKind.LOSS or is_even:
            yield from self.make_cases_of_calls(key, ranks)
            return
        cases = [self._make_reduced_case(key, ranks, is_mean=is_mean) for is_mean in (False, True)]
        yield min(cases, key=_relative_error)

    def _make_reduced_case(self, key: Key, ranks: Sequence[Tensors], *, is_mean: bool) -> Case:
        def choose(run: _Run) -> torch.Tensor | None:
            return _reduce(run.tensors.get(key, []), is_mean=is_mean)

        return self._make_case(key, choose, tuple(_reduce(v, is_mean=is_mean) for v in ranks))

    def make_parameter_case(
        self, of_parameters: Table, name: str, ranks: tuple[torch.Tensor | None, ...]
    ) -> Case:
        """The case of a tensor that belongs to a parameter, such as its gradient."""
        kind, entry = of_parameters
        label = f"{name} {entry}".rstrip()

        def choose(run: _Run) -> torch.Tensor | None:
            return run.tables.get(of_parameters, {}).get(name)

        return self._make_case((kind, label), choose, ranks)

    def _make_call_case(
        self,
        key: Key,
        ranks: tuple[torch.Tensor | None, ...],
        *,
        call: int | None = None,
        is_averaged: bool | None = None,
        calls: tuple[tuple[torch.Tensor, ...], ...] = (),
    ) -> Case:
        """The case of one call, by default the last, or of all calls if `is_averaged` is set."""

        def choose(run: _Run) -> torch.Tensor | None:
            of_calls = run.tensors.get(key, [])
            if is_averaged is not None:
                return _concatenate(of_calls, self._batch_dim, is_averaged=is_averaged)
            return of_calls[-1 if call is None else call] if of_calls else None

        kind, name = key
        label = name if call is None else f"{name} of call {call + 1}".lstrip()
        case = self._make_case((kind, label), choose, ranks)
        references = self.references.get(key, [])
        return replace(case, calls=calls, is_scalar=all(tensor.ndim == 0 for tensor in references))

    def _make_case(
        self,
        key: Key,
        choose: Callable[[_Run], torch.Tensor | None],
        ranks: tuple[torch.Tensor | None, ...],
    ) -> Case:
        """The case of the tensor that `choose` takes from each run of the single device."""
        reference = choose(self._reference)
        target, floor, own_floor = reference, None, None
        if reference is not None and is_inexact(reference):
            fp64 = None if self._fp64 is None else choose(self._fp64)
            perturbed_runs = [
                (choose(rounded), None if rounded_fp64 is None else choose(rounded_fp64))
                for rounded, rounded_fp64 in self._perturbed_runs
            ]
            target, floor, own_floor = self._find_target(reference, fp64, perturbed_runs)
            if floor.rms > floor.scale:  # zero up to rounding, which grows with coarser dtypes
                coarse = _coarser(reference.dtype, self._precision)
                power = 2.0 if key[0] is TensorKind.STATE else 1.0  # it may have squares
                floor = floor.scale_by((epsilon(coarse) / epsilon(reference.dtype)) ** power)
        return Case(
            *key,
            reference,
            target,
            floor,
            ranks,
            self._sizes,
            self._precision,
            self._batch_axes,
            self._batch_dim,
            is_scalar=reference is not None and reference.ndim == 0,
            own_floor=own_floor,
        )

    def _find_target(
        self,
        reference: torch.Tensor,
        fp64: torch.Tensor | None,
        perturbed_runs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
    ) -> tuple[torch.Tensor, NoiseFloor, NoiseFloor | None]:
        target_fp64 = (
            None if fp64 is None or fp64.shape != reference.shape else to_fp64_on_cpu(fp64)
        )
        moved = [
            (
                to_fp64_on_cpu(rounded),
                None
                if target_fp64 is None or rounded_fp64 is None
                else to_fp64_on_cpu(rounded_fp64),
            )
            for rounded, rounded_fp64 in perturbed_runs
            if rounded is not None and rounded.shape == reference.shape
        ]
        reference_fp64, coarse = (
            to_fp64_on_cpu(reference),
            _coarser(reference.dtype, self._precision),
        )
        floor = find_floor(reference_fp64, target_fp64, moved, coarse)
        if target_fp64 is None:
            return reference_fp64, floor, None
        own = find_own_floor(reference_fp64, target_fp64, [rounded for rounded, _ in moved], coarse)
        return target_fp64, floor, own


@final
class _Run:
    """The tensors of a run by what they are."""

    def __init__(self, result: StepResult) -> None:
        self.tensors = result.tensors()
        self.tables = result.tables()


def _drop_repeated(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The numbers that are not equal to the one before."""
    return [
        value
        for index, value in enumerate(values)
        if index == 0 or not torch.equal(value, values[index - 1])
    ]


def _reduce(values: Tensors, *, is_mean: bool) -> torch.Tensor | None:
    """The sum or the mean of losses; None if there are none."""
    if not values:
        return None
    stacked = torch.stack([value.detach().reshape(()) for value in values])
    return stacked.mean() if is_mean else stacked.sum()


def _relative_error(case: Case) -> float:
    """How far the mean over ranks of a number is from the single device's."""
    values = [float(tensor) for tensor in case.ranks if tensor is not None]
    assert case.target is not None
    target = float(case.target)
    return abs(sum(values) / len(values) - target) / max(abs(target), 1e-300)


def drop_extra_calls(
    calls: Tensors, reference: Tensors, dim: int = 0, num_shards: Collection[int] = (1,)
) -> Tensors:
    """Drop the first calls if there are more than the single device's, of the same shapes.

    Or of all its samples, in micro-batches of another size; or of one shard of these, of any of
    `num_shards`. Extra calls are a warm-up, or the shape inference of a pipeline stage.
    """
    last = calls[-len(reference) :] if reference else []
    has_same_shapes = [call.shape for call in last] == [call.shape for call in reference]
    if len(calls) > len(reference) > 0 and has_same_shapes:
        return last
    if not reference or not all(call.ndim > dim for call in (*calls, *reference)):
        return calls
    total = sum(call.shape[dim] for call in reference)
    wanted = {total // number for number in num_shards if total % number == 0} - {0}
    sizes = [call.shape[dim] for call in calls]
    for num_extra in range(min(_MAX_EXTRA, len(calls) - 1) + 1):
        if sum(sizes[num_extra:]) in wanted:
            return calls[num_extra:]
    return calls


def _concatenate(calls: Tensors, dim: int, *, is_averaged: bool) -> torch.Tensor | None:
    """The tensors of all calls along the batch dim, scalars averaged; None if they do not fit."""
    if not calls or len({(call.ndim, call.dtype) for call in calls}) > 1:
        return None
    if calls[0].ndim == 0:
        stacked = torch.stack(calls)
        return stacked.mean() if is_averaged and is_inexact(stacked) else stacked
    along = min(dim, calls[0].ndim - 1)
    rests = {(*call.shape[:along], *call.shape[along + 1 :]) for call in calls}
    return torch.cat(calls, along) if len(rests) == 1 else None


def _coarser(dtype: torch.dtype, allowed: torch.dtype | None) -> torch.dtype:
    if allowed is None or epsilon(allowed) <= epsilon(dtype):
        return dtype
    return allowed
