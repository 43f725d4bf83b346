"""`parity(model, mesh, …)`: does the parallel version compute what the single device does?

The original runs on a single device, all ranks of the parallel version in this process, and
outputs, gradients and changed buffers are compared. A difference is explained and traced back to
the code where the two versions diverge.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.export import ExportedProgram

from shardscope._torch.private import explain_moved_names
from shardscope.attribution.program_records import describe_run, find_torch_gaps
from shardscope.errors import ParityError
from shardscope.parallel.equivalence import (
    Task,
    TensorComparison,
    TrainStep,
)
from shardscope.parallel.parity.arguments import (
    checked_axes,
    checked_batch_axes,
    checked_inputs,
    checked_model,
    device_type,
    keep_unsharded,
    list_batches,
    make_training,
)
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.findings import list_findings
from shardscope.parallel.parity.pipeline import check_parity
from shardscope.parallel.parity.problem import Problem
from shardscope.parallel.parity.problems import SELF_EXPLANATORY, find_problems
from shardscope.parallel.parity.processes import Processes
from shardscope.parallel.parity.result import ParityResult, is_within
from shardscope.parallel.parity.version import Version
from shardscope.parallel.parity.versions import EagerVersion, Parallelize, PartitionedVersion
from shardscope.record import (
    TOLERABLE,
    Axis,
    Divergence,
    Gap,
    Parity,
    RankSpan,
    Recording,
    TensorVerdict,
)

_CALLER = "parity()"
# All threads share the process group, DTensor's caches and the default dtype.
ranks_lock = threading.RLock()


@explain_moved_names
def parity(
    model: nn.Module | ExportedProgram,
    mesh: Mapping[str, int],
    plan: Any = None,
    *,
    inputs: Any = None,
    parallelize: Parallelize | None = None,
    loss: Callable[[Any], Any] | None = None,
    step: Callable[[nn.Module, Any], Any] | None = None,
    train_step: TrainStep | None = None,
    parallel_train_step: TrainStep | None = None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    steps: int = 2,
    batches: Sequence[Any] | None = None,
    batch_axes: str | Sequence[str] = (),
    batch_dim: int = 0,
    precision: torch.dtype | None = None,
    seed: int = 0,
    processes: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Recording:
    """Compare a parallel version of a model with the original, tensor by tensor.

    The allowed error of a tensor is a multiple of the single device's own error, measured in double
    precision. The model, its gradients, buffers and random state are restored. All ranks run in
    this process unless `processes` is set.

    Args:
        model: The single-device model, or an exported program.
        mesh: Axis names and sizes, such as `{"tp": 4}`.
        plan: A plan by which shardscope partitions the model, if `parallelize` is not given.
        inputs: The inputs of the model: a tuple of arguments, a mapping of keyword arguments, or
            one tensor.
        parallelize: A function `(model, device_mesh)` that shards a copy of the model on each rank,
            by any means. It may wrap, rename or replace modules. Training steps need none if they
            issue all collectives themselves.
        loss: A function of the output from which backward starts; by default a nonlinear sum over
            its elements.
        step: A function `(model, inputs)` that runs forward and backward, instead of `loss`. It may
            call the model several times.
        train_step: A function `(model, batch, optimizer)` that runs one training step. Then losses,
            gradients before and after clipping, their norm, the optimizer's state and the updated
            parameters are compared, too. If it has a fourth parameter, it gets the device mesh, and
            None on the single device.
        parallel_train_step: The training step of the ranks; by default `train_step`.
        optimizer: A function of the model that makes its optimizer. `parallelize` may also return
            a model and an optimizer.
        steps: How many training steps are run, all with the same batch.
        batches: The batches of the training steps, in place of `inputs` and `steps`.
        batch_axes: Mesh axes along which each rank gets its shard of the batch.
        batch_dim: The dim of the inputs that is the batch.
        precision: A lower dtype that the parallel version may compute in.
        seed: Random seed of each rank.
        processes: Run the ranks as processes of a gloo group.
        report: Called with a description of the current activity.

    Examples:
        >>> show(parity(model, {"tp": 4}, parallelize=parallelize, inputs=(tokens,)))
    """
    axes = checked_axes(mesh, _CALLER)
    original = checked_model(model, _CALLER)
    training = make_training(train_step, parallel_train_step, optimizer, loss or step, _CALLER)
    if training is not None:
        inputs = list_batches(inputs, batches, steps, _CALLER)
    task = Task(checked_inputs(inputs, _CALLER), loss, step, seed=seed, training=training)
    version: PartitionedVersion | EagerVersion
    if parallelize is None and plan is None and training is not None:
        parallelize = keep_unsharded
    if parallelize is None:
        version = _transform(model, original, axes, plan, task, is_sent=processes)
    else:
        sharded_axes = checked_batch_axes(batch_axes, axes, _CALLER)
        device = device_type(original)
        version = EagerVersion(
            original, axes, parallelize, task, sharded_axes, batch_dim, device=device
        )
    if not processes:
        return _check(version, version, precision=precision, report=report)
    with closing(Processes(version)) as ranks:
        return _check(version, ranks, precision=precision, report=report)


def _check(
    version: PartitionedVersion | EagerVersion,
    ranks: Version,
    *,
    precision: torch.dtype | None,
    report: Callable[[str], None],
) -> Recording:
    """The recording of the comparison; the ranks run in this process or in others."""
    gaps: dict[tuple[str, str], None] = {}
    # Run eagerly: the modules inside a compiled graph could not be recorded.
    with ranks_lock, torch.compiler.set_stance("force_eager"):
        parity_result = check_parity(
            ranks,
            precision=precision,
            report=lambda *gap: gaps.setdefault(gap),
            report_progress=report,
        )
    if isinstance(version, PartitionedVersion):
        problems = version.find_problem(parity_result)
    else:
        problems = find_problems(parity_result, version.axes)
    is_in_processes = ranks is not version
    parity = make_parity(parity_result, version.axes, problems, is_in_processes=is_in_processes)
    size = math.prod(version.axes.values())
    run = describe_run(0, size, parity.axes, instrument="parity")
    return Recording(
        run=replace(run, ranks=(RankSpan(0, size),), is_simulated=not is_in_processes),
        parity=(parity,),
        findings=tuple(list_findings(parity_result, parity, problems)),
        gaps=(*find_torch_gaps(), *(Gap(place=place, fact=fact) for place, fact in gaps)),
    )


def _transform(
    model: nn.Module | ExportedProgram,
    original: nn.Module,
    axes: Mapping[str, int],
    plan: object,
    task: Task,
    *,
    is_sent: bool,
) -> PartitionedVersion:
    """A version whose ranks run the model or program as partitioned by the plan."""
    if plan is None:
        raise ParityError(
            "parity() got neither a plan nor a function that shards the model. Pass "
            "parallelize=fn, called as fn(model, device_mesh), or a plan."
        )
    if task.step is not None or task.training is not None:
        raise ParityError(
            "parity() got a plan and a step, but a program is partitioned together with its loss. "
            "Pass loss=, which takes what the model returns."
        )
    if is_sent and isinstance(model, ExportedProgram):
        raise ParityError(
            "parity() got an exported program, which cannot be sent to other processes. Pass the "
            "model that it was exported from, or run the ranks in this process (processes=False)."
        )
    if isinstance(model, ExportedProgram):  # which has no loss
        task = dataclasses.replace(task, has_backward=False)
    return PartitionedVersion(original, axes, plan, task, model)


_MAX_ELEMENTS = 2**14  # the largest tensor that gets an explanation of its own


def make_parity(
    parity_result: ParityResult,
    axes: Mapping[str, int],
    problems: Sequence[Problem],
    *,
    is_in_processes: bool,
) -> Parity:
    """The record of the comparison; every tensor that differs gets the cause of a problem."""
    return Parity(
        axes=tuple(Axis(name=name, size=size) for name, size in axes.items()),
        tensors=tuple(_explain_verdicts(parity_result, axes, problems)),
        divergences=tuple(
            Divergence(
                module=problem.module,
                phase=problem.phase,
                suspect=problem.cause.suspect,
                detail=problem.fact,
                type=parity_result.types.get(problem.module, ""),
                op=problem.op,
                source=problem.source,
                remedy=problem.remedy,
            )
            for problem in problems
            if problem.module is not None
        ),
        num_compared_modules=len(parity_result.types),
        is_in_processes=is_in_processes,
        has_exact=parity_result.has_exact,
        has_backward=bool(parity_result.reference.gradients),
    )


def _explain_verdicts(
    parity_result: ParityResult, axes: Mapping[str, int], problems: Sequence[Problem]
) -> Iterator[TensorVerdict]:
    """The verdicts of all steps; those of the step that is explained have a cause."""
    if not parity_result.steps:
        yield from (_explain_verdict(r, axes, problems) for r in parity_result.comparisons)
    for index, comparisons in enumerate(parity_result.steps):
        is_explained = index == parity_result.index
        step = index + 1 if parity_result.is_training else None
        for result in parity_result.comparisons if is_explained else comparisons:
            verdict = _explain_verdict(result, axes, problems) if is_explained else result.verdict
            yield replace(verdict, step=step)


def _explain_verdict(
    result: TensorComparison, axes: Mapping[str, int], problems: Sequence[Problem]
) -> TensorVerdict:
    verdict = result.verdict
    if verdict.agreement in TOLERABLE or not problems:
        return verdict
    problem = next(
        (
            problem
            for problem in problems
            if verdict.name in problem.names
            or (problem.module and is_within(verdict.name, problem.module))
        ),
        problems[0],
    )
    suspect = problem.cause.suspect
    if verdict.name not in problem.names and math.prod(verdict.shape) > _MAX_ELEMENTS:
        return replace(verdict, suspect=suspect)
    explanation = explain(result, axes, batch_axes=result.case.batch_axes)
    if explanation.suspect is not suspect and verdict.name not in problem.names:
        return replace(verdict, suspect=suspect)
    explanation = explanation if explanation.suspect is suspect else problem.cause
    clause = "" if verdict.agreement in SELF_EXPLANATORY else explanation.describe()
    detail = "; ".join(filter(None, (verdict.detail, clause)))
    return replace(verdict, suspect=suspect, ratio=explanation.ratio, detail=detail)
