"""Trees of processes: what a program starts is found, measured and ended with it.

A program may start processes in sessions of their own, which no signal to its process group
reaches. They are found by their parents instead, in /proc; without that, only the group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from collections.abc import Collection
from multiprocessing import resource_tracker
from pathlib import Path
from typing import final

_PR_SET_CHILD_SUBREAPER = 36
_STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 1) - 1  # programs use SIGUSR1 and 2
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_FOREIGN = ("site-packages", "dist-packages", "/lib/python", "<frozen", _OURS)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end, where Linux can do that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_tree(pid: int) -> None:
    """End a process and everything that it has started."""
    while True:
        pids = [pid, *list_descendants(pid)]
        for member in reversed(pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        if len(pids) == 1:
            break
        if not any(map(_is_alive, pids)):
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_children(apart_from: Collection[int] = ()) -> None:
    """End all children of this process but some, with what they have started."""
    for pid in [pid for pid in _read_children().get(os.getpid(), ()) if pid not in apart_from]:
        end_tree(pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def end_helpers() -> None:
    """End what the program has left behind; Python's resource tracker then removes its files."""
    tracker = resource_tracker._resource_tracker
    end_children(apart_from=[pid for pid in (tracker._pid,) if pid is not None])  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):
        tracker._stop()  # type: ignore[attr-defined]


def read_cpu_seconds(pid: int) -> float:
    """The processor time of a process, its descendants and those that have ended before."""
    ticks = 0
    for member in (pid, *list_descendants(pid)):
        fields = _read_stat(member)
        ticks += sum(map(int, fields[11:15])) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


@final
class StackFile:
    """The file to which a process writes its stack, when it is asked or when it crashes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> None:
        """Write the stack of this process to the file when needed."""
        file = self._path.open("w")
        faulthandler.enable(file=file, all_threads=False)
        faulthandler.register(_STACK_SIGNAL, file=file, all_threads=False)

    @staticmethod
    def request(pid: int) -> None:
        """Ask a process to write its stack."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _STACK_SIGNAL)

    def find_line(self) -> str | None:
        """The program's innermost line of the last stack: "train.py, line 3"; None if unknown."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        starts = [index for index, line in enumerate(lines) if "(most recent call first)" in line]
        if not starts:
            return None
        frames = [line.strip() for line in lines[starts[-1] :] if line.startswith("  File ")]
        places = (frame.removeprefix("File ").rpartition(" in ")[0] for frame in frames)
        users = [place for place in places if not any(part in place for part in _FOREIGN)]
        return users[0].replace('"', "") if users else None


def list_descendants(pid: int) -> list[int]:
    """List the processes that a process has started, and what those have started."""
    children = _read_children()
    descendants = list(children.get(pid, ()))
    for child in descendants:  # which grows
        descendants += children.get(child, ())
    return descendants


def _read_children() -> dict[int, list[int]]:
    """The children of every process, by its id."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            fields = _read_stat(int(name)) if name.isdigit() else []
            if fields:
                children.setdefault(int(fields[1]), []).append(int(name))
    return children


def _is_alive(pid: int) -> bool:
    fields = _read_stat(pid)
    return bool(fields) and fields[0] != "Z"


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/…/stat after the process name, the first of which is its state."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
