"""Runs a script in a process that has imported torch and done nothing else, or in its forks.

It is started by its path and must not import shardscope: a repro has to fail without it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
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

_PR_SET_PDEATHSIG = 1
_MAX_REQUEST = 1 << 17  # bytes
_MAX_FDS = 8


def end_with_parent(parent: int, *, is_tied: bool) -> None:
    """Die with the parent process, in whatever way it ends; leave no core files.

    The kernel binds a process to the thread that started it, so only a main thread may request it.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if is_tied and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died earlier
        os._exit(1)


def import_all(names: str) -> None:
    """Import modules that scripts need and that take long."""
    for name in names.split(","):
        importlib.import_module(name)


def run_requested_script(requests: int, replies: int) -> None:
    """Report that torch is imported, wait for the path of a script, and run it as Python would.

    Modules are not destroyed at exit: for torch that takes longer than many scripts.
    """
    os.close(replies)
    with os.fdopen(requests, "rb") as file:
        request = file.read()
    if not request:  # the other end was closed
        return
    path, *arguments = json.loads(request)
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
class _ForkServer:
    """Forks this process on request, and reports the exit codes of the forks.

    A request has the code to run, its arguments, and file descriptors: for the output, for the exit
    code, and for the code. Closing the other end of the second kills the fork.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._deaths: dict[int, int] = {}  # the listener of each fork, by its pidfd
        self._listeners: dict[int, int] = {}  # the pid of each fork, by the pipe for its exit code
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> list[str] | None:
        """Serve requests until the other end is closed.

        Returns the task in a fork, None otherwise.
        """
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
                    for unused_fd in (fds[0], *fds[2:]):
                        os.close(unused_fd)

    def _fork(self, serial: int, fds: list[int]) -> bool:
        """Whether this process is the fork."""
        parent = os.getpid()
        output, listener = fds
        with warnings.catch_warnings(action="ignore"):  # libraries have idle threads
            pid = os.fork()
        if pid == 0:
            self._begin_anew(parent, output, listener)
            return True
        death = os.pidfd_open(pid)
        self._deaths[death], self._listeners[listener] = listener, pid
        self._poll.register(death, select.POLLIN)
        self._poll.register(listener, 0)  # reports when the other end is closed
        self._control.send(json.dumps([serial, pid]).encode())
        return False

    def _begin_anew(self, parent: int, output: int, listener: int) -> None:
        os.setsid()
        end_with_parent(parent, is_tied=True)
        for fd in (1, 2):
            os.dup2(output, fd)
        for fd in (output, listener, *self._deaths, *self._listeners):
            os.close(fd)
        self._control.close()

    def _tell_end(self, death: int) -> None:
        listener = self._deaths.pop(death)
        self._poll.unregister(death)
        os.close(death)
        # It is not waited for yet, because its pid could be reused while its children still run.
        end = os.waitid(os.P_PID, self._listeners[listener], os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with contextlib.suppress(BrokenPipeError):
            os.write(listener, str(code).encode())

    def _forget(self, listener: int) -> None:
        for death in [fd for fd, owner in self._deaths.items() if owner == listener]:
            del self._deaths[death]
            self._poll.unregister(death)
            os.close(death)
        self._poll.unregister(listener)
        os.close(listener)
        self._end(self._listeners.pop(listener))

    def _end(self, pid: int) -> None:
        for end in (os.killpg, os.kill):  # it may not have created its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _leave(self) -> None:
        for pid in self._listeners.values():
            self._end(pid)


def serve_forks(control: int) -> None:
    """Serve forks; in a fork, run its task."""
    gc.freeze()  # forks then neither look through torch's million objects nor copy their memory
    with socket.socket(fileno=control) as connection:
        task = _ForkServer(connection).serve()
    if task is None:
        return
    code, *sys.argv[1:] = task
    if code:
        exec(code, {"__name__": "__main__"})
    else:
        names, *fds = sys.argv[1:]
        import_all(names)
        run_requested_script(*map(int, fds))


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), is_tied=sys.argv[2] == "tied")
    import_all(sys.argv[3])
    fds = [int(argument) for argument in sys.argv[4:]]
    if len(fds) == 1:
        serve_forks(*fds)
    else:
        run_requested_script(*fds)
