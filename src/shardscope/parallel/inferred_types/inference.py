"""Infers the types of all tensors from samples: a type must hold in each sample and each call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

from shardscope.parallel.equivalence import (
    Case,
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
from shardscope.parallel.parity.locate import make_point_cases, match_calls
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

_ROLES = {Role.INPUT: TensorRole.INPUT, Role.OUTPUT: TensorRole.OUTPUT}
_MAX_VOTES = 200  # gradients that decide by which factor those on the ranks are larger


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
    ranks = [match_calls(rank, sample.runs.reference) for rank in sample.ranks]
    return replace(sample, ranks=ranks)


def _find_factor(sample: Sample) -> float:
    """The factor by which most gradients of activations are larger on the ranks.

    Ranks that average the gradients of parameters have larger gradients of activations.
    """
    sizes, batch_axes = sample.mesh.sizes, sample.mesh.batch_axes
    factors = [math.prod(sizes[axis] for axis in batch_axes), 1]
    for count in range(1, len(sizes) + 1):
        factors += [math.prod(subset) for subset in itertools.combinations(sizes, count)]
    cases = list(itertools.islice(_list_point_cases(sample, Phase.BACKWARD), _MAX_VOTES))
    best, best_count = 1.0, 0
    for factor in dict.fromkeys(factors):
        count = 0
        for _, case in cases:
            observation = _observe(case, float(factor))
            count += bool(observation is not None and observation.candidates.assignments)
        if count > best_count:
            best, best_count = float(factor), count
        if count == len(cases):
            break
    return best


def _list_points(sample: Sample, phase: Phase) -> list[ProbePoint]:
    """The points of a phase in the single device's order, then those that only ranks have."""
    results = (sample.runs.reference, *sample.ranks)
    points = map(ProbePoint.decode, itertools.chain(*(result.snapshots for result in results)))
    return [point for point in dict.fromkeys(points) if point.phase is phase]


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
        each: dict[_Name, _Calls] = {}
        for point, case in _list_point_cases(sample, phase):
            observation = _observe(case, factor)
            if observation is not None:
                name = _Name(_ROLES[point.role], point.module, point.path)
                each.setdefault(name, {})[point.call] = observation
        unmatched = {
            name
            for name, calls in each.items()
            if len(calls) > 1 and not all(call.candidates.assignments for call in calls.values())
        }
        if unmatched:
            for point, case in _list_point_cases(sample, phase, is_merged=True):
                name = _Name(_ROLES[point.role], point.module, point.path)
                observation = _observe(case, factor) if name in unmatched else None
                if observation is not None and observation.candidates.assignments:
                    each[name] = {0: observation}
        for name, calls in each.items():
            observed.setdefault(name, []).append(calls)
    return observed


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
    declared = [_find_declared(sample, name, phase) for phase in phases]
    numbers = list(dict.fromkeys(call for calls in forward for call in calls))
    all_calls = [_list_observations(samples, None) for samples in (forward, backward)]
    joint = [_decide(found, known, axes) for found, known in zip(all_calls, declared, strict=True)]
    is_joint = len(numbers) == 1 or all(
        decision is None or decision.is_matched for decision in joint
    )
    if is_joint:
        yield _make_types(name, all_calls[0], joint, declared, axes)
        return
    each = []
    for number in numbers:
        of_call = [_list_observations(samples, number) for samples in (forward, backward)]
        decisions = [
            _decide(found, known, axes) for found, known in zip(of_call, declared, strict=True)
        ]
        each.append((number, of_call[0], decisions))
    if all(decisions == each[0][2] for _, _, decisions in each):
        yield _make_types(name, each[0][1], each[0][2], declared, axes)
        return
    for number, observations, decisions in each:
        yield _make_types(name, observations, decisions, declared, axes, call=number)


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


def _find_declared(sample: Sample, name: _Name, phase: Phase) -> dict[str, str]:
    """The types that the tensor itself declares on the first rank that has it."""
    for rank in sample.ranks:
        for key, types in rank.declared.items():
            if isinstance(key, str) and types:
                point = ProbePoint.decode(key)
                if (_ROLES[point.role], point.module, point.path) == name and point.phase is phase:
                    return dict(types)
    return {}


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
    tensor = next(tensor for tensor in (case.reference, *case.ranks) if tensor is not None)
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
                [_find_declared_at(samples[0], key) for key in keys],
                axes,
            )
    for name, observations in buffers.items():
        declared = _find_declared_at(samples[0], (TensorKind.BUFFER, name))
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
            found = [_observe(case, factor) for factor in dict.fromkeys(factors)]
            matched = (o for o in found if o is not None and o.candidates.assignments)
            observation = next(matched, found[0])
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


def _find_declared_at(sample: Sample, key: Key) -> dict[str, str]:
    types = (rank.declared.get(key) for rank in sample.ranks)
    return dict(next(filter(None, types), ()))
