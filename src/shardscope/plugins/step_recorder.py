"""Records steps of a training run for every trainer's hooks, and never raises into the run.

`StepRecorder` records, `RankFiles` names and joins the files of all ranks, `make_callback` and
`never_raise` are what callbacks of trainers are made with.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict, TypeVar, final

from msgspec.structs import replace
from torch.optim import Optimizer

from shardscope.attribution.module_names import Models
from shardscope.attribution.program_records import read_identity
from shardscope.comm.trace import Trace, trace
from shardscope.comm.value_selection import Values
from shardscope.errors import PluginError, TraceError
from shardscope.plugins.live_memory import LiveMemory
from shardscope.plugins.trackers import log_everywhere, warn
from shardscope.record import Gap, Recording, check_output, save
from shardscope.record.files import name_for_rank
from shardscope.record.merge import merge_files

_log = logging.getLogger("shardscope")
_ENDINGS = (".gz", ".json")
_MAX_MERGED = 64  # ranks; more take too long at the end of a training run
_PATIENCE_S = 5.0  # for ranks that have not written their file yet
_POLL_S = 0.1
_CLOCK_SKEW_S = 2.0  # between this machine and the one that has the folder


class RecorderOptions(TypedDict, total=False):
    """Options of `StepRecorder` besides the step, which `observe` of every plugin passes on."""

    output: str | Path
    force: bool
    num_steps: int
    memory: bool
    log: bool
    values: Values


@final
class StepRecorder:
    """Records optimizer steps, counted from 1, once: `num_steps` of them from `step` on.

    Each rank writes a file when the last of them has ended. Rank 0 logs its recording to the
    trainer's experiment trackers, and joins the files of all ranks when training ends.
    """

    def __init__(
        self,
        step: int,
        output: str | Path = "shardscope.json.gz",
        *,
        force: bool = False,
        num_steps: int = 1,
        memory: bool = False,
        log: bool = True,
        values: Values = None,
    ) -> None:
        if not _is_positive(step):
            raise TraceError(
                f"The recorder of a step got step={step!r}, which is not a step: steps are counted "
                "from 1, the first optimizer step. Give step=1 or more."
            )
        if not _is_positive(num_steps):
            raise TraceError(
                f"The recorder of a step got num_steps={num_steps!r}, of which nothing can be "
                "recorded. Give num_steps=1 or more."
            )
        self.step = step
        self.loggers: Sequence[Any] = ()  # of the trainer, when it is known
        self.on_saved: Callable[[Path], None] | None = None
        self._last_step = step + num_steps - 1
        self._force = force
        self._files = RankFiles(output, force=force)
        self._logs = log
        self._values = values
        self._memory = LiveMemory() if memory else None
        self._trace: Trace | None = None
        self._saved: Recording | None = None
        self._is_entered = False
        self._is_done = False
        self._pid = os.getpid()

    @property
    def is_recording(self) -> bool:
        """Whether the step has begun and is not written yet."""
        return self._trace is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing more will be recorded."""
        return self._is_done

    def prepare(self) -> None:
        """Check when training begins, not at the step, that the file can be written."""
        if not self._is_done:
            self._files.check(*read_identity())

    def wants(self, num_done: int, *, num_next: int = 1) -> bool:
        """Whether one of the next `num_next` steps after `num_done` is to be recorded."""
        is_reached = self.step <= num_done + num_next
        return not self._is_done and is_reached and num_done < self._last_step

    def resume(self, models: Models) -> None:
        """Begin to record the step, or continue after `pause`."""
        if self._is_entered:
            return
        if self._trace is None:
            self._pid = os.getpid()
            self._trace = trace(models, values=self._values, step=self.step)
            if self._memory is not None:
                self._memory.begin(models)
        self._trace.__enter__()
        self._is_entered = True

    def pause(self, error: BaseException | None = None) -> None:
        """Stop recording until `resume`, where code runs that is not part of the step."""
        if self._is_entered and self._trace is not None:
            self._is_entered = False
            self._trace.__exit__(None if error is None else type(error), error, None)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, from a hook of it that runs before those of all optimizers."""
        if self._memory is not None:
            self._memory.note_optimizer(optimizer)

    def end_step(self, num_done: int, *gaps: Gap) -> None:
        """Pause after a step, and write the recording if `num_done` steps include the last."""
        self.pause()
        if num_done >= self._last_step:
            self.finish(*gaps)

    def finish(self, *gaps: Gap) -> None:
        """Write the recording; nothing more is recorded."""
        self.pause()
        traced, self._trace = self._trace, None
        if traced is None:
            return
        self._is_done = True
        if self._memory is not None:
            self._memory.end()
        recording = traced.recording
        if self._memory is not None:
            recording = self._memory.make_recording(recording)
        recording = replace(recording, gaps=(*recording.gaps, *gaps))
        rank, world_size = recording.run.ranks[0].first, recording.run.world_size
        path = save(recording, self._files.find_path(rank, world_size), force=self._force)
        self._saved = recording
        _log.info("step %d is in '%s'", self.step, path)
        if self.on_saved is not None:
            self.on_saved(path)
        if self._logs and rank == 0:
            log_everywhere(self.loggers, recording, self.step)

    def abandon(self, error: BaseException) -> None:
        """Write what was recorded of the step when training raised."""
        self.pause(error)
        self.finish()

    def close(self) -> None:
        """Write an unfinished recording when training is over, and join those of all ranks."""
        if os.getpid() != self._pid:  # a forked process is no trainer
            return
        if self.is_recording:
            fact = f"training ended during step {self.step}; this is what it had recorded by then"
            rank = read_identity()[0]
            self.finish(Gap(place="step", fact=fact, rank=rank))
        self._merge_ranks()

    def _merge_ranks(self) -> None:
        recording, self._saved = self._saved, None
        if recording is None or recording.run.is_simulated or self.on_saved is not None:
            return
        if recording.run.world_size > 1 and recording.run.ranks[0].first == 0:
            _log.info("step %d: %s", self.step, self._files.merge(recording.run.world_size))

    def warn_if_missed(self, num_done: int) -> None:
        """Warn if training ended after `num_done` steps without reaching the step."""
        if self._is_done or self.is_recording or read_identity()[0] != 0:
            return
        if os.getpid() != self._pid:  # a forked process is no trainer
            return
        warn(
            f"step {self.step} was not recorded, because training ended with step {num_done} "
            "before reaching it. Record an earlier step, or train longer."
        )

    def give_up(self, error: Exception) -> None:
        """Stop recording after an error of ours, and warn."""
        what = "is not recorded" if self._saved is None else "is recorded, but not merged"
        self._is_done = True
        try:
            self.pause()
            if self._memory is not None:
                self._memory.end()
        finally:
            self._trace = None
            reason = str(error) or type(error).__name__
            warn(f"step {self.step} {what}; training continues: {reason}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@final
class RankFiles:
    """Names, checks and joins the files of a recording.

    `{rank}` in `output` becomes the rank. With several ranks it is appended if it is not there:
    `step.json.gz` is then the file of all ranks, and `step-3.json.gz` that of rank 3.
    """

    def __init__(self, output: str | Path, *, force: bool) -> None:
        self._output = str(output)
        self._force = force
        self._since = time.time()

    def find_path(self, rank: int, world_size: int) -> Path:
        """The file of a rank."""
        path = self._output
        if world_size > 1 and "{rank}" not in path:
            stem, ending = _split_ending(path)
            path = f"{stem}-{{rank}}{ending}"
        return name_for_rank(path, rank)

    def check(self, rank: int, world_size: int) -> None:
        """Raise if the files that this rank will write exist, or cannot be written."""
        self._since = time.time()
        check_output(self.find_path(rank, world_size), force=self._force)
        if rank == 0 and 1 < world_size <= _MAX_MERGED:
            check_output(self.merged_path, force=self._force)

    @property
    def merged_path(self) -> Path:
        """The file of all ranks."""
        return Path(self._output.replace("{rank}", "all"))

    def merge(self, world_size: int) -> str:
        """Join the files of all ranks if they are in this folder; a sentence about the result."""
        paths = [self.find_path(rank, world_size) for rank in range(world_size)]
        if world_size > _MAX_MERGED:
            return f"{world_size:,} ranks are not merged by themselves. {self._describe_command()}"
        missing = self._wait_for(paths)
        if missing:
            return (
                f"the recordings of {world_size - len(missing):,} of {world_size:,} ranks are in "
                f"this folder; '{missing[0]}' is not. {self._describe_command()}"
            )
        path = save(merge_files(paths), self.merged_path, force=self._force)
        return f"all ranks are in '{path}'"

    def _wait_for(self, paths: list[Path]) -> list[Path]:
        """The files that do not appear within some seconds: ranks do not end at the same time."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            missing = [path for path in paths if not self._is_written(path)]
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(_POLL_S)

    def _is_written(self, path: Path) -> bool:
        """Whether the file was written in this run; with force=True there may be older files."""
        try:
            is_new = path.stat().st_mtime > self._since - _CLOCK_SKEW_S
        except OSError:
            return False
        return is_new or not self._force

    def _describe_command(self) -> str:
        stem, ending = _split_ending(self._output)
        is_named = "{rank}" in self._output
        pattern = self._output.replace("{rank}", "*") if is_named else f"{stem}-*{ending}"
        return (
            f"Copy them into one folder and run: shardscope merge {pattern} -o {self.merged_path}"
        )


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
