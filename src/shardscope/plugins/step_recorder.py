"""One step of a training loop that somebody else runs, recorded from the hooks it offers.

Hooks come in pairs that need not both come, and a step may be interrupted by validation: it is
recorded in stretches. What goes wrong here raises; `guest.py` keeps it from the training.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import final

from msgspec.structs import replace

from shardscope.comm.names import Models
from shardscope.comm.rank_stream import name_for_rank
from shardscope.comm.run import read_identity
from shardscope.comm.trace import Trace, trace
from shardscope.errors import TraceError
from shardscope.record import Gap, Recording, check_output, make_inert, save

__all__ = ["StepRecorder"]

_log = logging.getLogger("shardscope")
_ENDINGS = (".gz", ".json")


@final
class StepRecorder:
    """Records step `step`, counted from 1 as optimizer steps are, once."""

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
        """Training begins: say now, not at the step, if the file cannot be written."""
        if not self._is_done:
            check_output(self._path(), force=self._force)

    def wants(self, num_done: int, *, num_next: int = 1) -> bool:
        """Whether the step is among the `num_next` that follow the `num_done` before them."""
        return not self._is_done and num_done < self.step <= num_done + num_next

    def resume(self, models: Models) -> None:
        """The step begins, or goes on after `pause`."""
        if self._is_entered:
            return
        if self._trace is None:
            self._trace, self._pid = trace(models), os.getpid()
        self._trace.__enter__()
        self._is_entered = True

    def pause(self, error: BaseException | None = None) -> None:
        """The step ends, or something that is not part of it begins."""
        if self._is_entered and self._trace is not None:
            self._is_entered = False
            self._trace.__exit__(None if error is None else type(error), error, None)

    def finish(self, *gaps: Gap) -> None:
        """Write what was recorded; nothing more will be."""
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
        """Training raised: write the step as far as it came."""
        self.pause(error)
        self.finish()

    def close(self) -> None:
        """Training is over, whether or not it said so."""
        if self.is_recording and os.getpid() == self._pid:  # a forked process is no trainer
            fact = f"training ended during step {self.step}; this is what it had recorded by then"
            rank = read_identity()[0]
            self.finish(Gap(place="step", fact=fact, rank=rank))

    def tell_missed(self, num_done: int) -> None:
        """Training is over after so many steps: say so if the step was not among them."""
        if self._is_done or self.is_recording or read_identity()[0] != 0:
            return
        self.tell(
            f"step {self.step} was not recorded, because training ended with step {num_done} "
            "before reaching it. Record an earlier step, or train longer."
        )

    def give_up(self, error: Exception) -> None:
        """Something went wrong here: let go of the training, and say what it was."""
        self._is_done = True
        try:
            self.pause()
        finally:
            self._trace = None
            reason = str(error) or type(error).__name__
            self.tell(f"step {self.step} is not recorded; training continues: {reason}")

    def tell(self, sentence: str) -> None:
        """A warning that is never an error, whatever filters the program has."""
        sentence = make_inert(sentence)
        try:
            warnings.warn(f"shardscope: {sentence}", stacklevel=2)
        except Warning:
            print(f"shardscope: {sentence}", file=sys.stderr)

    def _path(self, recording: Recording | None = None) -> Path:
        """The file; of several ranks each has its own."""
        rank, world_size = read_identity()
        if recording is not None:
            rank, world_size = recording.run.ranks[0].first, recording.run.world_size
        path = str(self._output)
        if world_size > 1 and "{rank}" not in path:
            stem, ending = _split_ending(path)
            path = f"{stem}-{{rank}}{ending}"
        return name_for_rank(path, rank)


def _split_ending(path: str) -> tuple[str, str]:
    """`run.json.gz` is `run` and `.json.gz`."""
    stem = path
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    return stem, path[len(stem) :]
