"""Training programs that follow `--`: the options of all commands that take one, and how they run.

A command with `@program_options(…)` gets a `LaunchedProgram` as its parameter `program`, or None if
the user gave a TARGET.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource
from rich.console import RenderableType

from shardscope.cli.console import exit_code, print_error, print_note, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.verb import PROGRAM
from shardscope.comm.findings import review
from shardscope.errors import TargetError
from shardscope.launch.api import CHECKPOINTS, GPU_NAMES, RunResult, run_until_interrupted
from shardscope.launch.program import Program
from shardscope.launch.request import Busy, Event, JobEnded, StepsEnded
from shardscope.record import MemoryProfile, Recording, Severity
from shardscope.record.text import sanitize_text

_OPTIONS = {
    "num_nodes": click.option(
        "--nnodes", "num_nodes", type=int, default=1, show_default=True, help="Number of nodes."
    ),
    "num_per_node": click.option(
        "--nproc-per-node",
        "num_per_node",
        type=int,
        default=8,
        show_default=True,
        help="Processes per node, each with a GPU of its own.",
    ),
    "ranks": click.option(
        "--ranks",
        default="0",
        show_default=True,
        metavar="RANKS",
        help="Ranks to run: 0,8-15, all, or roles (each pipeline stage, the last of each axis).",
    ),
    "steps": click.option(
        "--steps",
        type=int,
        default=2,
        show_default=True,
        help="Training steps after which the program is ended.",
    ),
    "checkpoints": click.option(
        "--checkpoints",
        type=click.Choice(CHECKPOINTS),
        default=CHECKPOINTS[0],
        show_default=True,
        help="Write the program's checkpoints to a scratch folder, or skip them.",
    ),
    "gpu": click.option(
        "--gpu",
        type=click.Choice(GPU_NAMES),
        default=GPU_NAMES[0],
        show_default=True,
        help="GPU to simulate.",
    ),
}
"""The options that describe the cluster of a program, by the names of their parameters."""

ProgramRenderer = Callable[[Recording], Sequence[RenderableType]]
"""What a command prints of the recording that it made of a program."""


@dataclass(frozen=True)
class LaunchedProgram:
    """A program with its arguments, and the cluster to run it on."""

    program: Program
    num_nodes: int = 1
    num_per_node: int = 8
    ranks: str = "0"
    steps: int = 2
    gpu: str = GPU_NAMES[0]
    checkpoints: str = CHECKPOINTS[0]

    @property
    def name(self) -> str:
        """`train` for both train.py and package.train."""
        return self.program.name

    def run(self, *, data: bool = False, real: bool = False, **options: Any) -> RunResult:
        """Run the program until it ends or is interrupted, and show its progress."""
        warned: set[int] = set()  # ranks: all their processes run the same program
        with show_progress(f"running {self.program.script}") as report:

            def on_event(event: Event) -> None:
                rank, instrument = event.job.rank, event.job.instrument
                if isinstance(event, StepsEnded):
                    report(f"rank {rank}, {instrument}: step {event.num_steps} of {self.steps}")
                elif isinstance(event, JobEnded):
                    report(f"rank {rank}, {instrument}: ended")
                elif rank not in warned:
                    warned.add(rank)
                    print_note(_warn_of_computation(event))

            return run_until_interrupted(
                self.program.script,
                *self.program.args,
                num_nodes=self.num_nodes,
                num_per_node=self.num_per_node,
                ranks=self.ranks,
                steps=self.steps,
                gpu=self.gpu,
                is_module=self.program.is_module,
                checkpoints=self.checkpoints,
                data=data,
                real=real,
                on_event=on_event,
                **options,
            )

    def observe(
        self,
        instrument: str,
        render: ProgramRenderer,
        *,
        output: str | None,
        force: bool,
        strict: bool,
        data: bool = False,
    ) -> int:
        """Run the program with one instrument, print and save what it records.

        Returns the exit code.
        """
        destination = Destination(self.name, output, force=force)
        result = self.run(instruments=(instrument,), data=data)
        code = 0
        if result.has_recording:
            recording = review(result.recording)
            destination.finish(recording, *render(recording))
            code = exit_code(recording, is_strict=strict)
        return print_failures(result) or code

    def suggest_next(self, recording: Recording, path: str) -> str:
        """The command that is most useful after a run whose recording was saved as `path`."""
        if any(map(_is_too_large, recording.memory)):
            return f"shardscope show {path} --view memory"
        if any(explanation.break_sites for explanation in recording.explanations):
            return self._command("explain")
        if any(finding.severity is not Severity.INFO for finding in recording.findings):
            return f"shardscope show {path} --view overview"
        return f"shardscope report {path}"

    def _command(self, verb: str) -> str:
        """The command line that runs the program on the same cluster with another verb."""
        defaults = LaunchedProgram(self.program)
        words = [
            word
            for option, name in (("--nnodes", "num_nodes"), ("--nproc-per-node", "num_per_node"))
            if getattr(self, name) != getattr(defaults, name)
            for word in (option, str(getattr(self, name)))
        ]
        return f"{shlex.join(['shardscope', verb, *words])} -- {self.program.command}"


def _is_too_large(profile: MemoryProfile) -> bool:
    needed, device = profile.needed_bytes, profile.device_bytes
    return needed is not None and device is not None and needed > device


def print_failures(result: RunResult) -> int:
    """Print why ranks failed, and what they printed if that was not shown.

    Returns the exit code: 2 if any failed, or that of a signal that has interrupted the run.
    """
    for output in result.hidden_outputs:
        click.echo("\n".join(map(sanitize_text, output.splitlines())), err=True)
    for failure in result.failures:
        print_error(failure)
    if result.signal is not None:
        return 128 + result.signal  # as a shell reports a program that a signal has ended
    return 2 if result.failures else 0


def _warn_of_computation(event: Busy) -> str:
    return (
        f"rank {event.job.rank} has computed for {event.seconds} s without a training "
        f"step, and is at {event.place}. Press Ctrl-C to end it; what was recorded is kept."
    )


def cluster_options(*names: str) -> Callable[[Any], Any]:
    """Add options that describe a program's cluster to a command."""

    def add(function: Any) -> Any:
        for name in reversed(names):
            function = _OPTIONS[name](function)
        return function

    return add


def program_options(
    *names: str, target_only: Iterable[str], target: str = "target"
) -> Callable[[Any], Any]:
    """Let a command take a program after `--` instead of its TARGET.

    Args:
        names: The options of the cluster that the command takes: keys of `_OPTIONS`.
        target_only: Parameters that have no meaning for a program.
        target: The parameter that the program replaces.
    """

    def add(function: Any) -> Any:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            ctx = click.get_current_context()
            program = _read_program(ctx, values, names, frozenset(target_only), target)
            for name in names:
                values.pop(name)
            return function(program=program, **values)

        return cluster_options(*names)(call)

    return add


def _read_program(
    ctx: click.Context,
    values: dict[str, Any],
    names: Sequence[str],
    target_only: frozenset[str],
    target: str,
) -> LaunchedProgram | None:
    words: tuple[str, ...] | None = ctx.meta.get(PROGRAM)
    verb = ctx.command_path.partition(" ")[2]
    if words is None:
        if not values[target]:
            parameter = next(param for param in ctx.command.params if param.name == target)
            raise click.MissingParameter(ctx=ctx, param=parameter)
        option = _find_option(ctx, names)
        if option is not None:
            raise TargetError(
                f"{option} describes the cluster of a program, and {verb} got a TARGET. Put -- "
                f"before the program: shardscope {verb} {option} … -- train.py."
            )
        return None
    if values[target]:
        text = values[target] if isinstance(values[target], str) else values[target][0]
        raise TargetError(
            f"{verb} got {text} before -- and the program {shlex.join(words)} after it. Give one "
            "of them."
        )
    option = _find_option(ctx, target_only)
    if option is not None:
        cluster = " and ".join(_name_option(ctx, name) for name in names[:2])
        raise TargetError(
            f"{option} is for a TARGET, and {verb} got a program after --. Leave it out; "
            f"{cluster} describe the cluster on which a program runs."
        )
    cluster_values = {name: values[name] for name in (*names, "steps") if name in values}
    return LaunchedProgram(read_program(words), **cluster_values)


def read_program(words: Sequence[str], *, is_module: bool = False) -> Program:
    """The program of `train.py --its args`, or of `-m package.module --its args`."""
    if words and words[0] == "-m":
        words, is_module = words[1:], True
    if not words:
        raise TargetError("No program follows --. Give one: -- train.py, or -- -m package.module.")
    return Program(words[0], tuple(words[1:]), is_module)


def _find_option(ctx: click.Context, names: Iterable[str]) -> str | None:
    """The first of these options that the user gave."""
    chosen = (
        name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    )
    return next((_name_option(ctx, name) for name in chosen), None)


def _name_option(ctx: click.Context, name: str) -> str:
    return next(option.opts[-1] for option in ctx.command.params if option.name == name)
