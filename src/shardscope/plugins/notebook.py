"""Magics for IPython and Jupyter: `%load_ext shardscope`, then `%%shardscope` and `%shardscope`.

Imported by `%load_ext` only, so that IPython is there.
"""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

from IPython.core.error import UsageError
from torch import nn

from shardscope.comm.trace import trace
from shardscope.compile.explain.explain import explaining
from shardscope.errors import ShardscopeError
from shardscope.parallel.ir.mesh import read_mesh
from shardscope.record import Recording, load, save
from shardscope.record.units import parse_size
from shardscope.report.show import diff, read_recording
from shardscope.shard.audit.audit import audit
from shardscope.shard.memory.memory import memory
from shardscope.world import simulate

_LINE_VERBS = {"show": 1, "diff": 2, "audit": 1}  # and how many results each takes


def register(shell: Any) -> None:
    """Add the magics to an IPython shell."""
    magics = NotebookMagics(shell)
    shell.register_magic_function(magics.observe_cell, "cell", "shardscope")
    shell.register_magic_function(magics.show_result, "line", "shardscope")


def _make_parser() -> ArgumentParser:
    parser = _Parser(prog="%%shardscope", add_help=False)
    verbs = ("trace", "memory", "explain")
    parser.add_argument("verb", nargs="?", default=verbs[0], choices=verbs)
    parser.add_argument("--model")  # the variable with the model, for the names of its modules
    parser.add_argument("--mesh")  # of a simulated world in which the cell runs: dp=2,tp=4
    parser.add_argument("--rank", type=int, default=0)  # in that world
    parser.add_argument("--device", default="cpu")  # of that world
    parser.add_argument("--optimizer")  # memory: the variable with the optimizer
    parser.add_argument("--gpu-memory")  # memory: of the device, such as 80GiB
    parser.add_argument("--output")  # a file to save the recording to
    parser.add_argument("--force", action="store_true")  # overwrite that file
    return parser


@final
class _Parser(ArgumentParser):
    """Raises IPython's error for wrong options, which it shows without a traceback."""

    def error(self, message: str) -> NoReturn:
        _refuse(f"{self.prog}: {message}.")


@final
class NotebookMagics:
    """`%%shardscope` observes a cell; `%shardscope` shows results."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._parser = _make_parser()

    def observe_cell(self, line: str, cell: str) -> Recording:
        """Run a cell observed, and show what was recorded.

        `%%shardscope [trace|memory|explain] [--model NAME] [--mesh dp=2,tp=4 [--rank 0]
        [--device cuda]] [--optimizer NAME] [--gpu-memory 80GiB] [--output FILE [--force]]`
        """
        options = self._parser.parse_args(shlex.split(line))
        with _usage_errors():
            result = self._observe(options, cell)
            if options.output is not None:
                save(result, Path(options.output), force=options.force)
        return result

    def show_result(self, line: str) -> Any:
        """`%shardscope show RESULT`, `diff BEFORE AFTER` or `audit MODEL`.

        A result is a variable or the file of a recording.
        """
        verb, *names = shlex.split(line) or [""]
        if len(names) != _LINE_VERBS.get(verb, -1):
            _refuse(f"%shardscope {line} is not understood.")
        with _usage_errors():
            if verb == "audit":
                return audit(self._find(names[0]))
            results = [self._read(name) for name in names]
            return results[0] if verb == "show" else diff(*results)

    def _observe(self, options: Namespace, cell: str) -> Recording:
        with self._in_world(options):
            if options.verb == "memory":
                return self._estimate_memory(options, cell)
            if options.verb == "explain":
                with explaining() as explained:
                    self.shell.run_cell(cell)
                return explained.recording
            return self._trace(options, cell)

    def _trace(self, options: Namespace, cell: str) -> Recording:
        traced = trace(self._find_model(options))
        traced.__enter__()
        error: BaseException | None = None
        try:
            error = self.shell.run_cell(cell).error_in_exec  # which IPython has shown
        finally:
            traced.__exit__(None if error is None else type(error), error, None)
        return traced.recording

    @contextmanager
    def _in_world(self, options: Namespace) -> Iterator[None]:
        """The simulated world in which the cell runs, as the variable `world`, if one is named."""
        if options.mesh is None:
            yield
            return
        axes = read_mesh(options.mesh).axes
        with simulate(axes, rank=options.rank, device=options.device) as world:
            self.shell.user_ns["world"] = world
            yield

    def _estimate_memory(self, options: Namespace, cell: str) -> Recording:
        """Run the cell as the step of `memory`, in the user's namespace."""
        model = self._find_model(options)
        if model is None:
            _refuse("%%shardscope memory needs a model: there is no variable called model.")
        name = options.optimizer or ("optimizer" if "optimizer" in self.shell.user_ns else None)
        optimizer = None if name is None else self._find(name)
        code = compile(self.shell.transform_cell(cell), "<cell>", "exec")
        step = partial(exec, code, self.shell.user_ns)
        num_bytes = None if options.gpu_memory is None else parse_size(options.gpu_memory)
        if num_bytes is None and options.gpu_memory is not None:
            _refuse(f"--gpu-memory {options.gpu_memory} is not a size such as 80GiB.")
        return memory(model, step, optimizer, device_bytes=num_bytes).recording

    def _find_model(self, options: Namespace) -> Any:
        """The model that `--model` names, or the variable `model` if it is a module."""
        if options.model is not None:
            return self._find(options.model)
        model = self.shell.user_ns.get("model")
        return model if isinstance(model, nn.Module) else None

    def _find(self, name: str) -> Any:
        if name not in self.shell.user_ns:
            _refuse(f"there is no variable called {name!r}.")
        return self.shell.user_ns[name]

    def _read(self, name: str) -> Recording:
        """The recording of a variable, or in a file."""
        if name in self.shell.user_ns:
            return read_recording(self.shell.user_ns[name], asked_by="%shardscope")
        return load(name)


def _refuse(fact: str) -> NoReturn:
    raise UsageError(
        f"{fact} Cells: %%shardscope [trace|memory|explain] [--model NAME] [--mesh dp=2,tp=4]. "
        "Lines: %shardscope show RESULT, diff BEFORE AFTER, audit MODEL."
    )


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Show errors of ours as a sentence, without a traceback."""
    try:
        yield
    except ShardscopeError as error:
        raise UsageError(str(error)) from error
