"""Finds the files that the user names: files, folders with all that is in them, and patterns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from glob import glob

from shardscope.errors import RecordingError
from shardscope.record.patterns import is_pattern

_MAX_FILES = 200_000
# Files of programs and checkpoints, which a folder of a run may also have.
_OTHERS = (
    ".py", ".pyc", ".so", ".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".distcp", ".npy",
    ".npz", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".md", ".sh", ".css", ".js", ".png", ".svg",
    ".zip", ".tar", ".whl", ".lock", ".csv", ".h5", ".arrow", ".metadata", ".tfevents", ".cu",
)  # fmt: skip
_FOLDERS = ("__pycache__", "node_modules", "site-packages", "checkpoints")


def list_files(names: Sequence[str]) -> tuple[list[str], set[str]]:
    """The files that names stand for, without duplicates, and those of them found in a folder.

    Args:
        names: Files, folders and patterns such as `dumps/*_rank_*`.

    Examples:
        >>> list_files(["dumps/"])
    """
    files: dict[str, None] = {}
    in_folders: set[str] = set()
    for name in names:
        if os.path.isdir(name):
            found = list(_walk(name))
            if not found:
                raise RecordingError(f"the folder '{name}' has no files that ranks leave behind.")
            in_folders.update(found)
        elif os.path.lexists(name):
            found = [name]
        elif is_pattern(name) or "?" in name:
            found = [file for file in sorted(glob(name, recursive=True)) if os.path.isfile(file)]
            if not found:
                raise RecordingError(f"no file matches '{name}'. Check the pattern.")
        else:
            raise RecordingError(f"there is no file '{name}'. Check the path.")
        files.update(dict.fromkeys(found))
        if len(files) > _MAX_FILES:
            raise RecordingError(
                f"'{name}' has more than {_MAX_FILES:,} files. Name the folder of one run."
            )
    return list(files), in_folders


def _walk(folder: str) -> Iterator[str]:
    """All files below a folder that may be of a run, in the order of their names."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in _FOLDERS
        )
        for name in sorted(names):
            file = os.path.join(path, name)
            plain = name.lower().removesuffix(".gz")
            if not name.startswith(".") and not plain.endswith(_OTHERS) and os.path.isfile(file):
                yield file
