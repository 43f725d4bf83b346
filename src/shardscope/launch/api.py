"""`run(script)`: an unmodified training program as any rank of a simulated cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

import msgspec
from msgspec.structs import replace

from shardscope.errors import LaunchError
from shardscope.launch.cluster import Cluster
from shardscope.launch.program import Program
from shardscope.launch.request import Ending, Job, JobEnded, Request
from shardscope.record import Recording, load, merge
from shardscope.record.ranks import list_ranks

INSTRUMENTS = ("audit", "explain", "memory", "trace")
"""What `run` can observe."""
_ALONE = "memory"  # compiled functions run eagerly for it, so that it has a process of its own
ROLES = "roles"
GPU_NAMES = ("h200", "h100", "a100", "b200")
MAX_DATA_RANKS = 16
"""How many ranks a run with data may have: all of them run at once, on this machine."""
COMPILE = "compile"
"""The instrument "explain" that compiles the model if the program compiles nothing."""
COVERAGE = "coverage"
"""Tests the ops of the model's first call, and ends the program then."""


@final
class RunResult:
    """What `run` returns: the `recording`, and the `failures` of ranks, a sentence each.

    Examples:
        >>> result = run("train.py")
        >>> result.num_steps, result.failures
    """

    def __init__(self, recording: Recording | None, ended: Sequence[JobEnded]) -> None:
        self._recording = recording
        self._ended = ended

    def __repr__(self) -> str:
        return f"RunResult({self._recording!r}, {len(self.failures)} failures)"

    @property
    def recording(self) -> Recording:
        """The steps that were observed."""
        if self._recording is None:
            raise LaunchError(self.failures[0])
        return self._recording

    @property
    def has_recording(self) -> bool:
        """Whether any step was observed, if only in part."""
        return self._recording is not None

    @property
    def num_steps(self) -> int:
        """The number of steps that every rank has finished."""
        counts = [ended.ending.num_steps for ended in self._ended if ended.ending is not None]
        return min(counts, default=0)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why ranks failed, if any did; ranks that failed in the same way share a sentence."""
        ranks: dict[str, set[int]] = defaultdict(set)
        for ended in _without_consequences(self._ended):
            reason = _explain(ended)
            if reason is not None:
                ranks[reason].add(ended.job.rank)
        return tuple(
            f"{'Rank' if len(failed) == 1 else 'Ranks'} {list_ranks(failed)} {reason}"
            for reason, failed in ranks.items()
        )


def run(
    script: str | Path,
    *args: str,
    num_nodes: int = 1,
    num_per_node: int = 8,
    ranks: str | Iterable[int] = "0",
    steps: int = 2,
    gpu: str = "h200",
    is_module: bool = False,
    data: bool = False,
    real: bool = False,
    instruments: Iterable[str] = INSTRUMENTS,
    on_job: Callable[[JobEnded], None] = lambda ended: None,
) -> RunResult:
    """Run an unmodified training program as ranks of a simulated cluster, without GPUs.

    Each rank is a process in which `torch.distributed` and `torch.cuda` behave as on that rank:
    nothing is sent, and tensors on the GPU have no data. The program ends after `steps` steps of
    its optimizer.

    Args:
        script: The program that torchrun would start; with `is_module` a module's name.
        args: The program's arguments.
        num_nodes: The number of nodes.
        num_per_node: The number of processes, each with a GPU, per node.
        ranks: The ranks to run: "0,8-15", "all", numbers, or "roles", a rank for each stage of a
            pipeline.
        steps: The number of training steps after which the program is ended.
        gpu: The GPU of the nodes: h200, h100, a100 or b200.
        is_module: Whether `script` is a module's name, as for `python -m`.
        data: Compute with real numbers: all ranks run at once as processes of this machine, with
            gloo, and its CPU in place of the GPUs. Memory is not estimated then.
        real: Run real ranks with torchrun on this machine instead, and trace them.
        instruments: What to observe: any of audit, explain, memory and trace.
        on_job: Called when the process of a rank has ended.

    Examples:
        >>> result = run("train.py", "--lr", "3e-4", num_nodes=128)
        >>> result.recording.memory[0].peak_bytes
    """
    program = Program(os.fspath(script), args, is_module)
    program.check()
    cluster = Cluster(num_nodes, num_per_node)
    _check(cluster, gpu=gpu, steps=steps, data=data, real=real)
    names = tuple(instruments)
    is_everywhere = data or real  # all ranks run, and nothing is known of their memory
    text = ranks if isinstance(ranks, str) else ",".join(map(str, ranks))
    chosen = cluster.choose_ranks("all" if is_everywhere else "0" if text == ROLES else text)
    with tempfile.TemporaryDirectory(
        prefix="shardscope-run-", ignore_cleanup_errors=True
    ) as folder:
        request = Request(
            script=program.script,
            args=args,
            is_module=is_module,
            num_nodes=num_nodes,
            num_per_node=num_per_node,
            num_steps=steps,
            gpu=gpu,
            scratch=folder,
            jobs=_make_jobs(chosen, _without_memory(names) if is_everywhere else names),
            num_parallel=cluster.size if data else os.cpu_count() or 1,
            has_data=data,
        )
        ended = list(_run_torchrun(request) if real else _run_jobs(request, on_job))
        recording = _join(folder, ended)
        if text == ROLES and recording is not None and not is_everywhere:
            others = [rank for rank in cluster.find_roles(recording) if rank]
            request = replace(request, jobs=_make_jobs(others, names), is_shown=False)
            ended += _run_jobs(request, on_job)
            recording = _join(folder, ended)
    if recording is not None:
        recording = replace(recording, run=replace(recording.run, command=program.command))
    return RunResult(recording, ended)


def _check(cluster: Cluster, *, gpu: str, steps: int, data: bool, real: bool) -> None:
    if gpu not in GPU_NAMES:
        raise LaunchError(f"The GPU {gpu!r} is not known. Choose one of {', '.join(GPU_NAMES)}.")
    if steps < 1:
        raise LaunchError(f"The number of steps is {steps}. Give at least 1.")
    if data and real:
        raise LaunchError(
            "--data and --real were both given. --real starts the program with torchrun as it is; "
            "--data puts the CPU in place of the GPUs that this machine lacks. Choose one of them."
        )
    if real and cluster.num_nodes > 1:
        raise LaunchError(
            f"Real ranks on {cluster.num_nodes} nodes need a torchrun on each of them. Start one "
            "node at a time, or simulate them."
        )
    if data and cluster.size > MAX_DATA_RANKS:
        raise LaunchError(
            f"With --data all {cluster.size:,} ranks would run at once on this machine, which is "
            f"limited to {MAX_DATA_RANKS}. Give smaller --nnodes or --nproc-per-node, or run "
            "without --data."
        )


def _without_memory(instruments: tuple[str, ...]) -> tuple[str, ...]:
    """The instruments that real ranks can have: the CPU's memory is not that of a GPU."""
    if instruments == (_ALONE,):
        raise LaunchError(
            "The memory of a GPU is estimated without data only: with --data and --real the CPU "
            "computes. Leave the option out."
        )
    return tuple(name for name in instruments if name != _ALONE)


def _make_jobs(ranks: Iterable[int], instruments: Sequence[str]) -> tuple[Job, ...]:
    """A process for each rank, and one more for its memory."""
    unknown = [name for name in instruments if name not in (*INSTRUMENTS, COMPILE, COVERAGE)]
    if unknown or not instruments:
        raise LaunchError(
            f"The instruments are {', '.join(map(repr, unknown)) or 'none'}. Choose some of "
            f"{', '.join(INSTRUMENTS)}."
        )
    together = "+".join(name for name in instruments if name != _ALONE)
    processes = [_ALONE] * (_ALONE in instruments) + [together] * bool(together)
    return tuple(Job(rank=rank, instrument=name) for rank in ranks for name in processes)


def _run_torchrun(request: Request) -> Iterator[JobEnded]:
    """Run real ranks, and yield how each has ended."""
    file = Path(request.scratch, "request.json")
    file.write_bytes(msgspec.json.encode(request))
    module = "shardscope.launch.real_rank"
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={request.num_per_node}"]
    subprocess.run([sys.executable, "-m", *launcher, "-m", module, str(file)], check=False)
    for job in request.jobs:
        path = Path(request.scratch, f"{job.stem}.ending.json")
        ending = msgspec.json.decode(path.read_bytes(), type=Ending) if path.exists() else None
        yield JobEnded(job=job, ending=ending)


def _run_jobs(request: Request, on_job: Callable[[JobEnded], None]) -> Iterator[JobEnded]:
    """Start the warm process, and yield each job as it ends."""
    if not request.jobs:
        return
    file = Path(request.scratch, "request.json")
    file.write_bytes(msgspec.json.encode(request))
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "shardscope.launch.server", str(file), str(writing)]
    missing = dict.fromkeys(request.jobs)
    with _started(command, writing) as process, open(reading, "rb") as events:
        try:
            for line in events:
                ended = msgspec.json.decode(line, type=JobEnded)
                missing.pop(ended.job)
                on_job(ended)
                yield ended
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            raise
    yield from (JobEnded(job=job, ending=None) for job in missing)


@contextmanager
def _started(command: list[str], writing: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, pass_fds=[writing], start_new_session=True, stdin=subprocess.DEVNULL
    )
    os.close(writing)
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _join(folder: str, ended: Sequence[JobEnded]) -> Recording | None:
    """One recording of what all jobs recorded."""
    files = [Path(folder, f"{job_ended.job.stem}.json") for job_ended in ended]
    recordings = [load(file) for file in files if file.exists()]
    if not recordings:
        return None
    return merge(recordings) if len(recordings) > 1 else recordings[0]


def _without_consequences(ended: Sequence[JobEnded]) -> list[JobEnded]:
    """The jobs without those that failed because others had, unless that is all there is."""
    causes = [job for job in ended if job.ending is None or not job.ending.is_consequence]
    return causes if any(map(_explain, causes)) else list(ended)


def _explain(ended: JobEnded) -> str | None:
    """Why a job failed: what follows "Rank 0"; None if it did not fail."""
    ending = ended.ending
    if ended.waiting_at is not None:
        return f"waited without doing anything at {ended.waiting_at}, and was ended."
    if ending is None:
        how = "died" if ended.signal is None else f"was ended by signal {ended.signal}"
        return f"{how} before it could report."
    if ending.failure is not None:
        return f"failed: {ending.failure}"
    if ending.exit_code:
        return f"called sys.exit({ending.exit_code})."
    if not ending.num_steps and not ending.is_observed:
        return (
            "ended without a step of an optimizer, so there is nothing to report. Check that the "
            "program's arguments make it train."
        )
    return None
