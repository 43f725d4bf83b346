"""The user's program: a script or a module with its arguments, run as `__main__`.

A program that starts its own processes (`torch.multiprocessing.spawn`) runs the function of one of
them instead: each simulated rank is a process already.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
        """Raise if the script does not exist."""
        if not self.is_module and not os.path.isfile(self.script):
            fact = "is a folder" if os.path.isdir(self.script) else "does not exist"
            raise LaunchError(
                f"{self.script} {fact}. Give the path of the program that torchrun would start, or "
                "-m and a module's name."
            )

    def run(self) -> None:
        """Execute the program as Python does: its folder on the path, its name `__main__`."""
        main = ModuleType("__main__")
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            code = _load_module(self.script, main)
        else:
            path = Path(self.script)
            sys.path.insert(0, str(path.parent.resolve()))
            code = compile(path.read_bytes(), self.script, "exec")
            main.__file__ = self.script
            sys.argv = [self.script, *self.args]
        if self.is_module:
            sys.argv = [str(main.__file__), *self.args]
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        exec(code, vars(main))


def _load_module(name: str, main: ModuleType) -> CodeType:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None or spec.loader is None else spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise LaunchError(f"There is no module {name!r} here. Check its name and the folder.")
    main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
    main.__loader__ = spec.loader
    return code  # type: ignore[no-any-return]


@contextmanager
def spawned_in_place(local_rank: int) -> Iterator[None]:
    """Run the processes of a program that starts its own in this process: one of them.

    `torch.multiprocessing.spawn` calls the function of one process, and so does the process with
    that number among those that the program starts by hand.
    """
    import torch.multiprocessing as multiprocessing

    def spawn(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        fn(local_rank if local_rank < nprocs else 0, *args)

    module = sys.modules["torch.multiprocessing.spawn"]
    with ExitStack() as stack:
        for owner in (multiprocessing, module):
            for name in ("spawn", "start_processes"):
                stack.enter_context(mock.patch.object(owner, name, spawn))
        stack.enter_context(_TrainingProcesses(local_rank).replaced())
        yield


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
        """Replace the methods of processes until the context ends."""
        start, join, is_alive = BaseProcess.start, BaseProcess.join, BaseProcess.is_alive

        def start_or_run(process: BaseProcess) -> None:
            if not _trains(process):
                start(process)
                return
            self._started.append(process)
            if len(self._started) - 1 == self._index:
                self._run(process)

        def join_or_run(process: BaseProcess, timeout: float | None = None) -> None:
            if process not in self._started:
                join(process, timeout)
            elif not self._has_run:  # the program has started fewer processes than ranks
                self._run(self._started[-1])

        def is_running(process: BaseProcess) -> bool:
            return process not in self._started and is_alive(process)

        with (
            mock.patch.object(BaseProcess, "start", start_or_run),
            mock.patch.object(BaseProcess, "join", join_or_run),
            mock.patch.object(BaseProcess, "is_alive", is_running),
        ):
            yield

    def _run(self, process: BaseProcess) -> None:
        self._has_run = True
        process.run()


def _trains(process: BaseProcess) -> bool:
    target = getattr(process, "_target", None)
    function = process.run if target is None else target
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None) or ""
    return (
        not process.daemon
        and not {"site-packages", "dist-packages"} & {*Path(file).parts}
        and (not file.startswith(sysconfig.get_path("stdlib")))
    )
