"""The user's program: a script or a module with its arguments, run as `__main__`.

A program that starts its own processes (`torch.multiprocessing.spawn`) runs the function of one of
them instead: each simulated rank is a process already.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
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
    """Let `torch.multiprocessing.spawn` call the function of one process, in this process."""
    import torch.multiprocessing as multiprocessing

    def spawn(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        fn(local_rank if local_rank < nprocs else 0, *args)

    module = sys.modules["torch.multiprocessing.spawn"]
    with ExitStack() as stack:
        for owner in (multiprocessing, module):
            for name in ("spawn", "start_processes"):
                stack.enter_context(mock.patch.object(owner, name, spawn))
        yield
