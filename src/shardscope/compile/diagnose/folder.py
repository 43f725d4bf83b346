"""The folder that a diagnosis writes into, and nothing outside of it."""

from __future__ import annotations

import itertools
import shutil
from contextlib import suppress
from pathlib import Path
from typing import final

from shardscope.compile.diagnose.isolation.enclosure import Enclosure
from shardscope.errors import OutputError

__all__ = ["FIRST_LINE", "SAVED_NAME", "SCRIPT_NAME", "Folder"]

SCRIPT_NAME = "repro.py"
SAVED_NAME = "repro_inputs.pt"
"""The file beside the script with what is too big to be written into it."""
# Of each script: who has one that begins otherwise wrote it themselves.
FIRST_LINE = "# A bug that torch.compile shows, in a script that needs torch and nothing else."

_DEFAULT = "shardscope-diagnosis"
_SCRATCH = "scratch"


@final
class Folder:
    """Made when it is first needed. Only what was put there by us is ever removed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path or Path(_DEFAULT)
        self._is_ours = path is None or not path.exists()
        if path is not None:
            _check_free(path)
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


def _check_free(path: Path) -> None:
    """Refuse a folder in which a script would take the place of something that is not one."""
    name = next((one for one in (SCRIPT_NAME, SAVED_NAME) if (path / one).exists()), None)
    if name is None or _begins_as_ours(path / SCRIPT_NAME):
        return
    raise OutputError(
        f"The folder {path} has a {name} that no diagnosis wrote, which the repro would "
        "overwrite. Choose another folder."
    )


def _begins_as_ours(script: Path) -> bool:
    try:
        with script.open(encoding="utf-8", errors="replace") as file:
            return file.readline().rstrip() == FIRST_LINE
    except OSError:  # it is none, or not to be read
        return False


def _make_first_free(path: Path) -> Path:
    """Make this folder, or with the first number that makes it one that nobody has."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    for one in itertools.chain([path], numbered):
        with suppress(FileExistsError):  # somebody else's, perhaps since a moment
            one.mkdir()
            return one
    raise AssertionError("numbers do not end")
