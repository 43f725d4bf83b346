"""Runs one script in a process that has imported torch and done nothing else, or in forks of it.

It is started by its path and must import nothing of ours: a repro has to fail without us.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
import warnings
from typing import final

__all__ = ["end_with_parent", "import_all", "run_nursery", "run_one_script"]

_PR_SET_PDEATHSIG = 1
_MAX_REQUEST = 1 << 17  # bytes
_MAX_FDS = 8


def end_with_parent(parent: int, *, is_tied: bool) -> None:
    """Die when the process that began this one dies, however it does; leave no core files.

    The kernel ties a process to the thread that began it, so only a main thread may ask for it.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if is_tied and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before it was watched
        os._exit(1)


def import_all(names: str) -> None:
    """What any script that compiles imports, and takes long."""
    for name in names.split(","):
        importlib.import_module(name)


def run_one_script(requests: int, replies: int) -> None:
    """Say that torch is there, wait for the name of a script, and run it as Python would.

    Except that modules are not taken down at the end: that takes torch longer than many a script.
    """
    os.close(replies)
    with os.fdopen(requests, "rb") as file:
        asked = file.read()
    if not asked:  # nobody wants anything
        return
    path, *arguments = json.loads(asked)
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    code = _find_exit_code(path)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _find_exit_code(path: str) -> int:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - as Python itself does
        traceback.print_exc()
        return 1
    return 0


@final
class _Nursery:
    """Forks this process whenever it is asked to, and tells how the forks end.

    A request is the code to run and its arguments, with files: for what the fork prints, for how it
    ended, and those that the code is given. The asker who closes the second ends the fork.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._deaths: dict[int, int] = {}  # files that can be read when a fork has died, and it
        self._listeners: dict[int, int] = {}  # files where its end is told, and the fork
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def tend(self) -> list[str] | None:
        """Until there is nobody left who could ask. In a fork: what it is to do."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._deaths:
                    self._tell_end(fd)
                elif fd in self._listeners:
                    self._forget(fd)
                elif fd == self._control.fileno():
                    message, fds, _, _ = socket.recv_fds(self._control, _MAX_REQUEST, _MAX_FDS)
                    if not message:
                        self._leave()
                        return None
                    serial, *task = json.loads(message)
                    if self._fork(serial, fds[:2]):
                        return [*task, *map(str, fds[2:])]
                    for one in (fds[0], *fds[2:]):
                        os.close(one)

    def _fork(self, serial: int, fds: list[int]) -> bool:
        """Whether this is the fork."""
        parent = os.getpid()
        output, listener = fds
        with warnings.catch_warnings(action="ignore"):  # libraries have threads that do nothing yet
            pid = os.fork()
        if pid == 0:
            self._begin_anew(parent, output, listener)
            return True
        death = os.pidfd_open(pid)
        self._deaths[death], self._listeners[listener] = listener, pid
        self._poll.register(death, select.POLLIN)
        self._poll.register(listener, 0)  # that is, for when nobody listens any more
        self._control.send(json.dumps([serial, pid]).encode())
        return False

    def _begin_anew(self, parent: int, output: int, listener: int) -> None:
        os.setsid()
        end_with_parent(parent, is_tied=True)
        for one in (1, 2):
            os.dup2(output, one)
        for one in (output, listener, *self._deaths, *self._listeners):
            os.close(one)
        self._control.close()

    def _tell_end(self, death: int) -> None:
        listener = self._deaths.pop(death)
        self._poll.unregister(death)
        os.close(death)
        # It is not waited for, lest its number be somebody else's while its children still run.
        end = os.waitid(os.P_PID, self._listeners[listener], os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with contextlib.suppress(BrokenPipeError):
            os.write(listener, str(code).encode())

    def _forget(self, listener: int) -> None:
        for death in [one for one, whose in self._deaths.items() if whose == listener]:
            del self._deaths[death]
            self._poll.unregister(death)
            os.close(death)
        self._poll.unregister(listener)
        os.close(listener)
        self._end(self._listeners.pop(listener))

    def _end(self, pid: int) -> None:
        for end in (os.killpg, os.kill):  # it may not have made its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _leave(self) -> None:
        for pid in self._listeners.values():
            self._end(pid)


def run_nursery(control: int) -> None:
    """Be forked. What a fork is to do is the last that it does."""
    with socket.socket(fileno=control) as connection:
        task = _Nursery(connection).tend()
    if task is None:
        return
    code, *sys.argv[1:] = task
    if code:
        exec(code, {"__name__": "__main__"})
    else:
        names, *fds = sys.argv[1:]
        import_all(names)
        run_one_script(*map(int, fds))


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), is_tied=sys.argv[2] == "tied")
    import_all(sys.argv[3])
    fds = [int(one) for one in sys.argv[4:]]
    if len(fds) == 1:
        run_nursery(*fds)
    else:
        run_one_script(*fds)
