"""`trace(model)`: a context in which every collective is recorded, with who, when and why."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, final

from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch import autograd
from shardscope._torch.intercept import intercept
from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.private import require
from shardscope.comm.names import Models, ModuleNames
from shardscope.comm.rank_stream import name_for_rank
from shardscope.comm.spans import listening
from shardscope.comm.watch import Watch
from shardscope.errors import TorchVersionError, TraceError
from shardscope.record import Recording, save

__all__ = ["Trace", "trace"]


def trace(
    models: Models = None,
    *,
    mesh: DeviceMesh | None = None,
    stream: str | Path | None = None,
    force: bool = False,
) -> Trace:
    """Record every collective issued, and every phase timed, inside the context.

    >>> with trace(model) as t:
    ...     step()
    >>> t.recording

    `models` gives modules their names: a model, a list or dict of models, or nothing to name
    modules by the class of the outermost one called. `mesh` names axes that the parameters do not
    show. `stream` appends each event to a file as it happens, so that a killed rank leaves a
    recording; `{rank}` in the path becomes this rank, and is the process's number ("pid4242") until
    that is known. Entering again continues the recording.
    """
    return Trace(models, mesh=mesh, stream=stream, force=force)


@final
class Trace:
    """A trace: `recording` is what it saw, so far or in all."""

    def __init__(
        self, models: Models, *, mesh: DeviceMesh | None, stream: str | Path | None, force: bool
    ) -> None:
        self._names = ModuleNames(models)
        self._models = models  # names hold them weakly; they should live until the trace begins
        self._mesh = mesh
        self._stream = stream
        self._force = force
        self._depth = 0
        self._exit = ExitStack()
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        if self._depth == 0:
            watch = self._start()
            with ExitStack() as stack:
                _install(watch, stack)
                self._exit = stack.pop_all()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._depth != 1:  # within itself, or left once too often
            self._depth = max(0, self._depth - 1)
            return
        self._depth = 0
        self._exit.close()
        if self._watch is not None:
            self._watch.pause(error)

    @property
    def recording(self) -> Recording:
        """What was seen: so far while the trace runs, all of it afterwards."""
        return self._entered().recording()

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the recording to `path`, in which `{rank}` becomes this rank."""
        watch = self._entered()
        return save(watch.recording(), name_for_rank(path, watch.rank), force=force)

    def _entered(self) -> Watch:
        if self._watch is None:
            raise TraceError(
                "There is no recording yet, because the trace was not entered. "
                "Run the step inside the context: with trace(model) as t: step()"
            )
        return self._watch

    def _start(self) -> Watch:
        if self._watch is not None:
            self._watch.resume()
        else:
            self._watch = Watch(
                self._names, mesh=self._mesh, stream=self._stream, force=self._force
            )
            self._models = None
        return self._watch


def _install(watch: Watch, stack: ExitStack) -> None:
    """Watch until the stack is left; what this torch does not let us watch becomes a gap."""
    recorder = watch.recorder
    try:
        require(*autograd.NEEDED)  # they are called within the program's own calls
        stack.enter_context(recorder.calls.watching())
        stack.enter_context(watch_module_calls(recorder.calls))
    except TorchVersionError as error:
        recorder.report_gap("modules", f"which module runs is not known: {error}")

    def report_missing(sentence: str) -> None:
        recorder.report_gap("collectives", f"some are not seen: {sentence}", is_loss=True)

    stack.enter_context(intercept(recorder, report_missing=report_missing))
    stack.enter_context(listening(watch.spans, hear_begin=watch.spans.hear_begin))
