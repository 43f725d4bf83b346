"""Compares a program's ranks with the same program as a single process: `parity -- train.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from shardscope.errors import LaunchError
from shardscope.launch.api import GPU_NAMES, RunResult, check_cluster, run_jobs
from shardscope.launch.cluster import Cluster
from shardscope.launch.program import Program
from shardscope.launch.request import MAIL, Job, JobEnded, Request
from shardscope.launch.step_capture import (
    CAPTURE,
    PLAN,
    REPLAYS,
    name_replay_file,
    name_step_file,
)
from shardscope.parallel.parity.captured_steps import (
    CapturedStep,
    Replays,
    compare_steps,
    plan_replay,
)
from shardscope.record import Gap, Recording

OnJob = Callable[[JobEnded], None]


def compare_program(
    program: Program,
    *,
    num_nodes: int = 1,
    num_per_node: int = 8,
    single_args: Sequence[str] = (),
    on_job: OnJob = lambda ended: None,
) -> Recording:
    """Compare the first step of a program's ranks with a single process that replays it.

    All ranks run on this machine, with data, until the first step has computed gradients. Then the
    program runs as a single process until it calls its model; that model gets the weights of
    the ranks and is called with the inputs of each.

    Args:
        program: The program that torchrun would start.
        num_nodes: The number of nodes.
        num_per_node: The number of processes per node.
        single_args: Arguments that are added where the program runs as a single process.
        on_job: Called when a process has ended.
    """
    program.check()
    cluster = Cluster(num_nodes, num_per_node)
    check_cluster(cluster, gpu=GPU_NAMES[0], steps=1, data=True, real=False)
    if cluster.size == 1:
        raise LaunchError(
            "A program with one rank has nothing to be compared with. Give --nproc-per-node 2 or "
            "more."
        )
    with tempfile.TemporaryDirectory(
        prefix="shardscope-parity-", ignore_cleanup_errors=True
    ) as folder:
        jobs = tuple(Job(rank=rank, instrument=CAPTURE) for rank in range(cluster.size))
        request = Request(
            script=program.script,
            args=program.args,
            is_module=program.is_module,
            num_nodes=num_nodes,
            num_per_node=num_per_node,
            num_steps=1,
            gpu=GPU_NAMES[0],
            scratch=str(Path(folder, "ranks")),
            jobs=jobs,
            num_parallel=len(jobs),
            has_data=True,
        )
        steps = _capture(request, on_job)
        recording = _compare(request, steps, Path(folder, "single"), single_args, on_job)
    return replace(recording, run=replace(recording.run, command=program.command))


def _capture(request: Request, on_job: OnJob) -> list[CapturedStep]:
    mail = Path(request.scratch, MAIL)
    mail.mkdir(parents=True)
    ended = list(run_jobs(request, on_job))
    failures = RunResult(None, ended).failures
    if failures:
        raise LaunchError(failures[0])
    files = [mail / name_step_file(job.rank) for job in request.jobs]
    missing = [job.rank for job, file in zip(request.jobs, files, strict=True) if not file.exists()]
    if missing:
        raise LaunchError(
            f"Rank {missing[0]} ended before its first step had computed gradients, so that there "
            "is nothing to compare. Check that the program's arguments make it train."
        )
    return [_load(file) for file in files]


def _compare(
    request: Request,
    steps: Sequence[CapturedStep],
    folder: Path,
    single_args: Sequence[str],
    on_job: OnJob,
) -> Recording:
    """Replay the steps on a single process, in all variants, and compare."""
    plan = plan_replay(steps)
    mail = folder / MAIL
    mail.mkdir(parents=True)
    torch.save(plan, mail / PLAN)
    jobs = tuple(Job(rank=0, instrument=name) for name in REPLAYS)
    request = replace(
        request,
        args=(*request.args, *single_args),
        num_nodes=1,
        num_per_node=1,
        scratch=str(folder),
        jobs=jobs,
        num_parallel=len(jobs),
        is_shown=False,
    )
    ended = {job_ended.job.instrument: job_ended for job_ended in run_jobs(request, on_job)}
    results = {
        name: _load(mail / name_replay_file(name))
        for name in REPLAYS
        if (mail / name_replay_file(name)).exists()
    }
    as_it_is, perturbed, fp64, perturbed_fp64 = REPLAYS
    for name in (as_it_is, perturbed):
        if name not in results:
            raise LaunchError(_explain(ended[name]))
    gaps = []
    if fp64 not in results or perturbed_fp64 not in results:
        results[fp64] = results[perturbed_fp64] = None
        reason = next(iter(RunResult(None, [ended[fp64]]).failures), "no reason is known")
        fact = f"the program does not run in it as a single process ({reason[:200]})"
        gaps.append(Gap(place="double precision", fact=fact))
    return compare_steps(steps, plan, Replays(*(results[name] for name in REPLAYS)), gaps)


def _explain(ended: JobEnded) -> str:
    failures = RunResult(None, [ended]).failures
    reason = failures[0].removeprefix("Rank 0 failed: ") if failures else "It did not train."
    return (
        f"The program ran as several ranks, but cannot be replayed as a single process: {reason} If "
        "arguments of its own, such as a degree of parallelism, need more ranks, give those for one "
        'process: --single-args "--tp 1".'
    )


def _load(file: Path) -> Any:
    return torch.load(file, weights_only=False)
