"""`trace(model)`: a context that records every collective with its module, phase and cause."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, final

from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch import autograd
from shardscope._torch.collectives.hooks import intercept
from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.private import explain_moved_names, moved_names_explained, require
from shardscope.attribution.module_names import Models, ModuleNames
from shardscope.attribution.spans import subscribe
from shardscope.comm.trace_session import TraceSession
from shardscope.comm.value_selection import Values, ValueSamples, read_samples
from shardscope.errors import TorchVersionError, TraceError
from shardscope.record import Collective, Group, Recording, save
from shardscope.record.files import name_for_rank


@explain_moved_names
def trace(
    models: Models = None,
    *,
    mesh: DeviceMesh | None = None,
    stream: str | Path | None = None,
    force: bool = False,
    values: Values = None,
    step: int = 1,
    stream_bytes: int | None = None,
) -> Trace:
    """Record every collective that is issued, and every phase that is timed, inside the context.

    Works on a real process group and in a simulated world, compiled or not. Entering the same trace
    again continues its recording.

    With `stream` and `stream_bytes` it can be left on for an entire training run: each collective
    takes some microseconds, and the memory and the file that it takes do not grow.

    Args:
        models: A model, or a list or dict of models, whose modules get their names from it. Without
            one, modules are named after the class of the outermost module called.
        mesh: A device mesh whose axis names cannot be derived from the parameters.
        stream: A file to which each event is appended as it happens, so that a killed rank leaves a
            recording. `{rank}` in the path becomes this rank; until the rank is known it is the
            process ("pid4242").
        force: Overwrite a stream that exists.
        values: Training steps of which values are sampled, for `compare_runs`: True for all, a step
            counted from 1, several steps such as `range(1, 11)`, or `ValueSamples`.
        step: The number of the training step that the trace begins with. The next begins when the
            model is called after an optimizer has stepped.
        stream_bytes: Keep only the newest lines of the stream, so many bytes at most, and no
            records in memory. What was dropped is counted. What describes the modules and groups
            is kept besides.

    Examples:
        >>> with trace(model) as t:
        ...     model(batch).sum().backward()
        >>> t.recording.collectives[0].owner

        >>> with trace(model, stream="run-{rank}.jsonl", force=True, stream_bytes=64 << 20):
        ...     train()
    """
    samples = read_samples(values)
    if stream_bytes is not None:
        _check_limit(stream, stream_bytes)
    return Trace(
        models,
        mesh=mesh,
        stream=stream,
        force=force,
        samples=samples,
        step=step,
        stream_bytes=stream_bytes,
    )


_MIN_STREAM_BYTES = 64 * 1024


def _check_limit(stream: str | Path | None, stream_bytes: int) -> None:
    if stream is None:
        raise TraceError(
            "trace() got stream_bytes, but no stream. Name a file, too: "
            'trace(model, stream="run-{rank}.jsonl", stream_bytes=…).'
        )
    is_integer = isinstance(stream_bytes, int) and not isinstance(stream_bytes, bool)
    if not is_integer or stream_bytes < _MIN_STREAM_BYTES:
        raise TraceError(
            f"trace() got stream_bytes={stream_bytes!r:.60}, which cannot be the size of a stream. "
            f"Give {_MIN_STREAM_BYTES:,} bytes or more; 64 << 20 is room for half a million "
            "collectives."
        )


@final
class Trace:
    """What `trace` returns; `recording` is what it has recorded so far.

    Examples:
        >>> with trace(model) as t:
        ...     step()
        >>> t.save("step.json.gz")
    """

    def __init__(
        self,
        models: Models,
        *,
        mesh: DeviceMesh | None,
        stream: str | Path | None,
        force: bool,
        samples: ValueSamples | None = None,
        step: int = 1,
        stream_bytes: int | None = None,
    ) -> None:
        self._names = ModuleNames(models)
        self._samples = samples
        self._step = step
        self._models = models  # alive until the trace starts: names are weak references
        self._mesh = mesh
        self._stream = stream
        self._stream_bytes = stream_bytes
        self._force = force
        self._depth = 0
        self._exit = ExitStack()
        self._session: TraceSession | None = None

    def __repr__(self) -> str:
        if self._session is None:
            return "Trace(not entered)"
        return f"Trace({self.recording!r})"

    def _repr_html_(self) -> str | None:
        """The page of the recording, for notebooks; None before the trace is entered."""
        return None if self._session is None else self.recording._repr_html_()

    def __enter__(self) -> Self:
        if self._depth == 0:
            if self._session is not None:
                self._session.resume()
            else:
                self._session = TraceSession(
                    self._names,
                    mesh=self._mesh,
                    stream=self._stream,
                    force=self._force,
                    samples=self._samples,
                    step=self._step,
                    stream_bytes=self._stream_bytes,
                )
                self._models = None
            with ExitStack() as stack:
                _install(self._session, stack)
                self._exit = stack.pop_all()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._depth != 1:  # entered more than once, or exited too often
            self._depth = max(0, self._depth - 1)
            return
        self._depth = 0
        self._exit.close()
        if self._session is not None:
            self._session.pause(error)

    @property
    def recording(self) -> Recording:
        """The recording: of the trace so far while it runs, of all of it afterwards."""
        return self._entered().recording()

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the recording to a file.

        Args:
            path: The file; `{rank}` becomes this rank. Gzip-compressed if the name ends in `.gz`.
            force: Overwrite a file that exists.

        Examples:
            >>> t.save("step-{rank}.json.gz", force=True)
        """
        session = self._entered()
        return save(session.recording(), name_for_rank(path, session.rank), force=force)

    def list_from(self, first: int) -> tuple[tuple[Group, ...], list[Collective]]:
        """The groups, and the collectives from number `first` on, that were recorded so far.

        Cheaper than `recording`, for observers that follow a run.
        """
        recorder = self._entered().recorder
        return recorder.groups.groups, recorder.collectives[first:]

    def _entered(self) -> TraceSession:
        if self._session is None:
            raise TraceError(
                "There is no recording yet, because the trace was not entered. "
                "Run the step inside the context: with trace(model) as t: step()"
            )
        return self._session


def _install(session: TraceSession, stack: ExitStack) -> None:
    """Install all hooks on the exit stack; hooks that this torch lacks are reported as gaps."""
    recorder = session.recorder
    try:
        with moved_names_explained():
            require(*autograd.NEEDED)  # now: they are called inside the user's calls
            stack.enter_context(recorder.calls.marking_threads())
            stack.enter_context(watch_module_calls(recorder.calls))
    except TorchVersionError as error:
        recorder.report_gap("modules", f"which module runs is not known: {error}")

    def report_missing(sentence: str) -> None:
        recorder.report_gap("collectives", f"some are not recorded: {sentence}", is_loss=True)

    stack.enter_context(intercept(recorder, report_missing=report_missing))
    stack.enter_context(subscribe(session.spans, on_span_begin=session.spans.on_span_begin))
    if session.values is not None:
        stack.enter_context(session.values.watching())
