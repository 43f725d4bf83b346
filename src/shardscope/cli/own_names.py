"""Names for recordings whose user gave none: each run gets one that no file has yet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

from shardscope.errors import OutputError
from shardscope.record import Recording, check_output, save

__all__ = ["check_own_name", "save_under_own_name"]

_ENDING = ".shardscope.json.gz"


def check_own_name(stem: str) -> None:
    """Raise OutputError if nothing can be written here, before work is spent on it."""
    check_output(next(_unused_names(stem)))


def save_under_own_name(recording: Recording, stem: str) -> Path:
    """Save under a free name; another run may take the one we saw free meanwhile."""
    for name in _unused_names(stem):
        try:
            return save(recording, name)
        except OutputError:
            if not os.path.lexists(name):
                raise
    raise AssertionError("there is always another name")


def _unused_names(stem: str) -> Iterator[str]:
    stems = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return (name for name in (one + _ENDING for one in stems) if not os.path.lexists(name))
