"""Runs a step of a program under `trace`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardscope.cli.build_model import (
    BuiltModel,
    Report,
    build_model,
    choose_device,
    explain_failure,
)
from shardscope.cli.target import Program
from shardscope.comm.trace import Trace, trace
from shardscope.errors import OutputError
from shardscope.record import Recording

__frames__ = "outermost"  # our callers are not the user's program


@dataclass(frozen=True)
class TracedStep:
    """What came of a step: its recording, and, if the program failed, how, in a sentence."""

    recording: Recording
    failure: str | None = None
    error: BaseException | None = None


def trace_step(
    program: Program,
    axes: Mapping[str, int] | None,
    *,
    rank: int,
    is_real: bool | None = None,
    has_data: bool = False,
    device: str | None = None,
    stream: str | None = None,
    force: bool = False,
    report: Report = lambda _: None,
) -> TracedStep:
    """Run a step as the rank that this process was started as, or in a simulated world.

    With `stream`, each collective is also written to that file before it is issued.
    """
    with build_model(
        program,
        axes,
        rank=rank,
        is_real=is_real,
        has_data=has_data,
        device=choose_device(device, has_data=has_data),
        report=report,
    ) as built:
        return _run(built, trace(built.model, mesh=built.mesh, stream=stream, force=force), report)


def _run(built: BuiltModel, traced: Trace, report: Report) -> TracedStep:
    program, model = built.program, built.model
    batch = built.make_batch()
    report("running a step")
    try:
        with traced:
            program.step(model, batch)
    except OutputError:
        raise  # the stream cannot be written, which is not the program's failure
    except KeyboardInterrupt as error:
        return TracedStep(traced.recording, "interrupted", error)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything, and sys.exit()
        failure = explain_failure(program, "step()", error, has_data=built.has_data)
        return TracedStep(traced.recording, failure, error)
    return TracedStep(traced.recording)
