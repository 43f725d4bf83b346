"""Infers the types of all tensors from samples: a type must hold in each sample and each call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

from shardscope.parallel.equivalence import (
    Case,
    Declared,
    Key,
    Runs,
    StepResult,
    make_cases,
    name_dtype,
    tie_names,
)
from shardscope.parallel.inferred_types.candidates import (
    Assignment,
    Candidates,
    find_candidates,
    is_zero,
)
from shardscope.parallel.inferred_types.samples import Sample
from shardscope.parallel.parity.points import make_point_cases, match_calls
from shardscope.parallel.parity.probe import ProbePoint, Role
from shardscope.record import (
    ABSENT,
    UNDECIDED,
    AxisTypes,
    Phase,
    TensorKind,
    TensorRole,
    TensorTypes,
)

_MAX_FACTORS = 24  # that are tried
_ROLES = {Role.INPUT: TensorRole.INPUT, Role.OUTPUT: TensorRole.OUTPUT}


class _Name(NamedTuple):
    """Identifies a tensor: what it is, the name of its module or its own, and the path to it."""

    role: TensorRole
    name: str
    path: str = ""


@final
@dataclass(frozen=True)
class _Decision:
    """The type along each axis, and whether these make up the single device's tensor."""

    types: Assignment
    is_matched: bool
    order: str = ""


@final
@dataclass(frozen=True, eq=False)
class _Observation:
    """What one call of one sample says of a tensor."""

    case: Case
    candidates: Candidates
    absent_axes: frozenset[int]  # of which some ranks do not have the tensor


_Calls = dict[int, _Observation]


def infer_types(samples: Sequence[Sample], axes: Sequence[str]) -> tuple[list[TensorTypes], float]:
    """The types of all tensors, and the factor of the gradients of activations on the ranks."""
    samples = [_align(sample) for sample in samples]
    factor = _find_factor(samples[0])
    forward = _observe_points(samples, Phase.FORWARD, 1.0)
    backward = _observe_points(samples, Phase.BACKWARD, factor)
    tensors: list[TensorTypes] = []
    for name, calls in forward.items():
        tensors += _type_calls(name, calls, backward.get(name, []), samples[0], axes)
    tensors += _type_state(samples, axes, factor)
    return tensors, factor


def _align(sample: Sample) -> Sample:
    numbers = _list_products(sample.mesh.sizes)
    ranks = [match_calls(rank, sample.runs.reference, numbers) for rank in sample.ranks]
    return replace(sample, ranks=ranks)


def _list_products(sizes: Sequence[int]) -> list[int]:
    """1, and the number of ranks along each combination of mesh axes."""
    subsets = (itertools.combinations(sizes, count) for count in range(len(sizes) + 1))
    return list(dict.fromkeys(math.prod(subset) for subset in itertools.chain(*subsets)))


def _find_factor(sample: Sample) -> float:
    """The factor by which most gradients of activations are larger on the ranks.

    Ranks that average the gradients of parameters have larger gradients of activations, and so has
    a pipeline that divides by the number of micro-batches at the end.
    """
    sizes, batch_axes = sample.mesh.sizes, sample.mesh.batch_axes
    products = _list_products(sizes)
    factors = [math.prod(sizes[axis] for axis in batch_axes), *products]
    points = (ProbePoint.decode(name) for name in sample.runs.reference.snapshots)
    num_calls = 1 + max((point.call for point in points), default=0)
    factors += [number * product for number in range(2, num_calls + 1) for product in products]
    best, best_count = 1.0, 0
    for factor in list(dict.fromkeys(factors))[:_MAX_FACTORS]:
        observed = _observe_points([sample], Phase.BACKWARD, float(factor))
        matched = [
            all(call.candidates.assignments for call in calls.values())
            for (calls,) in observed.values()
        ]
        if sum(matched) > best_count:
            best, best_count = float(factor), sum(matched)
        if 2 * best_count > len(matched):
            break
    return best


def _list_points(sample: Sample, phase: Phase) -> list[ProbePoint]:
    """The points of a phase in the single device's order, then those that only ranks have."""
    results = (sample.runs.reference, *sample.ranks)
    points = map(ProbePoint.decode, itertools.chain(*(result.snapshots for result in results)))
    return [
        point for point in dict.fromkeys(points) if point.phase is phase and point.role in _ROLES
    ]


def _list_point_cases(
    sample: Sample, phase: Phase, *, is_merged: bool = False
) -> Iterator[tuple[ProbePoint, Case]]:
    points = _list_points(sample, phase)
    wanted = {point._replace(call=0) for point in points} if is_merged else set(points)
    return make_point_cases(
        sample.runs, sample.ranks, sample.mesh, 1.0, wanted, is_merged=is_merged
    )


def _observe_points(
    samples: Sequence[Sample], phase: Phase, factor: float
) -> dict[_Name, list[_Calls]]:
    """What each sample says of each input and output, call by call.

    Where ranks divide the batch into other calls than the single device does, all calls are one.
    """
    observed: dict[_Name, list[_Calls]] = {}
    for sample in samples:
        cases = dict(_list_point_cases(sample, phase))
        each: dict[_Name, _Calls] = {}
        for point, observation in _observe_cases(cases, sample, factor).items():
            each.setdefault(_name_point(point), {})[point.call] = observation
        unmatched = {
            name
            for name, calls in each.items()
            if len(calls) > 1 and not all(call.candidates.assignments for call in calls.values())
        }
        merged = {
            point: case
            for point, case in _list_point_cases(sample, phase, is_merged=True)
            if unmatched
        }
        for point, observation in _observe_cases(merged, sample, factor, unmatched).items():
            if observation.candidates.assignments:
                each[_name_point(point)] = {0: observation}
        for name, calls in each.items():
            observed.setdefault(name, []).append(calls)
    return observed


def _name_point(point: ProbePoint) -> _Name:
    return _Name(_ROLES[point.role], point.module, point.path)


def _observe_cases(
    cases: Mapping[ProbePoint, Case],
    sample: Sample,
    factor: float,
    wanted: Collection[_Name] | None = None,
) -> dict[ProbePoint, _Observation]:
    """What the values say of each point, or of the wanted ones.

    Where several modules take one tensor, each may take a copy of its own on the ranks, whose
    gradient is then that of one use. The sum over these uses is observed in place of each.
    """
    observed: dict[ProbePoint, _Observation] = {}
    uses: dict[ProbePoint, list[ProbePoint]] = {}
    for point, case in cases.items():
        if wanted is not None and _name_point(point) not in wanted:
            continue
        observation = _observe(case, factor)
        if observation is None:
            continue
        observed[point] = observation
        first = sample.probe.first_points.get(point._replace(phase=Phase.FORWARD))
        is_use = point.phase is Phase.BACKWARD and point.role is Role.INPUT and first is not None
        if is_use and first is not None and not observation.candidates.assignments:
            uses.setdefault(first, []).append(point)
    for points in uses.values():
        total = _add_uses([cases[point] for point in points])
        observation = None if total is None else _observe(total, factor)
        if observation is not None and observation.candidates.assignments:
            observed |= dict.fromkeys(points, observation)
    return observed


def _add_uses(cases: Sequence[Case]) -> Case | None:
    """The case of the sum of gradients over the uses of one tensor; None if there is one use."""
    sums: list[torch.Tensor | None] = []
    for tensors in zip(*(case.ranks for case in cases), strict=True):
        distinct = list({id(t): t for t in tensors if t is not None}.values())
        if len(distinct) < 2 or len({tensor.shape for tensor in distinct}) > 1:
            return None
        sums.append(torch.stack(distinct).sum(0))
    return replace(cases[0], ranks=tuple(sums), calls=())


def _observe(case: Case, factor: float) -> _Observation | None:
    """What the values of a tensor admit; None if no rank has it.

    Ranks without the tensor are left out, if the others are a part of the mesh.
    """
    present = [rank for rank, tensor in enumerate(case.ranks) if tensor is not None]
    if not present:
        return None
    chosen = case if len(present) == len(case.ranks) else case.choose_ranks(present)
    absent = frozenset(
        axis
        for axis, (size, full) in enumerate(zip(chosen.sizes, case.sizes, strict=True))
        if size < full
    )
    return _Observation(chosen, find_candidates(chosen, factor=factor), absent)


def _type_calls(
    name: _Name,
    forward: Sequence[_Calls],
    backward: Sequence[_Calls],
    sample: Sample,
    axes: Sequence[str],
) -> Iterator[TensorTypes]:
    """The types of an input or output: one for all calls, or one for each if they differ."""
    phases = (Phase.FORWARD, Phase.BACKWARD)
    declared = [_find_declared(sample, name, phase, axes) for phase in phases]
    numbers = list(dict.fromkeys(call for calls in forward for call in calls))
    all_calls = [_list_observations(samples, None) for samples in (forward, backward)]
    joint = _decide_both(all_calls, declared, axes)
    each = [
        (number, [_list_observations(samples, number) for samples in (forward, backward)])
        for number in numbers
    ]
    decided = [_decide_both(of_call, declared, axes) for _, of_call in each]
    # Calls whose types differ, where each call has one.
    is_mixed = not _is_matched(joint) and all(map(_is_matched, decided))
    if not is_mixed or len(numbers) == 1:
        yield _make_types(name, all_calls[0], joint, declared, axes)
        return
    for (number, of_call), decisions in zip(each, decided, strict=True):
        yield _make_types(name, of_call[0], decisions, declared, axes, call=number)


def _is_matched(decisions: Sequence[_Decision | None]) -> bool:
    return all(decision is None or decision.is_matched for decision in decisions)


def _list_observations(samples: Sequence[_Calls], call: int | None) -> list[_Observation]:
    return [
        observation
        for calls in samples
        for number, observation in calls.items()
        if call is None or number == call
    ]


def _decide_both(
    observations: Sequence[Sequence[_Observation]],
    declared: Sequence[Mapping[str, str]],
    axes: Sequence[str],
) -> list[_Decision | None]:
    """The types of a tensor, and those of its gradient."""
    pairs = zip(observations, declared, strict=True)
    return [_decide(of_phase, known, axes) for of_phase, known in pairs]


def _decide(
    observations: Sequence[_Observation], declared: Mapping[str, str], axes: Sequence[str]
) -> _Decision | None:
    """The types that all observations admit; None without observations.

    Where the values admit several types along an axis, a declared one of these is taken.
    """
    if not observations:
        return None
    absent = frozenset[int]().union(*(observed.absent_axes for observed in observations))
    sets = [observed.candidates.assignments for observed in observations]
    common = [types for types in sets[0] if all(types in admitted for admitted in sets[1:])]
    if common:
        options = [list(dict.fromkeys(kinds)) for kinds in zip(*common, strict=True)]
        types = [
            _choose(kinds, declared.get(axis)) for kinds, axis in zip(options, axes, strict=True)
        ]
        order = sets[0][common[0]]
    else:
        equal = frozenset(range(len(axes))).intersection(
            *(observed.candidates.equal_axes for observed in observations)
        )
        types = ["R" if axis in equal else "V" for axis in range(len(axes))]
        order = ""
        if all(is_zero(observed.case.ranks) for observed in observations):
            types = [UNDECIDED] * len(axes)
    sizes = observations[0].case.sizes
    for axis, size in enumerate(sizes):
        if axis in absent:
            types[axis] = ABSENT if size == 1 else UNDECIDED
        elif size == 1:
            types[axis] = UNDECIDED
    return _Decision(tuple(types), bool(common), order)


def _choose(kinds: Sequence[str], declared: str | None) -> str:
    if len(kinds) == 1:
        return kinds[0]
    declared = "R" if declared == "I" else declared
    return declared if declared is not None and declared in kinds else UNDECIDED


def _find_declared(
    sample: Sample, name: _Name, phase: Phase, axes: Sequence[str]
) -> dict[str, str]:
    """The types that the tensor itself declares on the first rank that has it."""
    for rank in sample.ranks:
        for key, types in rank.declared.items():
            if isinstance(key, str) and types:
                point = ProbePoint.decode(key)
                is_there = point.phase is phase and point.role in _ROLES
                if is_there and _name_point(point) == name:
                    return _rename_axes(types, sample, axes)
    return {}


def _rename_axes(types: Declared, sample: Sample, axes: Sequence[str]) -> dict[str, str]:
    """Declared types by axis; the group of all ranks is the axis that has all, if one does."""
    sizes = zip(axes, sample.mesh.sizes, strict=True)
    of_all = [name for name, size in sizes if size == math.prod(sample.mesh.sizes)]
    named = dict(types)
    if "default_pg" in named and len(of_all) == 1:
        named.setdefault(of_all[0], named.pop("default_pg"))
    return named


def _make_types(
    name: _Name,
    observations: Sequence[_Observation],
    decisions: Sequence[_Decision | None],
    declared: Sequence[Mapping[str, str]],
    axes: Sequence[str],
    *,
    call: int | None = None,
) -> TensorTypes:
    forward, gradient = decisions
    assert forward is not None
    case = observations[0].case
    local = next(tensor for tensor in case.ranks if tensor is not None)
    tensor = local if case.reference is None else case.reference
    return TensorTypes(
        name=name.name,
        role=name.role,
        path=name.path,
        axes=tuple(
            AxisTypes(
                axis=axis,
                forward=forward.types[index],
                gradient=None if gradient is None else gradient.types[index],
                declared=declared[0].get(axis),
                declared_gradient=declared[1].get(axis),
            )
            for index, axis in enumerate(axes)
        ),
        call=call,
        shape=tuple(tensor.shape),
        local_shape=tuple(local.shape),
        is_added=case.reference is None,
        dtype=name_dtype(tensor.dtype),
        is_matched=forward.is_matched,
        is_gradient_matched=None if gradient is None else gradient.is_matched,
        order=forward.order,
    )


def _type_state(
    samples: Sequence[Sample], axes: Sequence[str], factor: float
) -> Iterator[TensorTypes]:
    """The types of parameters, with their gradients after backward, and of buffers."""
    parameters = _observe_named(samples, lambda result: result.parameters, (1.0,))
    gradients = _observe_named(samples, lambda result: result.gradients, (1.0, factor))
    buffers = _observe_named(samples, lambda result: result.buffers, (1.0,))
    aliases = tie_names(samples[0].runs.reference.parameters)
    for name, observations in parameters.items():
        if aliases.get(name, name) == name:
            keys = ((TensorKind.PARAMETER, name), (TensorKind.GRADIENT, name))
            yield _type_named(
                _Name(TensorRole.PARAMETER, name),
                (observations, gradients.get(name, [])),
                [_find_declared_at(samples[0], key, axes) for key in keys],
                axes,
            )
    for name, observations in buffers.items():
        declared = _find_declared_at(samples[0], (TensorKind.BUFFER, name), axes)
        yield _type_named(_Name(TensorRole.BUFFER, name), (observations, []), [declared, {}], axes)


def _type_named(
    name: _Name,
    observations: tuple[list[_Observation], list[_Observation]],
    declared: Sequence[Mapping[str, str]],
    axes: Sequence[str],
) -> TensorTypes:
    decisions = _decide_both(observations, declared, axes)
    return _make_types(name, observations[0], decisions, declared, axes)


def _observe_named(
    samples: Sequence[Sample],
    read: Callable[[StepResult], Mapping[str, torch.Tensor]],
    factors: Iterable[float],
) -> dict[str, list[_Observation]]:
    """What each sample says of each tensor of a table, such as the gradients of parameters."""
    observed: dict[str, list[_Observation]] = {}
    for sample in samples:
        runs = Runs(
            _take(sample.runs.reference, read),
            None if sample.runs.fp64 is None else _take(sample.runs.fp64, read),
            tuple(
                (_take(rounded, read), None if fp64 is None else _take(fp64, read))
                for rounded, fp64 in sample.runs.perturbed_runs
            ),
        )
        ranks = [_take(rank, read) for rank in sample.ranks]
        for case in make_cases(runs, ranks, sample.mesh.sizes):
            observations = [_observe(case, factor) for factor in dict.fromkeys(factors)]
            matched = (o for o in observations if o is not None and o.candidates.assignments)
            observation = next(matched, observations[0])
            if observation is not None:
                observed.setdefault(case.name, []).append(observation)
    return observed


def _take(
    result: StepResult, read: Callable[[StepResult], Mapping[str, torch.Tensor]]
) -> StepResult:
    """A result whose outputs are the tensors of a table, without gradients of inputs."""
    return StepResult(
        [(n, t) for n, t in read(result).items() if not n.startswith("inputs")], {}, {}
    )


def _find_declared_at(sample: Sample, key: Key, axes: Sequence[str]) -> dict[str, str]:
    types = (rank.declared.get(key) for rank in sample.ranks)
    return _rename_axes(next(filter(None, types), ()), sample, axes)
