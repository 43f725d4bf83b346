"""Compares steps that a program's ranks have taken with replays of them on a single device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace

from shardscope.attribution.program_records import describe_run, find_torch_gaps
from shardscope.numerics import find_floor, to_fp64_on_cpu
from shardscope.parallel.equivalence import (
    Case,
    Mesh,
    Runs,
    StepResult,
    TensorComparison,
    compare_case,
    make_cases,
)
from shardscope.parallel.equivalence.tensor_shards import find_submesh
from shardscope.parallel.parity.api import make_parity
from shardscope.parallel.parity.captured_problems import (
    describe_loss,
    describe_stale,
    find_same_samples,
    list_own_numbers,
    name_ranks,
)
from shardscope.parallel.parity.captured_steps import (
    CapturedStep,
    ReplayPlan,
    ReplayResult,
    Replays,
    Tensors,
)
from shardscope.parallel.parity.captured_training import TrainingComparison, list_wrong
from shardscope.parallel.parity.explanation import Explanation, list_names
from shardscope.parallel.parity.findings import list_findings
from shardscope.parallel.parity.locate import find_origins
from shardscope.parallel.parity.problem import Problem
from shardscope.parallel.parity.problems import find_problems
from shardscope.parallel.parity.recheck import is_coarse
from shardscope.parallel.parity.result import Origin, ParityResult
from shardscope.record import (
    Finding,
    Gap,
    RankSpan,
    Recording,
    Severity,
    Suspect,
    TensorKind,
)


def compare_steps(
    steps: Sequence[CapturedStep],
    plan: ReplayPlan,
    replays: Replays,
    gaps: Sequence[Gap],
    training: TrainingComparison | None,
    *,
    index: int = 0,
) -> tuple[Recording, int | None]:
    """The recording of the comparison of captured steps with those of a single device.

    The calls of the model in the step of this index are compared with replays of each rank's
    inputs, `training` are entire steps. The second result is the step in which a comparison of
    modules would show where a difference comes from, if there is one.
    """
    calls = _compare_calls(steps, plan, replays)
    problems = (
        [_describe_unequal(calls.unequal, calls.compared)]
        if calls.unequal
        else _find_problems(calls, training, steps, plan, index)
    )
    has_data = training is not None and training.has_data
    is_dependent = _exchange_samples(training, plan)
    parts = [p for p in calls.parts if not is_dependent or not list_wrong(p.comparisons)]
    if not has_data:
        parts.append(calls.gradients)
    records = [
        make_parity(part.result, part.axes, problems, is_in_processes=True) for part in parts
    ]
    verdicts = [verdict for record in records for verdict in record.tensors]
    if training is not None:
        verdicts = [replace(verdict, step=index + 1) for verdict in verdicts]
        result = training.make_result(has_exact=calls.result.has_exact)
        records.append(make_parity(result, plan.axes, problems, is_in_processes=True))
        verdicts += records[-1].tensors
    unequal = [replace(result.verdict, suspect=Suspect.RANDOMNESS) for result in calls.unequal]
    parity = replace(
        make_parity(calls.result, plan.axes, problems, is_in_processes=True),
        tensors=(*unequal, *verdicts),
        has_backward=any(verdict.kind is TensorKind.GRADIENT for verdict in verdicts),
    )
    findings = [*list_findings(calls.result, parity, problems)]
    if calls.factor is not None and not has_data:
        findings.append(_describe_sum(calls.factor))
    if training is not None and not problems:
        findings += list_own_numbers(training)
    same = find_same_samples(steps)
    findings += [] if same is None else [same]
    run = describe_run(0, len(steps), parity.axes, instrument="parity")
    recording = Recording(
        run=replace(run, ranks=(RankSpan(0, len(steps)),), is_simulated=False, device_type="cpu"),
        parity=(parity,),
        findings=tuple(findings),
        gaps=(*find_torch_gaps(), *gaps, *_find_gaps(steps, calls, plan, training)),
    )
    return recording, None if is_dependent else _find_locatable(calls, plan, training, index)


def _exchange_samples(training: TrainingComparison | None, plan: ReplayPlan) -> bool:
    """Whether ranks with other inputs need each other, as those with parts of one sequence do.

    They differ from replays of their own inputs, and compute the right loss together.
    """
    if training is None:
        return False
    return training.is_right or (len(plan.groups) > 1 and training.has_right_losses)


class _Part(NamedTuple):
    """Compared tensors of some ranks, and the mesh that these ranks are."""

    result: ParityResult
    axes: dict[str, int]

    @property
    def comparisons(self) -> list[TensorComparison]:
        """The compared tensors."""
        return self.result.comparisons


class _Calls(NamedTuple):
    """Comparisons of the model's calls in the first step with replays of each rank's inputs.

    `parts` has outputs and buffers of each group of ranks, `factor` by what gradients are a
    multiple of their mean over ranks, `unequal` the weights that differ between ranks.
    """

    result: ParityResult
    parts: list[_Part]
    gradients: _Part
    factor: int | None
    unequal: list[TensorComparison]

    @property
    def compared(self) -> list[TensorComparison]:
        """The compared tensors of all parts."""
        return [r for part in (*self.parts, self.gradients) for r in part.comparisons]


def _compare_calls(steps: Sequence[CapturedStep], plan: ReplayPlan, replays: Replays) -> _Calls:
    of_groups: list[list[TensorComparison]] = []
    comparisons: list[TensorComparison] = []
    factor = None
    if not replays.is_failed:
        groups = range(len(plan.groups))
        of_groups = [_compare_group(steps, plan, replays, index) for index in groups]
        comparisons, factor = _compare_gradients(steps, plan, replays)
    compared = [result for group in (*of_groups, comparisons) for result in group]
    unequal = _find_unequal_parameters(steps, plan, replays)
    origins = [] if unequal else _find_origins(steps, plan, replays, compared)
    probe = replays.reference.probe
    result = ParityResult(
        compared,
        StepResult([], replays.reference.gradients, {}, parameters=replays.reference.parameters),
        replays.fp64 is not None,
        types={} if probe is None else probe.types,
    )

    def make_part(own: list[TensorComparison], axes: dict[str, int], *, is_located: bool) -> _Part:
        located = origins if is_located else []
        return _Part(dataclasses.replace(result, comparisons=own, origins=located), axes)

    # Origins of a part of the ranks do not explain tensors of all.
    parts = [
        make_part(group, _find_axes_of(plan, plan.groups[index].ranks), is_located=index == 0)
        for index, group in enumerate(of_groups)
    ]
    gradients = make_part(comparisons, plan.axes, is_located=len(of_groups) == 1)
    return _Calls(result, parts, gradients, factor, unequal)


def _find_problems(
    calls: _Calls,
    training: TrainingComparison | None,
    steps: Sequence[CapturedStep],
    plan: ReplayPlan,
    index: int,
) -> list[Problem]:
    """Why tensors differ: what differs first, in the order in which a step computes them.

    `index` is the step of the calls.
    """
    stale = describe_stale(steps)
    if stale is not None:
        return [stale]
    if training is not None and training.is_right:
        return []
    wrong_parts = [part for part in calls.parts if list_wrong(part.comparisons)]
    is_dependent = _exchange_samples(training, plan)
    if wrong_parts and not is_dependent:
        return find_problems(wrong_parts[0].result, wrong_parts[0].axes)
    if wrong_parts and training is not None:
        result = training.make_result(has_exact=calls.result.has_exact)
        return find_problems(result, plan.axes)
    problems = find_problems(calls.gradients.result, plan.axes)
    if training is None:
        return problems
    result = training.make_result(has_exact=calls.result.has_exact)
    wrong = [
        result.case.name
        for result in list_wrong(result.comparisons)
        if result.case.kind is TensorKind.GRADIENT
    ]
    if problems and (wrong or not training.has_data):
        return problems
    if wrong and calls.gradients.comparisons and training.index == index:
        is_summed = calls.factor is not None
        return [
            describe_loss(
                steps, training.single, plan, index=index, is_summed=is_summed, names=wrong
            )
        ]
    return find_problems(result, plan.axes)


def _find_locatable(
    calls: _Calls, plan: ReplayPlan, training: TrainingComparison | None, index: int
) -> int | None:
    """The step in which something differs of which a comparison of modules would show the origin.

    It would not if weights differ, or only gradients that are averaged over different inputs. If
    the calls of this step agree, it is a later one whose losses or gradients differ.
    """
    wrong = {result.case.kind for result in list_wrong(calls.compared)}
    has_origin = TensorKind.OUTPUT in wrong or len(plan.groups) == 1
    if calls.unequal:
        return None
    if not wrong and training is not None and training.has_wrong_data:
        return None if training.index == index else training.index
    return index if wrong and has_origin else None


def _make_runs(replays: Replays, read: Callable[[ReplayResult], StepResult]) -> Runs:
    """The runs of the single device, with what `read` takes from each replay."""
    fp64, perturbed_fp64 = replays.fp64, replays.perturbed_fp64
    return Runs(
        read(replays.reference),
        None if fp64 is None else read(fp64),
        ((read(replays.perturbed), None if perturbed_fp64 is None else read(perturbed_fp64)),),
    )


def _find_origins(
    steps: Sequence[CapturedStep],
    plan: ReplayPlan,
    replays: Replays,
    compared: Sequence[TensorComparison],
) -> list[Origin]:
    """Where the versions diverge, from what probes recorded of the first group; else nothing."""
    probe, group = replays.reference.probe, plan.groups[0]
    if probe is None:
        return []

    def read(replay: ReplayResult) -> StepResult:
        snapshots = {} if replay.probe is None else replay.probe.snapshots
        return StepResult([], {}, {}, snapshots=snapshots)

    ranks = [StepResult([], {}, {}, snapshots=steps[rank].snapshots) for rank in group.ranks]
    mesh = Mesh(tuple(_find_axes_of(plan, group.ranks).values()))
    gradients = (
        [result for result in compared if result.case.kind is TensorKind.GRADIENT]
        if len(plan.groups) == 1
        else []
    )
    return find_origins(_make_runs(replays, read), ranks, mesh, probe, gradients=gradients)


def _find_axes_of(plan: ReplayPlan, ranks: Sequence[int]) -> dict[str, int]:
    """The part of the mesh that these ranks are."""
    return dict(zip(plan.axes, find_submesh(tuple(plan.axes.values()), ranks), strict=True))


def _compare_group(
    steps: Sequence[CapturedStep], plan: ReplayPlan, replays: Replays, index: int
) -> list[TensorComparison]:
    """The verdicts on what the model returned, and wrote to buffers, on the ranks of one group."""
    group = plan.groups[index]
    suffix = f" of {name_ranks(group.ranks)}" if len(plan.groups) > 1 else ""

    def make_result(outputs: Sequence[tuple[str, torch.Tensor]], buffers: Tensors) -> StepResult:
        named = [
            (f"{path or 'output'}{suffix}" if suffix else path, tensor) for path, tensor in outputs
        ]
        changed = {f"{name}{suffix}": tensor for name, tensor in buffers.items()}
        return StepResult(named, {}, changed, frozenset(changed))

    ranks = [
        make_result(
            [output for call in steps[rank].calls for output in call.outputs], steps[rank].changed
        )
        for rank in group.ranks
    ]
    changed = {name for rank in group.ranks for name in steps[rank].changed}

    def read(replay: ReplayResult) -> StepResult:
        buffers = {name: t for name, t in replay.buffers[index].items() if name in changed}
        return make_result(replay.outputs[index], buffers)

    sizes = tuple(_find_axes_of(plan, group.ranks).values())
    return [compare_case(case) for case in make_cases(_make_runs(replays, read), ranks, sizes)]


def _compare_gradients(
    steps: Sequence[CapturedStep], plan: ReplayPlan, replays: Replays
) -> tuple[list[TensorComparison], int | None]:
    """The verdicts on gradients, and by what they are a multiple of the mean: the number of groups.

    None if they are the mean, or neither.
    """
    captured = [step.gradients for step in steps if step.gradients is not None]
    if len(captured) < len(steps):
        return [], None
    runs = _make_runs(replays, lambda replay: StepResult([], replay.gradients, {}))
    sizes = tuple(plan.axes.values())

    def compare(divisor: int) -> list[TensorComparison]:
        ranks = [StepResult([], _divide(gradients, divisor), {}) for gradients in captured]
        return [compare_case(case) for case in make_cases(runs, ranks, sizes)]

    comparisons, num_groups = compare(1), len(plan.groups)
    if num_groups == 1 or not list_wrong(comparisons):
        return comparisons, None
    summed = compare(num_groups)
    if list_wrong(summed):
        return comparisons, None
    detail = f"after division by {num_groups}"
    return [_add_detail(result, detail) for result in summed], num_groups


def _divide(tensors: Tensors, divisor: int) -> Tensors:
    """The quotients; names of one tensor share a quotient."""
    quotients = {id(tensor): tensor / divisor for tensor in tensors.values()}
    return {name: quotients[id(tensor)] for name, tensor in tensors.items()}


def _add_detail(result: TensorComparison, detail: str) -> TensorComparison:
    details = "; ".join(filter(None, (result.verdict.detail, detail)))
    return dataclasses.replace(result, verdict=replace(result.verdict, detail=details))


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
        is_full = replays.reference.parameters[name].shape == tensors[0].shape
        if len(tensors) == len(steps) > 1 and is_full and len({t.shape for t in tensors}) == 1:
            target = to_fp64_on_cpu(tensors[0])
            floor = find_floor(target, None, (), tensors[0].dtype)
            sizes = tuple(plan.axes.values())
            case = Case(
                TensorKind.PARAMETER, name, tensors[0], target, floor, tuple(tensors), sizes
            )
            comparisons.append(compare_case(case))
    return list_wrong(comparisons)


def _describe_unequal(
    unequal: Sequence[TensorComparison], compared: Sequence[TensorComparison]
) -> Problem:
    names = [result.verdict.name for result in unequal]
    cause = Explanation(
        Suspect.RANDOMNESS,
        predicate="follows from weights that differ between ranks",
        remedy="Use the same seed on all ranks when the model is initialized, or broadcast the "
        "weights of rank 0, as DistributedDataParallel does.",
    )
    return Problem(
        cause,
        names[0],
        f"{list_names(names)} {'have' if len(names) > 1 else 'has'} the full shape on every rank, "
        "but different values before the first step.",
        cause.remedy,
        names=(*names, *(result.verdict.name for result in list_wrong(compared))),
        rule="parity-weights",
    )


def _find_gaps(
    steps: Sequence[CapturedStep],
    calls: _Calls,
    plan: ReplayPlan,
    training: TrainingComparison | None,
) -> Iterator[Gap]:
    if training is None:
        yield Gap(
            place="program",
            fact="what it computes outside the model was not compared: the loss, clipping, the "
            "optimizer, and which data each rank gets",
        )
    else:
        yield from training.gaps
    num_groups = len(plan.groups)
    if num_groups > 1 and (training is None or not training.has_data):
        yield Gap(
            place="inputs",
            fact=f"the ranks called the model with {num_groups} different inputs, which were taken "
            "for different samples; parts of one sequence would need each other",
        )
    if is_coarse(calls.compared):
        yield Gap(
            place="double precision",
            fact="the ranks did not run in it, so that errors within the noise of their own "
            "precision were not seen",
        )
    has_gradients = training is not None and training.has_data
    facts = dict.fromkeys(gap for step in steps for gap in step.gaps)
    for place, fact in facts:
        if place != "gradients" or not has_gradients:
            yield Gap(place=place, fact=fact)
