"""The base class of the instruments that observe a launched program."""

from __future__ import annotations

from torch import nn

from shardscope.record import Recording


class Instrument:
    """Started at the first call of the model that is trained; stopped when the program ends.

    One that `is_from_start` observes the program from its first line on.
    """

    is_from_start = False
    _is_done = False

    @property
    def is_done(self) -> bool:
        """Whether it has nothing left to observe, so that the program can be ended."""
        return self._is_done

    def begin(self) -> None:
        """The program is about to be run."""

    def start(self, models: list[nn.Module]) -> None:
        """Begin to observe: `models`, mostly one, are about to be called for the first time."""

    def end_step(self) -> None:
        """A step has ended."""

    def end_run(self) -> None:
        """The program is asked to end, as it has taken all steps."""

    def stop(self, error: BaseException | None) -> Recording | None:
        """End, and return what was recorded; None if nothing was."""
        return None
