"""The command line in a terminal of 80 columns, as a person runs it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import shardscope

__all__ = ["run_in_terminal"]

_PATIENCE_S = 60.0


def run_in_terminal(
    *args: str, answer: tuple[str, str] | None = None, **variables: str
) -> tuple[int, str]:
    """The exit code, and all that was printed.

    `answer` is a text to wait for, and what to type once it is there.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "shardscope", *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=_surroundings() | variables,
    )
    os.close(slave)
    try:
        printed = _converse(master, answer)
        return process.wait(timeout=_PATIENCE_S), printed
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _surroundings() -> dict[str, str]:
    """Ours, less what would decide on colours, and with the package that is tested."""
    hidden = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    source = str(Path(shardscope.__file__).parents[1])
    return kept | {"TERM": "xterm-256color", "PYTHONPATH": source}


def _converse(master: int, answer: tuple[str, str] | None) -> str:
    printed, end = "", time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        if answer is not None and answer[0] in printed:
            os.write(master, answer[1].encode())
            answer = None
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other side has closed it
            break
        if not chunk:
            break
        printed += chunk.decode(errors="replace")
    return printed
