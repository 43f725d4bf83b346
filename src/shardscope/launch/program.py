"""The user's program: a script or a module with its arguments, run as `__main__`.

A program that starts its own processes (`torch.multiprocessing.spawn`, torchrun) runs the function
of one of them instead: each simulated rank is a process already.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import pkgutil
import shlex
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, final
from unittest import mock

from shardscope.errors import LaunchError


@dataclass(frozen=True)
class Program:
    """`script` is a path, or with `is_module` a dotted name as for `python -m`."""

    script: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """`train` for both train.py and package.train."""
        return self.script.rpartition(".")[2] if self.is_module else Path(self.script).stem

    @property
    def command(self) -> str:
        """The program and its arguments, as one types them."""
        return shlex.join([*(["-m"] if self.is_module else []), self.script, *self.args])

    def check(self) -> None:
        """Raise if the script is not a Python program."""
        if not self.is_module:
            fact = _find_obstacle(self.script)
            if fact is not None:
                raise LaunchError(
                    f"{self.script} {fact}. Give the path of the program that torchrun would "
                    "start, or -m and a module's name."
                )

    def run(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Execute the program as Python does: its folder on the path, its name `__main__`.

        `on_start` is called when its arguments are set, before its first line.
        """
        main = ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
        sys.argv = [self.script, *self.args]
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            code = _load_module(self.script, main)
            sys.argv[0] = str(main.__file__)
        elif os.path.isdir(self.script) or zipfile.is_zipfile(self.script):
            sys.path.insert(0, os.path.abspath(self.script))
            code = _load_archive(os.path.abspath(self.script), main)
        else:
            path = Path(self.script)
            sys.path.insert(0, str(path.parent.resolve()))
            code = compile(path.read_bytes(), self.script, "exec")
            main.__file__ = os.path.abspath(self.script)
            main.__loader__ = SourceFileLoader("__main__", main.__file__)
        sys.modules["__main__"] = main
        on_start()
        exec(code, vars(main))


def _find_obstacle(script: str) -> str | None:
    """Why a file or folder cannot be run; None if it can."""
    path = Path(script)
    try:
        if path.is_dir():
            return None if (path / "__main__.py").is_file() else "is a folder without __main__.py"
        if not path.exists():
            return "does not exist"
        if not path.is_file():
            return "is not a file"
        with path.open("rb") as file:
            start = file.read(1000)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    first = start.partition(b"\n")[0].decode(errors="replace").strip()
    if path.suffix == ".ipynb":
        return "is a notebook. Save it as a script first: jupyter nbconvert --to script"
    if first.startswith("#!") and "python" not in first:
        return f"is not a Python program: its first line is {first}"
    if b"\0" in start and not zipfile.is_zipfile(path):
        return "is not a Python program, but a binary file"
    return None


def _load_archive(path: str, main: ModuleType) -> CodeType:
    """The code of `__main__` in a folder or zip file."""
    importer = pkgutil.get_importer(path)
    spec = None if importer is None else importer.find_spec("__main__")
    return _use_spec(spec, main, path)


def _load_module(name: str, main: ModuleType) -> CodeType:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not name.startswith(f"{error.name}"):
            raise  # by the code of a parent package
        spec = None
    return _use_spec(spec, main, name)


def _use_spec(spec: ModuleSpec | None, main: ModuleType, name: str) -> CodeType:
    code = None if spec is None or spec.loader is None else spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise LaunchError(f"There is no module {name!r} here. Check its name and the folder.")
    main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
    main.__loader__, main.__cached__ = spec.loader, spec.cached  # type: ignore[attr-defined]
    return code  # type: ignore[no-any-return]


@contextmanager
def launched_in_place(local_rank: int) -> Iterator[None]:
    """Let a program that starts the processes of its ranks itself run as one of them, here.

    `torch.multiprocessing.spawn` and torchrun's `launch_agent` call the function or program of one
    process in this process, and so does the process with that number among those that the program
    starts by hand.
    """
    import torch.multiprocessing as multiprocessing
    from torch.distributed.launcher import api as elastic

    def spawn(
        fn: Callable[..., Any],
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        *_: Any,
        **__: Any,
    ) -> _EndedProcesses | None:
        fn(local_rank if local_rank < nprocs else 0, *args)
        return None if join else _EndedProcesses()

    def launch_agent(config: Any, entrypoint: Any, args: list[Any], **_: Any) -> dict[int, Any]:
        if callable(entrypoint):
            return {local_rank: entrypoint(*args)}
        _read_command([entrypoint, *args]).run()
        return {local_rank: None}

    module = sys.modules["torch.multiprocessing.spawn"]
    with ExitStack() as stack:
        for owner in (multiprocessing, module):
            for name in ("spawn", "start_processes"):
                stack.enter_context(mock.patch.object(owner, name, spawn))
        stack.enter_context(mock.patch.object(elastic, "launch_agent", launch_agent))
        stack.enter_context(_TrainingProcesses(local_rank).replaced())
        yield


@final
class _EndedProcesses:
    """What `spawn(join=False)` returns: processes that have ended already."""

    processes: tuple[BaseProcess, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        """All processes have ended."""
        return True

    def pids(self) -> list[int]:
        """There are none."""
        return []


def _read_command(command: list[str]) -> Program:
    """The program of a command line such as `python -u train.py --lr 1`."""
    words = [str(word) for word in command]
    while words[0].startswith("-u") or os.path.basename(words[0]).startswith("python"):
        del words[0]
    is_module = words[0] == "-m"
    script, *args = words[is_module:]
    return Program(script, tuple(args), is_module)


@final
class _TrainingProcesses:
    """Processes that a program starts to train: the one with the number `index` runs here.

    Daemons and processes of libraries, such as the workers of a data loader, start as always.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._started: list[BaseProcess] = []
        self._has_run = False

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace the start of processes until the context ends."""
        start = BaseProcess.start

        def start_or_run(process: BaseProcess) -> None:
            if not _trains(process):
                start(process)
                return
            self._started.append(process)
            process._popen = _ProcessInPlace(self.run_last)  # type: ignore[attr-defined]
            if len(self._started) - 1 == self._index:
                self._run(process)

        with mock.patch.object(BaseProcess, "start", start_or_run):
            yield

    def run_last(self) -> None:
        """Run the last process, if the program has started fewer than there are ranks."""
        if not self._has_run:
            self._run(self._started[-1])

    def _run(self, process: BaseProcess) -> None:
        self._has_run = True
        process.run()


@final
class _ProcessInPlace:
    """What a `Process` asks about its process: it has ended well, at the latest when joined."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self.pid = os.getpid()
        self.returncode = 0
        self._on_wait = on_wait

    def poll(self) -> int:
        """The exit code."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait, and return the exit code."""
        self._on_wait()
        return self.returncode

    def end(self) -> None:
        """It has ended already."""

    terminate = kill = close = end


def _trains(process: BaseProcess) -> bool:
    target = getattr(process, "_target", None)
    function = process.run if target is None else target
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None) or ""
    return (
        not process.daemon
        and not {"site-packages", "dist-packages"} & {*Path(file).parts}
        and (not file.startswith(sysconfig.get_path("stdlib")))
    )
