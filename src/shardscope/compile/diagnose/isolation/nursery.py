"""`Nursery`: a process that has imported torch, and is forked instead of starting another one.

To import torch takes seconds, to fork a millisecond. It is safe because that process has done
nothing else; the user's own, which may have threads and devices, is never forked.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

import torch

from shardscope._torch.preloading import FOR_FORKS
from shardscope.compile.diagnose.isolation.child import (
    LAST_WAIT_S,
    Child,
    end_group,
    open_output,
    spawn,
)
from shardscope.compile.diagnose.isolation.enclosure import Enclosure

__all__ = ["FRESH", "Nursery", "open_nursery"]

FRESH = Path(__file__).with_name("fresh.py")
_IMPORTED = ",".join(FOR_FORKS)
_KILLED = -9
_MAX_REPLY = 1024


def open_nursery(enclosure: Enclosure) -> Nursery | None:
    """One for the processes of an enclosure; None where processes cannot be forked safely."""
    # Who imports torch may wake the driver of a device, which does not survive a fork.
    has_devices = torch.version.cuda or torch.version.hip or torch.version.xpu
    return Nursery(enclosure) if sys.platform == "linux" and not has_devices else None


@final
class Nursery:
    """Begins to start the process, and does not wait for it; nor do its forks."""

    def __init__(self, enclosure: Enclosure) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._serials = itertools.count()
        self._pids: dict[int, int] = {}
        self._lock = threading.Lock()
        is_tied = threading.current_thread() is threading.main_thread()
        told = (os.getpid(), "tied" if is_tied else "free", _IMPORTED, theirs.fileno())
        with theirs:
            self._child = spawn(
                [sys.executable, "-P", str(FRESH), *map(str, told)],
                environment=enclosure.environment(),
                folder=enclosure.work,
                pass_fds=(theirs.fileno(),),
            )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process, which is the parent of its forks."""
        assert self._child.pid is not None
        return self._child.pid

    def fork(self, code: str, *arguments: str, pass_fds: Sequence[int]) -> Child:
        """Run code as `python -c` would, or, if it is empty, a script; files are arguments too."""
        serial = next(self._serials)
        reading, writing = open_output()
        death, telling = os.pipe()
        os.set_blocking(death, False)
        request = json.dumps([serial, code, *arguments]).encode()
        with suppress(BrokenPipeError):  # it is dead, which its forks tell
            socket.send_fds(self._control, [request], [writing, telling, *pass_fds])
        for fd in (writing, telling):
            os.close(fd)
        return Child(_Fork(self, serial, death), reading)

    def find_pid(self, serial: int) -> int | None:
        """Of a fork; None before it is made."""
        with self._lock, suppress(OSError):
            while reply := self._control.recv(_MAX_REPLY, socket.MSG_DONTWAIT):
                number, pid = json.loads(reply)
                self._pids[number] = pid
        return self._pids.get(serial)

    def close(self) -> None:
        """End the process and all forks of it."""
        self._child.kill()
        self._control.close()


@final
class _Fork:
    """A child of the nursery, which waits for it, and tells its end when it is let go."""

    def __init__(self, nursery: Nursery, serial: int, death_fd: int) -> None:
        self._nursery = nursery
        self._serial = serial
        self._exit_code: int | None = None
        self._is_orphan = False
        self.death_fd = death_fd

    @property
    def pid(self) -> int | None:
        return self._nursery.find_pid(self._serial)

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    def has_ended(self) -> bool:
        if self._exit_code is None:
            with suppress(BlockingIOError):
                # It dies with the nursery, which then does not tell any more.
                told = os.read(self.death_fd, _MAX_REPLY)
                self._is_orphan = not told
                self._exit_code = int(told or _KILLED)
        return self._exit_code is not None

    def end(self) -> None:
        self.has_ended()
        pid = self.pid
        # Before it is made, the nursery ends it as soon as it sees that nobody listens.
        if pid is None or self._is_orphan:
            return
        end_group(pid)
        if self._exit_code is None:
            poll = select.poll()
            poll.register(self.death_fd, select.POLLIN)
            poll.poll(LAST_WAIT_S * 1e3)
            self.has_ended()

    def close(self) -> None:
        os.close(self.death_fd)
