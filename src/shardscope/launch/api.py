"""`run(script)`: an unmodified training program as any rank of a simulated cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import final

import msgspec
from msgspec.structs import replace

from shardscope.errors import LaunchError, ShardscopeError
from shardscope.launch.cluster import Cluster
from shardscope.launch.program import Program
from shardscope.launch.request import Ending, Job, JobEnded, Reason, Request
from shardscope.launch.warm_process import Interruption, OnEvent, WarmProcess
from shardscope.record import Gap, Recording, load, merge
from shardscope.record.ranks import list_ranks

INSTRUMENTS = ("audit", "explain", "memory", "trace")
"""What `run` can observe."""
_MEMORY = "memory"
"""The instrument that has a process of its own: compiled functions run eagerly for it."""
ROLES = "roles"
CHECKPOINTS = ("scratch", "skip")
GPU_NAMES = ("h200", "h100", "a100", "b200")
PATIENCE_SECONDS = 60  # in which a process hardly uses the processor, until it counts as waiting
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

    def __init__(
        self, recording: Recording | None, ended: Sequence[JobEnded], number: int | None = None
    ) -> None:
        self.signal = number
        """The signal that has interrupted the run, such as SIGINT; None if none has."""
        self._recording = recording
        self._ended = ended

    def __repr__(self) -> str:
        return f"RunResult({self._recording!r}, {len(self.failures)} failures)"

    def _repr_html_(self) -> str | None:
        """The page of the recording, for notebooks; None if there is none."""
        return None if self._recording is None else self._recording._repr_html_()

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
        counts = [
            ended.num_steps if ended.ending is None else ended.ending.num_steps
            for ended in self._ended
        ]
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

    @property
    def hidden_outputs(self) -> tuple[str, ...]:
        """The end of what each failed rank has printed, where it was not shown."""
        failed = [ended for ended in self._ended if ended.output and _explain(ended) is not None]
        shown = {_explain(ended) for ended in self._ended if not ended.output}
        outputs = {ended.job.rank: ended for ended in failed if _explain(ended) not in shown}
        return tuple(
            f"Rank {rank} has printed, at the end:\n{ended.output}"
            for rank, ended in outputs.items()
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
    checkpoints: str = "scratch",
    data: bool = False,
    real: bool = False,
    instruments: Iterable[str] = INSTRUMENTS,
    on_event: OnEvent = lambda event: None,
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
        ranks: The ranks to run: "0,8-15", "all", numbers, or "roles": each stage of a pipeline,
            and the last rank along each other mesh axis.
        steps: The number of training steps after which the program is ended.
        gpu: The GPU of the nodes: h200, h100, a100 or b200.
        is_module: Whether `script` is a module's name, as for `python -m`.
        checkpoints: "scratch" lets the program write checkpoints to a folder that is removed after
            the run, those of tensors without data excepted; "skip" writes none.
        data: Compute with real numbers: all ranks run at once as processes of this machine, with
            gloo, and its CPU in place of the GPUs. Memory is not estimated then.
        real: Run real ranks with torchrun on this machine instead, and trace them.
        instruments: What to observe: any of audit, explain, memory and trace.
        on_event: Called when a rank has finished a step and when its process has ended.

    Examples:
        >>> result = run("train.py", "--lr", "3e-4", num_nodes=128)
        >>> result.recording.memory[0].peak_bytes
    """
    result = run_until_interrupted(
        script,
        *args,
        num_nodes=num_nodes,
        num_per_node=num_per_node,
        ranks=ranks,
        steps=steps,
        gpu=gpu,
        is_module=is_module,
        checkpoints=checkpoints,
        data=data,
        real=real,
        instruments=instruments,
        on_event=on_event,
    )
    if result.signal is not None:
        raise KeyboardInterrupt
    return result


def run_until_interrupted(
    script: str | Path,
    *args: str,
    num_nodes: int,
    num_per_node: int,
    ranks: str | Iterable[int],
    steps: int,
    gpu: str,
    is_module: bool,
    checkpoints: str,
    data: bool,
    real: bool,
    on_event: OnEvent,
    instruments: Iterable[str] = INSTRUMENTS,
) -> RunResult:
    """As `run`, but an interruption ends the ranks and is a part of the result."""
    program = Program(os.fspath(script), args, is_module)
    program.check()
    cluster = Cluster(num_nodes, num_per_node)
    check_cluster(cluster, gpu=gpu, steps=steps, data=data, real=real)
    _check_checkpoints(checkpoints, real=real)
    names = tuple(instruments)
    runs_all_ranks = data or real  # all ranks run, and nothing is known of their memory
    text = ranks if isinstance(ranks, str) else ",".join(map(str, ranks))
    chosen = cluster.choose_ranks("all" if runs_all_ranks else "0" if text == ROLES else text)
    interruption = Interruption()
    with (
        interruption.watched(),
        tempfile.TemporaryDirectory(prefix="shardscope-run-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        request = Request(
            script=program.script,
            args=args,
            is_module=is_module,
            num_nodes=num_nodes,
            num_per_node=num_per_node,
            num_steps=steps,
            gpu=gpu,
            scratch=folder,
            jobs=_make_jobs(chosen, _without_memory(names) if runs_all_ranks else names),
            num_parallel=cluster.size if data else os.cpu_count() or 1,
            patience_s=PATIENCE_SECONDS,
            has_data=data,
            skips_checkpoints=checkpoints == "skip",
        )
        process = None if real else stack.enter_context(WarmProcess(interruption))
        if process is None:
            ended = _run_torchrun(request, interruption)
        else:
            ended = process.run(request, on_event)
        recording = join_jobs(folder, ended)
        if text == ROLES and recording is not None and process is not None and not data:
            others = [rank for rank in cluster.find_roles(recording) if rank]
            request = replace(request, jobs=_make_jobs(others, names), is_shown=False)
            ended += process.run(request, on_event)
            recording = join_jobs(folder, ended)
    if recording is not None:
        recording = replace(recording, run=replace(recording.run, command=program.command))
    return RunResult(recording, ended, interruption.signal)


def check_cluster(cluster: Cluster, *, gpu: str, steps: int, data: bool, real: bool) -> None:
    """Raise if a program cannot be run in this way."""
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


def _check_checkpoints(checkpoints: str, *, real: bool) -> None:
    if checkpoints not in CHECKPOINTS:
        raise LaunchError(f"checkpoints is {checkpoints!r}. Choose 'scratch' or 'skip'.")
    if real and checkpoints == "skip":
        raise LaunchError(
            "Checkpoints of real ranks cannot be skipped: these write their own files. Leave the "
            "option out, or run without --real."
        )


def _without_memory(instruments: tuple[str, ...]) -> tuple[str, ...]:
    """The instruments that real ranks can have: the CPU's memory is not that of a GPU."""
    if instruments == (_MEMORY,):
        raise LaunchError(
            "The memory of a GPU is estimated without data only: with --data and --real the CPU "
            "computes. Leave the option out."
        )
    return tuple(name for name in instruments if name != _MEMORY)


def _make_jobs(ranks: Iterable[int], instruments: Sequence[str]) -> tuple[Job, ...]:
    """A process for each rank, and one more for its memory."""
    unknown = [name for name in instruments if name not in (*INSTRUMENTS, COMPILE, COVERAGE)]
    if unknown or not instruments:
        raise LaunchError(
            f"The instruments are {', '.join(map(repr, unknown)) or 'none'}. Choose some of "
            f"{', '.join(INSTRUMENTS)}."
        )
    together = "+".join(name for name in instruments if name != _MEMORY)
    processes = [_MEMORY] * (_MEMORY in instruments) + [together] * bool(together)
    return tuple(Job(rank=rank, instrument=name) for rank in ranks for name in processes)


def _run_torchrun(request: Request, interruption: Interruption) -> list[JobEnded]:
    """Run real ranks; returns how each has ended."""
    file = Path(request.scratch, "request.json")
    file.write_bytes(msgspec.json.encode(request))
    module = "shardscope.launch.real_rank"
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={request.num_per_node}"]
    with subprocess.Popen([sys.executable, "-m", *launcher, "-m", module, str(file)]) as process:
        try:
            process.wait()
        except KeyboardInterrupt as interrupt:
            interruption.note(interrupt)
            process.terminate()  # torchrun ends its ranks
    return [_read_ending(request, job, interruption) for job in request.jobs]


def _read_ending(request: Request, job: Job, interruption: Interruption) -> JobEnded:
    path = Path(request.scratch, f"{job.stem}.ending.json")
    ending = msgspec.json.decode(path.read_bytes(), type=Ending) if path.exists() else None
    reason = Reason.INTERRUPTED if interruption.signal else None
    return JobEnded(job=job, ending=ending, reason=reason)


def join_jobs(folder: str, ended: Sequence[JobEnded]) -> Recording | None:
    """One recording of what all jobs recorded."""
    recordings: dict[str, list[Recording]] = defaultdict(list)
    for job_ended in ended:
        recording = load_job(folder, job_ended)
        if recording is not None:
            recordings[job_ended.job.instrument].append(recording)
    merged = [_merge_ranks(parts) for parts in recordings.values()]
    if not merged:
        return None
    return merge(merged) if len(merged) > 1 else merged[0]


def load_job(folder: str, ended: JobEnded) -> Recording | None:
    """What a job recorded; if its process died, what it had streamed until then."""
    stem = Path(folder, ended.job.stem)
    saved, stream = stem.with_suffix(".json"), stem / "trace.jsonl"
    if saved.exists():
        return load(saved)
    if ended.ending is not None or not stream.exists():
        return None
    try:
        recording = load(stream)
    except ShardscopeError:  # it died before it had described itself
        return None
    fact = "the process died before it could save its audit and the values that were made up"
    gap = Gap(place="audit", rank=ended.job.rank, fact=fact)
    return replace(recording, gaps=(*recording.gaps, gap))


def _merge_ranks(parts: list[Recording]) -> Recording:
    """Join the ranks of an instrument; what else it observed, such as compilation, may differ."""
    names = tuple(sorted({name for part in parts for name in part.run.instruments}))
    labelled = [replace(part, run=replace(part.run, instruments=names)) for part in parts]
    return merge(labelled) if len(labelled) > 1 else labelled[0]


def _without_consequences(ended: Sequence[JobEnded]) -> list[JobEnded]:
    """The jobs without those that failed because others had, unless that is all there is."""
    causes = [job for job in ended if job.ending is None or not job.ending.is_consequence]
    return causes if any(map(_explain, causes)) else list(ended)


def _explain(ended: JobEnded) -> str | None:
    """Why a job failed: what follows "Rank 0"; None if it did not fail."""
    ending, place = ended.ending, "" if ended.place is None else f" at {ended.place}"
    if ended.reason is Reason.WAITED and (ending is None or not ending.is_done):
        return (
            f"waited{place} for something that does not come, and was ended. Other ranks, servers "
            "and standard input are not there in a simulation."
        )
    if ended.reason is Reason.NOT_STARTED:
        return "was not started any more."
    if ended.reason is Reason.INTERRUPTED:
        return f"was interrupted{place}."
    if ending is None and ended.signal is not None:
        name = signal.Signals(ended.signal).name
        hint = " The machine may be out of memory." if ended.signal == signal.SIGKILL else ""
        return f"was ended by signal {ended.signal} ({name}){place}.{hint}"
    if ending is None:
        return f"died{place} before it could report."
    if ending.failure is not None:
        return ending.failure
    return None if ending.num_steps or ending.is_done else _explain_lack_of_steps(ending)


def _explain_lack_of_steps(ending: Ending) -> str:
    commands = "; ".join(ending.commands)
    if commands and not ending.num_calls:
        return (
            f"ended without a training step, but started other programs ({commands}), which do not "
            "run in the simulation. Give `shardscope run` the program that trains."
        )
    times = "once" if ending.num_calls == 1 else f"{ending.num_calls:,} times"
    fact = (
        f"called its model {times}, but took no training step"
        if ending.num_calls
        else "ended without calling a model"
    )
    return (
        f"{fact}: neither an optimizer's step() nor, without optimizers, an update of parameters. "
        "Check that the program's arguments make it train."
    )
