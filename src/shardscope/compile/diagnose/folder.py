"""The folder that a diagnosis writes into, and nothing outside of it."""

from __future__ import annotations

import itertools
import shutil
from contextlib import suppress
from pathlib import Path
from typing import final

from shardscope.compile.diagnose.isolation.enclosure import Enclosure
from shardscope.errors import OutputError

__all__ = ["Folder"]

_DEFAULT = "shardscope-diagnosis"
_SCRATCH = "scratch"


@final
class Folder:
    """Made when it is first needed. Only what was put there by us is ever removed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path or Path(_DEFAULT)
        self._is_ours = path is None or not path.exists()
        try:
            if path is None:
                self.path = _make_first_free(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self.scratch = _make_first_free(self.path / _SCRATCH)
            self.enclosure = Enclosure(self.scratch)
        except OSError as error:
            raise OutputError(
                f"The folder {self.path} for the repro cannot be written to "
                f"({error.strerror or error}). Name another one."
            ) from error

    def tidy(self) -> None:
        """Remove what only the search needed, and the folder if there is nothing to be kept."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self._is_ours:
            with suppress(OSError):  # it is not empty
                self.path.rmdir()


def _make_first_free(path: Path) -> Path:
    """Make this folder, or with the first number that makes it one that nobody has."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    for one in itertools.chain([path], numbered):
        with suppress(FileExistsError):  # somebody else's, perhaps since a moment
            one.mkdir()
            return one
    raise AssertionError("numbers do not end")
