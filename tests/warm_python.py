"""Programs in processes of their own that have torch at once: forks of one that imported it.

A program finds what `python` would give it: arguments, folder, variables, standard streams. It
differs in what torch reads from variables as it is imported, and in that the interpreter is not
taken down at the end; tests of those start a real one.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any, final

__all__ = ["Program", "fork_launch_server", "run_python", "warm_context"]

TIMEOUT_S = 100
_PRELOADED = [
    "torch",
    "torch.export",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "shardscope.comm.trace",
    "shardscope.world.simulate",
    "shardscope.cli.trace",
    "shardscope.parallel.api",
    "shardscope.launch.data_rank",  # and with it all that the server of `run` imports
    "page_runs",
    "frozen_heap",  # last
]
_TESTS = Path(__file__).parent


def _find_path() -> str:
    """Where the package that is tested here lies, whatever the current folder is."""
    found = importlib.util.find_spec("shardscope")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).resolve().parents[1])


# Not that of the test which happens to need a program first.
_BEFORE_TESTS = {**os.environ, "PYTHONPATH": os.pathsep.join([_find_path(), str(_TESTS)])}


@cache
def warm_context() -> ForkServerContext:
    """Whose processes have torch at once, and can start others by the same server."""
    context = multiprocessing.get_context("forkserver")
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_address is not None and server._forkserver_pid is None:
        server.ensure_running = lambda: None  # this is one of its forks, and would start another
        return context
    context.set_forkserver_preload(_PRELOADED)
    now = dict(os.environ)
    try:
        _set_environment(_BEFORE_TESTS)
        forkserver.ensure_running()
    finally:
        _set_environment(now)
    return context


def _set_environment(env: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)


@final
class Program:
    """`python *arguments`, begun; `arguments` as a shell would give them: a file, `-m` or `-c`."""

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        stdout: str | None = None,  # the file to write to
        is_merged: bool = False,  # whether both streams are one, in the order of what was said
    ) -> None:
        self.arguments = [str(one) for one in arguments]
        self._said = tempfile.TemporaryDirectory()
        self._out = Path(self._said.name, "out")
        self._err = self._out if is_merged else Path(self._said.name, "err")
        self._process = warm_context().Process(
            target=_become,
            args=(
                self.arguments,
                dict(os.environ if env is None else env),
                os.getcwd(),
                stdout or str(self._out),
                str(self._err),
            ),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, *, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """How it ended and what it said."""
        try:
            self._process.join(timeout_s)
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired(self.arguments, timeout_s)
            out, err = (_read(file) for file in (self._out, self._err))
            return subprocess.CompletedProcess(self.arguments, self._process.exitcode, out, err)
        finally:
            self.end()

    def end(self) -> None:
        """Kill it, if it still runs, and forget what it said."""
        self._process.kill()
        self._process.join()
        self._said.cleanup()


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def run_python(
    *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` in the current folder, to its end."""
    return Program(*arguments, env=env).wait(timeout_s=timeout_s)


@contextmanager
def fork_launch_server(
    command: Sequence[str], requests: int, events: int
) -> Iterator[ForkServerProcess]:
    """Start what `launch` starts with this command, as a fork that has torch at once.

    Like the real one it has our standard streams and both descriptors, which are closed here. Its
    parent is the fork server, so tests of what happens when the parent is killed start a real one.
    """
    _, *arguments = command  # without the interpreter
    process = warm_context().Process(
        target=_serve,
        args=(arguments, dict(os.environ), os.getcwd(), *map(DupFd, (requests, events, 1, 2))),
    )
    process.start()
    os.close(requests)
    os.close(events)
    try:
        yield process
        process.join()
    finally:
        process.kill()
        process.join()


def _serve(
    arguments: list[str],
    env: dict[str, str],
    folder: str,
    requests: Any,
    events: Any,
    out: Any,
    err: Any,
) -> None:
    """What the process does: be the server."""
    os.setsid()
    for fd, stream in ((1, out), (2, err)):
        os.dup2(stream.detach(), fd)
    # The program may choose how it starts processes, and has a resource tracker of its own.
    multiprocessing.set_start_method(None, force=True)
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    _enter(env, folder)
    _run(*arguments, str(requests.detach()), str(events.detach()), str(os.getppid()))


def _become(arguments: list[str], env: dict[str, str], folder: str, out: str, err: str) -> None:
    """What the process does: be that program."""
    for fd, name in ((1, out), (2, err)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, fd)
        os.close(file)
    _enter(env, folder)
    _run(*arguments)


def _enter(env: dict[str, str], folder: str) -> None:
    """Have the surroundings that the program is started in."""
    _set_environment(env)
    os.chdir(folder)
    # Tests are found on the path of those who test.
    sys.path[:] = [one for one in sys.path if Path(one) not in (_TESTS, _TESTS.parent)]


def _run(first: str, *more: str) -> None:
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *more[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(more[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(more)
        runpy.run_module(more[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = [first, *more]
        runpy.run_path(first, run_name="__main__")
