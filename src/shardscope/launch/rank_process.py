"""What runs inside the process of a rank: the program, observed by one instrument."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, final
from unittest import mock

import msgspec
from msgspec.structs import replace
from torch import nn

from shardscope._torch.checkpoints import loaded_with_data, skipped_checkpoints
from shardscope.attribution.call_sites import read_stack
from shardscope.attribution.failures import describe_failure, find_line, suggest_remedy
from shardscope.launch.cluster import Cluster
from shardscope.launch.decision_log import DecisionLog
from shardscope.launch.decisions import DECISIONS
from shardscope.launch.evaluations import RepeatedEvaluations
from shardscope.launch.files import ScratchFiles, set_scratch_environment
from shardscope.launch.instrument import Instrument
from shardscope.launch.instruments import make_instrument
from shardscope.launch.lockstep import Lockstep
from shardscope.launch.program import Program, launched_in_place
from shardscope.launch.request import MAIL, Ending, Job, Request
from shardscope.launch.steps import EndOfRun, StepCounter, StepsDone
from shardscope.record import Gap, save
from shardscope.world.objects import Mailbox
from shardscope.world.simulate import launched_rank

__frames__ = "outermost"  # our callers are not the user's program

_END_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR1 + 2) - 2  # programs use SIGUSR1 and 2
_OWN_FILES = (
    "Each simulated rank has a scratch folder of its own: if another rank writes the file, create "
    "it before the run, or run rank 0."
)
_NO_WRITES = (
    "In a simulation, code that is not Python may write to the folder for temporary files only."
)
_UNOBSERVED = (
    "ended after its first step. It does not call what it trains as a module, so that only later "
    "steps can be observed. Give it at least two more steps to take."
)
_MAX_COMMANDS, _MAX_COMMAND = 3, 80  # and the number of characters of each
_LOST_RANK = re.compile(r"Connection (closed|reset) by peer|Broken pipe")  # what gloo raises


class RankSurroundings(Protocol):
    """What a program finds around it as a rank."""

    def find_gaps(self) -> Iterator[Gap]:
        """Where it differs from what the program would find in the cluster."""


@final
class ProgramRun:
    """Runs a program while it is observed, and saves what was recorded, however the program ends.

    Processes that the program forks inherit this object; their results do not count. With
    `evaluations`, the program runs on tensors without data, and its evaluations are shortened.
    """

    def __init__(
        self,
        request: Request,
        job: Job,
        program: Program,
        *,
        rank: RankSurroundings | None = None,
        evaluations: RepeatedEvaluations | None = None,
    ) -> None:
        self._request, self._job, self._rank = request, job, rank
        self._program = program
        self._evaluations = evaluations
        folder = Path(request.scratch, job.stem)
        folder.mkdir(exist_ok=True)
        self._stream = folder / "trace.jsonl"
        self._instrument = self._make_instrument()
        self._counter = StepCounter(
            request.num_steps,
            on_start=self._start,
            on_step=self._end_step,
            on_refusal=self._end_at_once,
        )
        self._is_observing = False
        self._owner = os.getpid()
        self._ending = threading.Lock()
        self._exit = os._exit
        self._commands: list[str] = []
        self._thread_failure: str | None = None
        sys.addaudithook(self._note_command)
        signal.signal(_END_SIGNAL, self._raise_end)

    def run(self) -> int:
        """Run the program to its end, to its last step or to its failure; returns the exit code."""
        failure: str | None = None
        error: BaseException | None = None
        code = 0
        try:
            with self._counter.watching(), self._reported_exits(), self._reported_threads():
                self._program.run(self._instrument.begin)
        except StepsDone:
            pass
        except EndOfRun as stop:
            error = stop
        except SystemExit as stop:
            code = _read_exit_code(stop)
            if code and isinstance(stop.__context__, Exception):  # as hydra does after an exception
                error, failure = stop.__context__, self._explain(stop.__context__)
            elif code:
                failure = f"called sys.exit({code}){_locate(find_line(stop))}."
        except BaseException as raised:  # noqa: BLE001 - a program may raise anything
            error, code = raised, 1
            if not self._is_done:
                traceback.print_exception(raised.with_traceback(_without_ours(raised)))
                failure = self._explain(raised)
        if self._is_in_fork:
            _flush()
            self._exit(code)
        self._finish(failure or self._thread_failure, error)
        return code

    def interrupt(self) -> None:
        """Called by another thread: end the program where it is."""
        signal.pthread_kill(threading.main_thread().ident or 0, _END_SIGNAL)

    def _raise_end(self, number: int, frame: FrameType | None) -> None:
        if not self._ending.locked() and not self._is_in_fork:
            raise EndOfRun("shardscope has ended the program")

    def _note_command(self, event: str, args: Sequence[Any]) -> None:
        if event == "subprocess.Popen" and len(self._commands) < _MAX_COMMANDS:
            command = args[1]
            words = [command] if isinstance(command, str | bytes) else command
            self._commands.append(shlex.join(os.fsdecode(word) for word in words)[:_MAX_COMMAND])

    @property
    def _is_in_fork(self) -> bool:
        """Whether this is a process that the program has forked, and whose results do not count."""
        return os.getpid() != self._owner

    @property
    def _is_done(self) -> bool:
        """Whether the program was asked to end; what it does then is no failure."""
        return self._counter.is_done or self._instrument.is_done

    def _make_instrument(self) -> Instrument:
        mail = str(Path(self._request.scratch, MAIL))
        address = self._request.lockstep
        return make_instrument(
            self._job.instrument,
            self._request.gpu,
            stream=self._stream,
            folder=mail,
            lockstep=Lockstep(address, self._job.rank) if address else None,
            log=self._make_log(),
            max_ops=self._request.max_ops,
            num_steps=self._request.num_steps,
        )

    def _make_log(self) -> DecisionLog | None:
        changes = self._request.changes
        if changes is None:
            return None
        group_inputs = self._request.group_inputs.get(self._job.rank, ())
        return DecisionLog(self._job.rank, changes, self._path(DECISIONS), group_inputs)

    def _start(self, models: list[nn.Module]) -> None:
        """Begin to observe; if called again, forget what was observed until then."""
        if self._is_observing and not self._instrument.is_from_start:
            self._instrument.stop(None)
            self._instrument = self._make_instrument()
        self._is_observing = True
        if self._evaluations is not None:
            self._evaluations.is_training = True
        self._instrument.start(models)
        if self._instrument.is_done:
            self._counter.end()

    def _end_step(self) -> None:
        self._instrument.end_step()
        if self._counter.num_steps >= self._request.num_steps:
            self._instrument.end_run()
        if not self._is_in_fork:
            _write(self._path("steps.json"), str(self._counter.num_steps).encode())
        if self._instrument.is_done:
            self._counter.end()

    def _end_at_once(self) -> NoReturn:
        """End a program that goes on after StepsDone was raised."""
        if not self._is_in_fork:
            self._finish(None, None)
        _flush()
        self._exit(0)

    def _finish(self, failure: str | None, error: BaseException | None) -> None:
        """Stop the instrument and save what it has recorded; only the first call does."""
        if not self._ending.acquire(blocking=False):
            return
        with contextlib.suppress(StepsDone):
            self._counter.finish()
        if self._is_done:
            failure = error = None
        elif self._counter.num_steps and not self._counter.has_started and error is None:
            failure = failure or _UNOBSERVED
        recording = self._instrument.stop(error)
        if recording is not None and self._rank is not None:
            recording = replace(recording, gaps=(*recording.gaps, *self._rank.find_gaps()))
        ending = Ending(
            num_steps=self._counter.num_steps,
            is_done=self._is_done,
            num_calls=self._counter.num_calls,
            commands=tuple(self._commands),
            failure=failure,
            is_consequence=_LOST_RANK.search(str(error)) is not None,
        )
        if recording is not None:
            save(recording, self._path("json"), force=True)
        _write(self._path("ending.json"), msgspec.json.encode(ending))

    def _path(self, ending: str) -> Path:
        return Path(self._request.scratch, f"{self._job.stem}.{ending}")

    def _explain(self, error: BaseException, how: str = "failed") -> str:
        is_simulated = self._evaluations is not None
        remedy = suggest_remedy(error, has_data=not is_simulated)
        if is_simulated and not remedy and "Permission denied" in str(error):
            remedy = _NO_WRITES
        if is_simulated and not remedy and self._job.rank and isinstance(error, FileNotFoundError):
            remedy = _OWN_FILES
        return f"{how}: {describe_failure(error)}.{' ' * bool(remedy)}{remedy}"

    @contextmanager
    def _reported_threads(self) -> Iterator[None]:
        """Note exceptions that end threads; the program goes on without them."""
        report = threading.excepthook

        def note(args: threading.ExceptHookArgs) -> None:
            error = args.exc_value
            if isinstance(error, StepsDone | EndOfRun):
                return
            if error is not None and self._thread_failure is None:
                self._thread_failure = self._explain(error, "failed in a thread")
            report(args)

        with mock.patch.object(threading, "excepthook", note):
            yield

    @contextmanager
    def _reported_exits(self) -> Iterator[None]:
        """Save the results before `os._exit` ends the process."""

        def report(status: int) -> None:
            if not self._is_in_fork:
                source = read_stack(sys._getframe(1)).source
                place = _locate(None if source is None else (source.file, source.line))
                self._finish(f"called os._exit({status}){place}." if status else None, None)
                _flush()
            self._exit(status)

        with mock.patch.object(os, "_exit", report):
            yield


def _write(path: Path, content: bytes) -> None:
    """Write a file that is read while this process goes on."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _locate(place: tuple[str, int | None] | None) -> str:
    return "" if place is None else f" ({place[0]}, line {place[1]})"


@final
class SimulatedRank:
    """The environment of a program that runs as one rank of a simulated cluster."""

    def __init__(self, request: Request, job: Job) -> None:
        self._cluster = Cluster(request.num_nodes, request.num_per_node)
        self._rank = job.rank
        self._gpu = request.gpu
        self._scratch = str(Path(request.scratch, job.stem))
        self._unchanged = request.scratch
        mail = Path(request.scratch, MAIL)
        lanes = request.lanes
        self._mailbox = Mailbox(mail, job.rank, *([] if lanes is None else [lanes.find_sender]))
        self._skips_checkpoints = request.skips_checkpoints
        self._reads: Counter[tuple[str, str, str]] = Counter()
        self._skips: Counter[tuple[str, str]] = Counter()
        self._kernels: Counter[tuple[str, str]] = Counter()
        self._joined = (job.rank, self._cluster.size)
        self.evaluations = RepeatedEvaluations()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Simulate the environment, the GPUs and the process groups until the context ends."""
        environment = dict(os.environ)
        os.environ.update(self._cluster.environment(self._rank))
        set_scratch_environment(self._scratch)
        contexts: tuple[AbstractContextManager[object], ...] = (
            launched_rank(
                self._rank,
                self._cluster.size,
                num_devices=self._cluster.num_per_node,
                gpu=self._gpu,
                mailbox=self._mailbox,
                on_join=self._note_rank,
                on_read=self._note_read,
                on_kernel=self._note_kernel,
            ),
            launched_in_place(self._rank % self._cluster.num_per_node),
            skipped_checkpoints(self._note_skip, skips_data=self._skips_checkpoints),
            loaded_with_data(),
            self.evaluations.repeated(),
            ScratchFiles(self._scratch, unchanged=self._unchanged).redirected(),
        )
        with ExitStack() as stack:
            stack.callback(set_environment, environment)
            for context in contexts:
                stack.enter_context(context)
            yield

    def find_gaps(self) -> Iterator[Gap]:
        """Where the simulation had to make something up, or left something out."""
        for (place, what, stand_in), count in self._reads.items():
            fact = (
                f"{what} read values that are not known in a simulation, {describe_times(count)}: "
            )
            yield Gap(place=place, rank=self._rank, fact=fact + stand_in)
        for (place, what), count in self._skips.items():
            fact = f"{what} was called {describe_times(count)}: tensors without data are not saved"
            yield Gap(place=place, rank=self._rank, fact=fact)
        for (place, what), count in self._kernels.items():
            fact = (
                f"the Triton kernel {what} was launched {describe_times(count)} and not run: what "
                "it computes or sends is not known"
            )
            yield Gap(place=place, rank=self._rank, fact=fact)
        yield from self.evaluations.find_gaps(self._rank)
        yield from explain_join(self._joined, (self._rank, self._cluster.size))

    def _note_rank(self, rank: int, size: int) -> None:
        self._joined = (rank, size)

    def _note_read(self, what: str, stand_in: str) -> None:
        self._reads[name_running_line("values"), what, stand_in] += 1

    def _note_kernel(self, name: str) -> None:
        self._kernels[name_running_line("kernels"), name] += 1

    def _note_skip(self, what: str) -> None:
        if not self._skips_checkpoints:  # otherwise the user knows
            self._skips[name_running_line("checkpoints"), what] += 1


def explain_join(joined: tuple[int, int], started: tuple[int, int]) -> Iterator[Gap]:
    """A gap if a program joined as another rank, or of another number, than it was started as."""
    if joined != started:
        fact = (
            f"the program joined as rank {joined[0]:,} of {joined[1]:,}, although it was started "
            f"as rank {started[0]:,} of {started[1]:,}"
        )
        yield Gap(place="world", rank=started[0], fact=fact)


def set_environment(variables: dict[str, str]) -> None:
    """Make `variables` the environment of this process."""
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # the folder that was read from the environment before


def name_running_line(otherwise: str) -> str:
    """The program's line that is running, as "train.py:3"."""
    source = read_stack(sys._getframe(2)).source
    return otherwise if source is None else f"{source.file}:{source.line}"


def _read_exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)  # as Python does
    return 1


def describe_times(count: int) -> str:
    """`once` or `3 times`."""
    return "once" if count == 1 else f"{count:,} times"


def _without_ours(error: BaseException) -> TracebackType | None:
    """The traceback from the program's first line on."""
    here = error.__traceback__
    while here is not None and "shardscope" in here.tb_frame.f_globals.get("__name__", ""):
        here = here.tb_next
    return here or error.__traceback__
