"""Where a verb's recording goes: the file that the user named, or one of our own naming."""

from __future__ import annotations

from pathlib import Path
from typing import final

from shardscope.cli.launch import is_launched, launched_rank, num_launched
from shardscope.cli.own_names import check_own_name, save_under_own_name
from shardscope.cli.target import name_target
from shardscope.comm.rank_stream import name_for_rank
from shardscope.errors import OutputError
from shardscope.record import Recording, check_output, save

__all__ = ["Destination", "check_rank_in_name"]


@final
class Destination:
    """A place that was found writable before any work was spent; `{rank}` becomes the rank."""

    def __init__(self, target: str, output: str | None, *, rank: int, force: bool) -> None:
        self._force = force
        self._path = _choose_path(output, rank)
        self._own_name = name_target(target) + (f"-{launched_rank()}" if is_launched() else "")
        if self._path is None:
            check_own_name(self._own_name)
        else:
            check_output(self._path, force=force)

    def save(self, recording: Recording) -> Path:
        """Write the recording there."""
        if self._path is None:
            return save_under_own_name(recording, self._own_name)
        return save(recording, self._path, force=self._force)


def _choose_path(output: str | None, rank: int) -> Path | None:
    if output is None:
        return None
    check_rank_in_name(output, example="-o run-{rank}.json.gz")
    return name_for_rank(output, launched_rank() if is_launched() else rank)


def check_rank_in_name(output: str, *, example: str) -> None:
    """Raise OutputError if several processes would write the same file."""
    if is_launched() and num_launched() > 1 and "{rank}" not in output:
        raise OutputError(
            f"all {num_launched()} processes would write '{output}'. Put {{rank}} into the "
            f"name, as in {example}, and each writes a file of its own."
        )
