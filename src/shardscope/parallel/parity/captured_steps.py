"""Compares a step that a program's ranks have taken with replays of it on a single device.

How a program splits its data over ranks is not known. So each rank's step is captured: the weights
before it, the inputs and outputs of the model, the gradients that backward sends into the outputs,
and the gradients of the parameters before they are clipped. The model of a single process gets the
same weights, and is called with the inputs of each rank. Its outputs are compared with that rank's,
and its gradients, averaged over ranks, with those of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import torch
from msgspec.structs import replace

from shardscope.attribution.program_records import describe_run, find_torch_gaps
from shardscope.numerics import find_floor, to_fp64_on_cpu
from shardscope.parallel.equivalence import (
    Case,
    Runs,
    StepResult,
    TensorComparison,
    compare_case,
    make_cases,
    shard_layouts,
)
from shardscope.parallel.equivalence.tensor_shards import find_submesh
from shardscope.parallel.parity.api import list_findings, make_parity
from shardscope.parallel.parity.explanation import Explanation, list_names
from shardscope.parallel.parity.problems import Problem, find_problems
from shardscope.parallel.parity.recheck import is_coarse
from shardscope.parallel.parity.result import ParityResult
from shardscope.record import (
    TOLERABLE,
    Axis,
    Finding,
    Gap,
    Parity,
    RankSpan,
    Recording,
    Severity,
    Suspect,
    TensorKind,
)
from shardscope.record.ranks import list_ranks

Tensors = dict[str, torch.Tensor]


@final
@dataclass(frozen=True, eq=False)
class CapturedCall:
    """One call of the model: the tensors of its arguments and of what it returned.

    `gradients` are those that backward sent into the outputs, None where it sent none.
    """

    inputs: list[torch.Tensor]
    outputs: list[tuple[str, torch.Tensor]]
    gradients: list[torch.Tensor | None]


@final
@dataclass(frozen=True, eq=False)
class CapturedStep:
    """The step of one rank. Tensors are full where torch knows how they are sharded.

    `parameters` and `buffers` are those before the step. `gradients` is None if the program left no
    moment at which they could be read. `gaps` are places and facts.
    """

    parameters: Tensors
    buffers: Tensors
    calls: list[CapturedCall]
    gradients: Tensors | None
    axes: dict[str, int]
    gaps: list[tuple[str, str]] = field(default_factory=list)


@final
@dataclass(frozen=True, eq=False)
class ReplayGroup:
    """Ranks that called the model with the same inputs, and their calls, of which one is replayed.

    `weight` is the share of these ranks among all.
    """

    ranks: tuple[int, ...]
    calls: list[CapturedCall]
    weight: float


@final
@dataclass(frozen=True, eq=False)
class ReplayPlan:
    """What a single device needs to replay the step of all ranks.

    `parameters` has the tensor of each rank; a single one if all ranks have the same.
    """

    groups: list[ReplayGroup]
    parameters: dict[str, list[torch.Tensor]]
    buffers: Tensors
    axes: dict[str, int]


@final
@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What a single device computed: the outputs of each group, and the averaged gradients."""

    outputs: list[list[tuple[str, torch.Tensor]]]
    gradients: Tensors


@final
@dataclass(frozen=True, eq=False)
class Replays:
    """The replays: as the program computes, with perturbed weights, and both in double precision.

    Those in double precision are None if they failed.
    """

    reference: ReplayResult
    perturbed: ReplayResult
    fp64: ReplayResult | None = None
    perturbed_fp64: ReplayResult | None = None


def plan_replay(steps: Sequence[CapturedStep]) -> ReplayPlan:
    """What to replay, from the captured steps of all ranks."""
    members: list[list[int]] = []
    for rank, step in enumerate(steps):
        same = (group for group in members if _has_same_inputs(steps[group[0]], step))
        group = next(same, None)
        if group is None:
            members.append([rank])
        else:
            group.append(rank)
    groups = [
        ReplayGroup(tuple(group), steps[group[0]].calls, len(group) / len(steps))
        for group in members
    ]
    names = dict.fromkeys(name for step in steps for name in step.parameters)
    parameters = {
        name: _drop_copies([step.parameters[name] for step in steps if name in step.parameters])
        for name in names
    }
    return ReplayPlan(groups, parameters, steps[0].buffers, _find_axes(steps, members))


def _has_same_inputs(a: CapturedStep, b: CapturedStep) -> bool:
    first = [tensor for call in a.calls for tensor in call.inputs]
    second = [tensor for call in b.calls for tensor in call.inputs]
    return len(a.calls) == len(b.calls) and _are_same(first, second)


def _are_same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _drop_copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    is_same = all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:])
    return tensors[:1] if is_same else tensors


def _find_axes(steps: Sequence[CapturedStep], members: Sequence[Sequence[int]]) -> dict[str, int]:
    """The mesh of the program, or one that the inputs of its ranks suggest."""
    if steps[0].axes:
        return steps[0].axes
    num_data, size = len(members), len(steps)
    num_model = size // num_data
    if not 1 < num_data < size or any(len(group) != num_model for group in members):
        return {"ranks": size}
    if all(b == a + 1 for group in members for a, b in pairwise(group)):
        return {"data": num_data, "model": num_model}
    if all(b == a + num_data for group in members for a, b in pairwise(group)):
        return {"model": num_model, "data": num_data}
    return {"ranks": size}


def join_parameter(
    tensors: Sequence[torch.Tensor], own: torch.Tensor, axes: Mapping[str, int]
) -> torch.Tensor | None:
    """The full parameter from what the ranks hold; None if it is not clear how it is sharded.

    `own` is the parameter as the program has made it on a single device. If the shards fit together
    in several ways, the one that equals it is right.
    """
    if all(tensor.shape == own.shape for tensor in tensors):
        return tensors[0]
    if len(tensors) == 1:
        return None
    candidates = []
    for layout in shard_layouts(tensors, own.shape, tuple(axes.values())):
        joined = layout.join(tensors)
        if joined is None or joined[0].shape != own.shape:
            continue
        if torch.equal(joined[0], own):
            return joined[0]
        if layout.is_contiguous:
            candidates.append(joined[0])
    distinct = [tensor for tensor in candidates if not torch.equal(tensor, candidates[0])]
    return candidates[0] if candidates and not distinct else None


def compare_steps(
    steps: Sequence[CapturedStep], plan: ReplayPlan, replays: Replays, gaps: Sequence[Gap]
) -> Recording:
    """The recording of the comparison of captured steps with the replays of a single device."""
    results = [
        (_compare_outputs(steps, plan, replays, index), _find_axes_of(plan, group.ranks))
        for index, group in enumerate(plan.groups)
    ]
    comparisons, factor = _compare_gradients(steps, plan, replays)
    results.append((comparisons, plan.axes))
    has_exact = replays.fp64 is not None
    reference = StepResult([], replays.reference.gradients, {})
    parts = [(ParityResult(group, reference, has_exact), axes) for group, axes in results]
    compared = [result for group, _ in results for result in group]
    wrong = _find_unequal_parameters(steps, plan, replays)
    problems = _find_problems(parts, compared, wrong)
    records = [
        make_parity(part, axes, problems, is_in_processes=True)
        for part, axes in parts
        if part.comparisons
    ]
    parity = Parity(
        axes=tuple(Axis(name=name, size=size) for name, size in plan.axes.items()),
        tensors=(
            *(result.verdict for result in wrong),
            *(verdict for record in records for verdict in record.tensors),
        ),
        is_in_processes=True,
        has_exact=has_exact,
        has_backward=bool(replays.reference.gradients),
    )
    whole = ParityResult(compared, reference, has_exact)
    findings = [*list_findings(whole, parity, problems)]
    if factor is not None:
        findings.append(_describe_sum(factor))
    return Recording(
        run=_describe_run(parity, len(steps)),
        parity=(parity,),
        findings=tuple(findings),
        gaps=(*find_torch_gaps(), *gaps, *_find_gaps(steps, compared, len(plan.groups))),
    )


def _find_axes_of(plan: ReplayPlan, ranks: Sequence[int]) -> dict[str, int]:
    """The part of the mesh that these ranks are."""
    return dict(zip(plan.axes, find_submesh(tuple(plan.axes.values()), ranks), strict=True))


def _compare_outputs(
    steps: Sequence[CapturedStep], plan: ReplayPlan, replays: Replays, index: int
) -> list[TensorComparison]:
    """The verdicts on what the model returned on the ranks of one group."""
    group = plan.groups[index]
    suffix = f" of {_name_ranks(group.ranks)}" if len(plan.groups) > 1 else ""

    def name(outputs: Sequence[tuple[str, torch.Tensor]]) -> StepResult:
        named = [
            (f"{path or 'output'}{suffix}" if suffix else path, value) for path, value in outputs
        ]
        return StepResult(named, {}, {})

    def choose(replay: ReplayResult | None) -> StepResult | None:
        return None if replay is None else name(replay.outputs[index])

    ranks = [
        name([output for call in steps[rank].calls for output in call.outputs])
        for rank in group.ranks
    ]
    perturbed = choose(replays.perturbed)
    assert perturbed is not None
    runs = Runs(
        name(replays.reference.outputs[index]),
        choose(replays.fp64),
        ((perturbed, choose(replays.perturbed_fp64)),),
    )
    sizes = tuple(_find_axes_of(plan, group.ranks).values())
    return [compare_case(case) for case in make_cases(runs, ranks, sizes)]


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {list_ranks(ranks)}"


def _compare_gradients(
    steps: Sequence[CapturedStep], plan: ReplayPlan, replays: Replays
) -> tuple[list[TensorComparison], int | None]:
    """The verdicts on gradients, and by what they are a multiple of the mean: the number of groups.

    None if they are the mean, or neither.
    """
    captured = [step.gradients for step in steps if step.gradients is not None]
    if len(captured) < len(steps):
        return [], None
    runs = Runs(
        StepResult([], replays.reference.gradients, {}),
        None if replays.fp64 is None else StepResult([], replays.fp64.gradients, {}),
        (
            (
                StepResult([], replays.perturbed.gradients, {}),
                None
                if replays.perturbed_fp64 is None
                else StepResult([], replays.perturbed_fp64.gradients, {}),
            ),
        ),
    )
    sizes = tuple(plan.axes.values())

    def compare(divisor: int) -> list[TensorComparison]:
        ranks = [
            StepResult([], {name: tensor / divisor for name, tensor in gradients.items()}, {})
            for gradients in captured
        ]
        return [compare_case(case) for case in make_cases(runs, ranks, sizes)]

    comparisons, num_groups = compare(1), len(plan.groups)
    if num_groups == 1 or not _find_wrong(comparisons):
        return comparisons, None
    summed = compare(num_groups)
    if _find_wrong(summed):
        return comparisons, None
    detail = f"after division by {num_groups}"
    return [_add_detail(result, detail) for result in summed], num_groups


def _add_detail(result: TensorComparison, detail: str) -> TensorComparison:
    details = "; ".join(filter(None, (result.verdict.detail, detail)))
    return dataclasses.replace(result, verdict=replace(result.verdict, detail=details))


def _find_wrong(comparisons: Sequence[TensorComparison]) -> list[TensorComparison]:
    return [result for result in comparisons if result.verdict.agreement not in TOLERABLE]


def _describe_sum(factor: int) -> Finding:
    return Finding(
        rule="parity-summed-gradients",
        severity=Severity.WARNING,
        subject="all gradients",
        fact=f"Every gradient is the sum over the {factor} different batches of the ranks: "
        f"{factor} times their mean.",
        remedy="This is right if the loss of each rank is divided by the number of samples or "
        "tokens of all ranks. If it is a mean over the rank's own batch, average the gradients: "
        "ReduceOp.AVG, or divide them by the number of ranks.",
    )


def _find_unequal_parameters(
    steps: Sequence[CapturedStep], plan: ReplayPlan, replays: Replays
) -> list[TensorComparison]:
    """The parameters that are the same on all ranks in shape, but not in value."""
    comparisons = []
    for name, tensors in plan.parameters.items():
        gradient = replays.reference.gradients.get(name)
        is_full = gradient is None or gradient.shape == tensors[0].shape
        if len(tensors) == len(steps) > 1 and is_full and len({t.shape for t in tensors}) == 1:
            target = to_fp64_on_cpu(tensors[0])
            floor = find_floor(target, None, (), tensors[0].dtype)
            sizes = tuple(plan.axes.values())
            case = Case(
                TensorKind.PARAMETER, name, tensors[0], target, floor, tuple(tensors), sizes
            )
            comparisons.append(compare_case(case))
    return _find_wrong(comparisons)


def _find_problems(
    parts: Sequence[tuple[ParityResult, Mapping[str, int]]],
    compared: Sequence[TensorComparison],
    unequal: Sequence[TensorComparison],
) -> list[Problem]:
    """The causes of differences: of the weights, else of the outputs, else of the gradients."""
    if unequal:
        names = [result.verdict.name for result in unequal]
        return [_describe_unequal(names, [result.verdict.name for result in _find_wrong(compared)])]
    for part, axes in parts:
        problems = find_problems(part, axes)
        if problems:
            return problems
    return []


def _describe_unequal(names: Sequence[str], wrong: Sequence[str]) -> Problem:
    plural = len(names) > 1
    cause = Explanation(
        Suspect.RANDOMNESS,
        predicate="differs between ranks before the first step",
        remedy="Use the same seed on all ranks when the model is initialized, or broadcast the "
        "weights of rank 0, as DistributedDataParallel does.",
    )
    return Problem(
        cause,
        names[0],
        f"{list_names(names)} {'have' if plural else 'has'} the full shape on every rank, but "
        "different values before the first step.",
        cause.remedy,
        names=(*names, *wrong),
        rule="parity-weights",
    )


def _describe_run(parity: Parity, size: int) -> object:
    run = describe_run(0, size, parity.axes, instrument="parity")
    return replace(run, ranks=(RankSpan(0, size),), is_simulated=False, device_type="cpu")


def _find_gaps(
    steps: Sequence[CapturedStep], compared: Sequence[TensorComparison], num_groups: int
) -> Iterator[Gap]:
    yield Gap(
        place="program",
        fact="what it computes outside the model was not compared: the loss, clipping, the "
        "optimizer, and which data each rank gets",
    )
    if num_groups > 1:
        yield Gap(
            place="inputs",
            fact=f"the ranks called the model with {num_groups} different inputs, which were taken "
            "for different samples; parts of one sequence would need each other",
        )
    if is_coarse(compared):
        yield Gap(
            place="double precision",
            fact="the ranks did not run in it, so that errors within the noise of their own "
            "precision were not seen",
        )
    facts = dict.fromkeys(gap for step in steps for gap in step.gaps)
    yield from (Gap(place=place, fact=fact) for place, fact in facts)
