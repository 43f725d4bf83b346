"""The process as the user's program expects to find it, had it been started by itself."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from shardscope.record import Recording

__all__ = ["as_if_started", "name_command"]


def name_command(recording: Recording) -> Recording:
    """The recording, which says how shardscope was started and not what the program was told."""
    command = shlex.join(["shardscope", *sys.argv[1:]])
    return replace(recording, run=replace(recording.run, command=command))


@contextmanager
def as_if_started(target: str) -> Iterator[None]:
    """Give the program a `sys.argv` of its own; what it does to that and `sys.path` is undone."""
    # Our options are not the program's: its argparse would refuse them and exit.
    argv, path = sys.argv, sys.path[:]
    sys.argv = [target]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
