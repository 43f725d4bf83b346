"""Shared by the trainer callbacks: records one step, and never raises into the training loop."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, final

from msgspec.structs import replace

from shardscope.attribution.module_names import Models
from shardscope.attribution.program_records import read_identity
from shardscope.comm.trace import Trace, trace
from shardscope.errors import PluginError, TraceError
from shardscope.record import Gap, Recording, check_output, sanitize_text, save
from shardscope.record.files import name_for_rank

_log = logging.getLogger("shardscope")
_ENDINGS = (".gz", ".json")


@final
class StepRecorder:
    """Records the optimizer step `step`, counted from 1, once."""

    def __init__(self, step: int, output: str | Path, *, force: bool) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise TraceError(
                f"ShardscopeCallback got step={step!r}, which is not a step: steps are counted "
                "from 1, the first optimizer step. Give step=1 or more."
            )
        self.step = step
        self._output = Path(output)
        self._force = force
        self._trace: Trace | None = None
        self._is_entered = False
        self._is_done = False
        self._pid = os.getpid()

    @property
    def is_recording(self) -> bool:
        """Whether the step has begun and is not written yet."""
        return self._trace is not None

    def prepare(self) -> None:
        """Check when training begins, not at the step, that the file can be written."""
        if not self._is_done:
            check_output(self._path(), force=self._force)

    def wants(self, num_done: int, *, num_next: int = 1) -> bool:
        """Whether the step is among the next `num_next` after `num_done` steps."""
        return not self._is_done and num_done < self.step <= num_done + num_next

    def resume(self, models: Models) -> None:
        """Begin to record the step, or continue after `pause`."""
        if self._is_entered:
            return
        if self._trace is None:
            self._trace, self._pid = trace(models), os.getpid()
        self._trace.__enter__()
        self._is_entered = True

    def pause(self, error: BaseException | None = None) -> None:
        """Stop recording until `resume`, where code runs that is not part of the step."""
        if self._is_entered and self._trace is not None:
            self._is_entered = False
            self._trace.__exit__(None if error is None else type(error), error, None)

    def finish(self, *gaps: Gap) -> None:
        """Write the recording; nothing more is recorded."""
        self.pause()
        traced, self._trace = self._trace, None
        if traced is None:
            return
        self._is_done = True
        recording = traced.recording
        recording = replace(recording, gaps=(*recording.gaps, *gaps))
        path = save(recording, self._path(recording), force=self._force)
        _log.info("step %d is in '%s'", self.step, path)

    def abandon(self, error: BaseException) -> None:
        """Write what was recorded of the step when training raised."""
        self.pause(error)
        self.finish()

    def close(self) -> None:
        """Write an unfinished recording when training is over."""
        if self.is_recording and os.getpid() == self._pid:  # a forked process is no trainer
            fact = f"training ended during step {self.step}; this is what it had recorded by then"
            rank = read_identity()[0]
            self.finish(Gap(place="step", fact=fact, rank=rank))

    def warn_if_missed(self, num_done: int) -> None:
        """Warn if training ended after `num_done` steps without reaching the step."""
        if self._is_done or self.is_recording or read_identity()[0] != 0:
            return
        self.warn(
            f"step {self.step} was not recorded, because training ended with step {num_done} "
            "before reaching it. Record an earlier step, or train longer."
        )

    def give_up(self, error: Exception) -> None:
        """Stop recording after an error of ours, and warn."""
        self._is_done = True
        try:
            self.pause()
        finally:
            self._trace = None
            reason = str(error) or type(error).__name__
            self.warn(f"step {self.step} is not recorded; training continues: {reason}")

    def warn(self, sentence: str) -> None:
        """Issue a warning that never raises, whatever warning filters the program has."""
        sentence = sanitize_text(sentence)
        try:
            warnings.warn(f"shardscope: {sentence}", stacklevel=2)
        except Warning:
            print(f"shardscope: {sentence}", file=sys.stderr)

    def _path(self, recording: Recording | None = None) -> Path:
        """The file of this rank."""
        rank, world_size = read_identity()
        if recording is not None:
            rank, world_size = recording.run.ranks[0].first, recording.run.world_size
        path = str(self._output)
        if world_size > 1 and "{rank}" not in path:
            stem, ending = _split_ending(path)
            path = f"{stem}-{{rank}}{ending}"
        return name_for_rank(path, rank)


def _split_ending(path: str) -> tuple[str, str]:
    """Split a file name: `run.json.gz` gives `run` and `.json.gz`."""
    stem = path
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    return stem, path[len(stem) :]


CallbackT = TypeVar("CallbackT")
HookT = TypeVar("HookT", bound=Callable[..., None])


def make_callback(
    cls: type[CallbackT], module_names: Sequence[str], name: str, *, package: str
) -> CallbackT:
    """An uninitialized object of a subclass of `cls` and of the trainer's callback class."""
    bases = find_bases(module_names, name, package=package)
    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    callback: object = object.__new__(type(cls.__name__, (cls, *bases), attributes))
    assert isinstance(callback, cls)
    return callback


def find_bases(module_names: Sequence[str], name: str, *, package: str) -> tuple[type, ...]:
    """The class `name` of each listed module that is imported, else of the first importable one.

    Lightning exists under two names. A callback that inherits from both works with either.
    """
    loaded = [module_name for module_name in module_names if module_name in sys.modules]
    for module_name in () if loaded else module_names:
        if find_spec(module_name.split(".")[0]) is not None:
            loaded = [import_module(module_name).__name__]
            break
    if not loaded:
        raise PluginError(
            f"ShardscopeCallback needs {package}, which is not installed here. "
            f"Install it: pip install {module_names[0].split('.')[0]}"
        )
    return tuple(getattr(sys.modules[module_name], name) for module_name in loaded)


def never_raise(hook: HookT) -> HookT:
    """Wrap a hook of an object with a `recorder` so that its exceptions become warnings."""

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - recording must not end the training
            with suppress(Exception):
                self.recorder.give_up(error)

    return call  # type: ignore[return-value]


def close_quietly(recorder: StepRecorder) -> None:
    """Write an unfinished recording when a callback is garbage-collected."""
    try:
        recorder.close()
    except Exception as error:  # noqa: BLE001 - there is no caller to raise to
        with suppress(Exception):
            recorder.give_up(error)
