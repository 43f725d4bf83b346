"""Standard output, which may be closed, full, or left by its reader."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardscope.errors import OutputError

__all__ = ["explain_stdout", "silence_stdout", "writing_out"]


@contextmanager
def writing_out() -> Iterator[None]:
    """A sentence for whatever standard output refuses; a reader that leaves is no error."""
    if sys.stdout is None:
        raise OutputError(explain_stdout("it is closed"))
    try:
        yield
        sys.stdout.flush()  # here, and not when Python ends
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        silence_stdout()
        raise OutputError(explain_stdout(error.strerror or str(error))) from error


def explain_stdout(reason: str) -> str:
    """One sentence on a standard output that cannot be used."""
    return (
        f"standard output cannot be written: {reason}. "
        f"Send it to a place that has room, or to /dev/null."
    )


def silence_stdout() -> None:
    """Let what is still to be written go nowhere: Python would complain when it flushes at exit."""
    with suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
