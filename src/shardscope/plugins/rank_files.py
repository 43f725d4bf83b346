"""The files of a recorded step: one that each rank writes, and one of all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import final

from shardscope.record import check_output, save
from shardscope.record.files import name_for_rank
from shardscope.record.merge import merge_files

_ENDINGS = (".gz", ".json")
_MAX_MERGED = 64  # ranks; more take too long at the end of a training run
_PATIENCE_S = 5.0  # for ranks that have not written their file yet
_POLL_S = 0.1
_CLOCK_SKEW_S = 2.0  # between this machine and the one that has the folder


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
