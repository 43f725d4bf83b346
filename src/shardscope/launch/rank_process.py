"""What runs inside the process of a rank: the program, observed by one instrument."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import final

import msgspec
from torch import nn

from shardscope._torch.checkpoints import loaded_with_data, skipped_checkpoints
from shardscope.attribution.call_sites import read_stack
from shardscope.attribution.failures import describe_failure, suggest_remedy
from shardscope.launch.cluster import Cluster
from shardscope.launch.evaluations import RepeatedEvaluations
from shardscope.launch.files import ScratchFiles, set_scratch_environment
from shardscope.launch.instruments import Instrument
from shardscope.launch.program import Program, spawned_in_place
from shardscope.launch.request import MAIL, Ending, Job, Request
from shardscope.launch.steps import StepCounter, StepsDone
from shardscope.record import Gap, Recording, save
from shardscope.world.objects import Mailbox
from shardscope.world.simulate import launched_rank

__frames__ = "outermost"  # our callers are not the user's program

_LOST_RANK = re.compile(r"Connection (closed|reset) by peer|Broken pipe")  # what gloo raises


def run_program(
    program: Program,
    num_steps: int,
    instrument: Instrument,
    *,
    is_simulated: bool,
    evaluations: RepeatedEvaluations | None = None,
) -> tuple[Ending, Recording | None]:
    """Run a program to its end, to its last step or to its failure, while it is observed.

    `evaluations` shortens evaluations on tensors without data.
    """

    def start(models: list[nn.Module]) -> None:
        if evaluations is not None:
            evaluations.is_training = True
        instrument.start(models)
        if instrument.is_done:
            raise StepsDone

    counter = StepCounter(num_steps, on_start=start, on_step=instrument.end_step)
    code: int | None = None
    error: BaseException | None = None
    try:
        with counter.watching():
            program.run()
    except StepsDone:
        pass
    except SystemExit as stop:
        code = _read_exit_code(stop)
        if code and isinstance(stop.__context__, Exception):  # as hydra does after an exception
            error = stop.__context__
    except BaseException as raised:  # noqa: BLE001 - a program may raise anything
        traceback.print_exception(raised.with_traceback(_without_ours(raised)))
        error = raised
    with suppress(StepsDone):
        counter.finish()
    recording = instrument.stop(error)
    failure = None if error is None else _explain(error, is_simulated=is_simulated)
    if error is None and counter.num_steps and not counter.has_started:
        failure = (
            "The program ended after its first step. It does not call what it trains as a module, "
            "so that only later steps can be observed. Give it at least two more steps to take."
        )
    ending = Ending(
        num_steps=counter.num_steps,
        is_observed=instrument.is_done,
        failure=failure,
        exit_code=code,
        is_interrupted=isinstance(error, KeyboardInterrupt),
        is_consequence=_LOST_RANK.search(str(error)) is not None,
    )
    return ending, recording


def save_results(request: Request, job: Job, ending: Ending, recording: Recording | None) -> None:
    """Write the result of a job to the scratch folder."""
    if recording is not None:
        save(recording, Path(request.scratch, f"{job.stem}.json"), force=True)
    Path(request.scratch, f"{job.stem}.ending.json").write_bytes(msgspec.json.encode(ending))


@final
class SimulatedRank:
    """The surroundings of a program that runs as one rank of a cluster that is not there."""

    def __init__(self, request: Request, job: Job) -> None:
        self._cluster = Cluster(request.num_nodes, request.num_per_node)
        self._rank = job.rank
        self._gpu = request.gpu
        self._scratch = str(Path(request.scratch, job.stem))
        self._mail = str(Path(request.scratch, MAIL))
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
                mailbox=Mailbox(self._mail, self._rank),
                on_join=self._note_rank,
                on_read=self._note_read,
                on_kernel=self._note_kernel,
            ),
            spawned_in_place(self._rank % self._cluster.num_per_node),
            skipped_checkpoints(self._note_skip),
            loaded_with_data(),
            self.evaluations.repeated(),
            ScratchFiles(self._scratch, unchanged=self._mail).redirected(),
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
        self._reads[find_line("values"), what, stand_in] += 1

    def _note_kernel(self, name: str) -> None:
        self._kernels[find_line("kernels"), name] += 1

    def _note_skip(self, what: str) -> None:
        self._skips[find_line("checkpoints"), what] += 1


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


def find_line(otherwise: str) -> str:
    """The program's line that is running."""
    source = read_stack(sys._getframe(2)).source
    return otherwise if source is None else f"{source.file}:{source.line}"


def _read_exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)  # as Python does
    return 1


def _explain(error: BaseException, *, is_simulated: bool) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "The program was interrupted."
    remedy = suggest_remedy(error, has_data=not is_simulated)
    return f"{describe_failure(error)}.{' ' * bool(remedy)}{remedy}"


def describe_times(count: int) -> str:
    """`once` or `3 times`."""
    return "once" if count == 1 else f"{count:,} times"


def _without_ours(error: BaseException) -> TracebackType | None:
    """The traceback from the program's first line on."""
    here = error.__traceback__
    while here is not None and "shardscope" in here.tb_frame.f_globals.get("__name__", ""):
        here = here.tb_next
    return here or error.__traceback__
