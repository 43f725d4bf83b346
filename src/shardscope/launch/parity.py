"""Compares a program's ranks with the same program as a single process: `parity -- train.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from shardscope.errors import LaunchError
from shardscope.launch.api import GPU_NAMES, RunResult, check_cluster
from shardscope.launch.cluster import Cluster
from shardscope.launch.program import Program
from shardscope.launch.request import MAIL, Job, JobEnded, Request
from shardscope.launch.step_capture import CAPTURE, PROBED, name_step_file
from shardscope.launch.step_replay import (
    PLAN,
    REPLAYS,
    name_replay_file,
    name_training_file,
)
from shardscope.launch.warm_process import OnEvent, run_jobs
from shardscope.parallel.parity.captured_data import DataUse
from shardscope.parallel.parity.captured_parity import compare_steps
from shardscope.parallel.parity.captured_steps import (
    CapturedStep,
    CapturedTraining,
    ReplayPlan,
    Replays,
    plan_replay,
    reorder_ranks,
)
from shardscope.parallel.parity.captured_training import (
    TrainingComparison,
    compare_training,
    depends_on_order,
    find_next_use,
)
from shardscope.record import Gap, Recording


def compare_program(
    program: Program,
    *,
    num_nodes: int = 1,
    num_per_node: int = 8,
    single_args: Sequence[str] = (),
    num_steps: int = 2,
    batch_dim: int = 0,
    on_event: OnEvent = lambda event: None,
) -> Recording:
    """Compare the training steps of a program's ranks with those of a single process.

    All ranks run on this machine, with data. Then the program runs as a single process; its model
    gets the weights of the ranks, is called with the inputs of each, and then trained by the
    program itself on the data of all ranks.

    Args:
        program: The program that torchrun would start.
        num_nodes: The number of nodes.
        num_per_node: The number of processes per node.
        single_args: Arguments that are added where the program runs as a single process.
        num_steps: The number of steps that are compared.
        batch_dim: The dim along which the ranks' samples make one batch.
        on_event: Called when a process has ended, or a step.
    """
    program.check()
    cluster = Cluster(num_nodes, num_per_node)
    check_cluster(cluster, gpu=GPU_NAMES[0], steps=1, data=True, real=False)
    if cluster.size == 1:
        raise LaunchError(
            "A program with one rank has nothing to be compared with. Give --nproc-per-node 2 or "
            "more."
        )
    request = Request(
        script=program.script,
        args=program.args,
        is_module=program.is_module,
        num_nodes=num_nodes,
        num_per_node=num_per_node,
        num_steps=num_steps,
        gpu=GPU_NAMES[0],
        scratch="",
        jobs=(),
        num_parallel=cluster.size,
        has_data=True,
    )
    run = _run(request, single_args, on_event, batch_dim=batch_dim)
    training = run.training
    recording, index = compare_steps(run.steps, run.plan, run.replays, run.gaps, training)
    if index is not None:
        try:
            probed = replace(request, num_steps=index + 1)
            run = _run(probed, single_args, on_event, batch_dim=batch_dim, end=PROBED)
            recording, _ = compare_steps(
                run.steps, run.plan, run.replays, run.gaps, training, index=index
            )
        except LaunchError as error:
            fact = f"a run in which modules are recorded failed ({error!s:.200})"
            gap = Gap(place="the first difference", fact=fact)
            recording = replace(recording, gaps=(*recording.gaps, gap))
    return replace(recording, run=replace(recording.run, command=program.command))


class _Run(NamedTuple):
    """What the ranks and a single process have computed."""

    steps: list[CapturedStep]
    plan: ReplayPlan
    replays: Replays
    gaps: list[Gap]
    training: TrainingComparison | None  # of a run without probes


def _run(
    request: Request,
    single_args: Sequence[str],
    on_event: OnEvent,
    *,
    batch_dim: int,
    end: str = "",
) -> _Run:
    """Capture and replay steps; `end` is that of the names of the instruments.

    Those that record modules capture the last step.
    """
    with tempfile.TemporaryDirectory(
        prefix="shardscope-parity-", ignore_cleanup_errors=True
    ) as folder:
        size = request.num_nodes * request.num_per_node
        jobs = tuple(Job(rank=rank, instrument=CAPTURE + end) for rank in range(size))
        ranks = Path(folder, "ranks")
        request = replace(request, scratch=str(ranks), jobs=jobs, is_shown=not end)
        steps, gaps = _capture(request, on_event)
        jobs = tuple(Job(rank=0, instrument=name + end) for name in REPLAYS)
        request = replace(
            request,
            args=(*request.args, *single_args),
            num_nodes=1,
            num_per_node=1,
            jobs=jobs,
            num_parallel=len(jobs),
            is_shown=False,
        )
        use: DataUse | None = DataUse.JOINED
        while use is not None:
            plan = plan_replay(steps, batch_dim=batch_dim, use=use)
            scratch = str(Path(folder, f"single-{use}"))
            replays, replay_gaps = _replay(replace(request, scratch=scratch), plan, on_event)
            trainings = [step.training for step in steps]
            use = None if end else find_next_use(trainings, plan, replays)
            gaps += replay_gaps if use is DataUse.OWN else []
        training = None if end else compare_training(trainings, plan, replays)
        is_joined = plan.data.use is DataUse.JOINED and plan.data.num_groups > 1
        if training is not None and training.has_wrong_data and is_joined:
            scratch = str(Path(folder, "single-reordered"))
            request = replace(request, scratch=scratch, jobs=jobs[:1], num_parallel=1)
            reordered = _train_reordered(request, reorder_ranks(plan), on_event)
            if depends_on_order(replays, reordered):
                training = compare_training(trainings, plan, replays, is_order_unknown=True)
    return _Run(steps, plan, replays, [*gaps, *replay_gaps], training)


def _train_reordered(
    request: Request, plan: ReplayPlan, on_event: OnEvent
) -> CapturedTraining | None:
    """What a single process computes with the samples of the ranks in another order."""
    mail = Path(request.scratch, MAIL)
    mail.mkdir(parents=True)
    torch.save(plan, mail / PLAN)
    list(run_jobs(request, on_event))
    training: CapturedTraining | None = _load_if_there(mail / name_training_file(REPLAYS[0]))
    return training


def _capture(request: Request, on_event: OnEvent) -> tuple[list[CapturedStep], list[Gap]]:
    """The steps of each rank, and a gap if the program failed after the first gradients."""
    mail = Path(request.scratch, MAIL)
    mail.mkdir(parents=True)
    failures = RunResult(None, run_jobs(request, on_event)).failures
    files = [mail / name_step_file(job.rank) for job in request.jobs]
    if failures and not all(file.exists() for file in files):
        raise LaunchError(failures[0])
    fact = "the program failed, so that only what it computed before was compared "
    gaps = [Gap(place="steps", fact=f"{fact}({failures[0]:.300})")] if failures else []
    return [_load(file) for file in files], gaps


def _replay(request: Request, plan: ReplayPlan, on_event: OnEvent) -> tuple[Replays, list[Gap]]:
    """What a single process computes in each variant, and why it does not in double precision."""
    mail = Path(request.scratch, MAIL)
    mail.mkdir(parents=True)
    torch.save(plan, mail / PLAN)
    ended = {job_ended.job: job_ended for job_ended in run_jobs(request, on_event)}
    results = [_load_if_there(mail / name_replay_file(job.instrument)) for job in request.jobs]
    trainings = tuple(
        _load_if_there(mail / name_training_file(job.instrument)) for job in request.jobs
    )
    reference, perturbed, fp64, perturbed_fp64 = results
    if reference is None or perturbed is None:
        raise LaunchError(_explain(ended[request.jobs[0 if reference is None else 1]]))
    reason = reference.failure or perturbed.failure
    if reason and trainings[0] is None:
        raise LaunchError(_explain(ended[request.jobs[0]], reason))
    failures = RunResult(None, [ended[job] for job in request.jobs[:2]]).failures
    gaps = [Gap(place="training", fact=_describe_failures(failures))] if failures else []
    if reason:
        fact = "compared in entire steps only: a single process fails on the inputs of a rank "
        fact += f"({reason:.300})"
        gaps.append(Gap(place="calls of the model", fact=fact))
    in_fp64 = [replay for replay in (fp64, perturbed_fp64) if replay is not None]
    if len(in_fp64) == 2 and (reason or not any(replay.failure for replay in in_fp64)):
        return Replays(reference, perturbed, fp64, perturbed_fp64, trainings), gaps
    failed = RunResult(None, [ended[job] for job in request.jobs[2:]]).failures
    failures = (*failed, *(replay.failure for replay in in_fp64 if replay.failure))
    fact = f"the program does not run in it as a single process ({' '.join(failures):.200})"
    gaps.append(Gap(place="double precision", fact=fact))
    return Replays(reference, perturbed, trainings=trainings), gaps


def _load_if_there(file: Path) -> Any:
    return _load(file) if file.exists() else None


def _describe_failures(failures: Sequence[str]) -> str:
    return (
        "the single process failed on the data of all ranks, so that some of the steps were not "
        f"compared ({failures[0]:.300})"
    )


def _explain(ended: JobEnded, reason: str = "") -> str:
    failures = RunResult(None, [ended]).failures
    if failures:
        reason = failures[0].removeprefix("Rank 0 failed: ")
    reason = reason or "It did not train."
    return (
        f"The program ran as several ranks, but cannot be replayed as a single process: {reason} "
        "If arguments of its own, such as a degree of parallelism, need more ranks, give those for "
        'one process: --single-args "--tp 1".'
    )


def _load(file: Path) -> Any:
    """What a process has saved; raises if that is a sentence that says why it could not."""
    saved = torch.load(file, weights_only=False)
    if isinstance(saved, str):
        raise LaunchError(saved)
    return saved
