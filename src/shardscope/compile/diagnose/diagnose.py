"""`diagnose(fn, …)`: checks a compiled function against eager execution, and locates what is wrong.

The function's graphs are captured in this process. The worker process compiles them, minimizes a
failing graph, finds the stage of the compiler that causes the failure, and writes a script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, final

from shardscope._torch.preload import FOR_WORKERS
from shardscope._torch.private import explain_moved_names
from shardscope.compile.diagnose.subgraph import Compiler
from shardscope.compile.diagnose.worker import OutputFolder, Workers, open_fork_server
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis, Recording

_PRELOADED = (*FOR_WORKERS, "shardscope.compile.diagnose.worker_tasks")


@final
class Diagnosed:
    """The result of `diagnose`: the `diagnosis`, and a `recording` with it and its findings."""

    def __init__(self, diagnosis: Diagnosis, recording: Recording) -> None:
        self.diagnosis = diagnosis
        self.recording = recording

    @property
    def condition(self) -> Condition:
        """Whether the compiled function is correct, or what is wrong with it."""
        return self.diagnosis.condition

    @property
    def repro(self) -> Path | None:
        """The path of the script that reproduces the failure, or None."""
        return Path(self.diagnosis.repro) if self.diagnosis.repro else None

    def __repr__(self) -> str:
        diagnosis = self.diagnosis
        stage = f" in {diagnosis.stage}" if diagnosis.stage is not None else ""
        ops = ", ".join(suspect.op for suspect in diagnosis.suspects[:3])
        return f"Diagnosed({diagnosis.condition}{stage}{f': {ops}' if ops else ''})"

    def _repr_html_(self) -> str:
        """The page of the recording, for notebooks."""
        return self.recording._repr_html_()


@explain_moved_names
def diagnose(
    fn: Callable[..., Any],
    *args: Any,
    backend: str | Callable[..., Any] = "inductor",
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    folder: str | Path | None = None,
    max_queries: int = 200,
    timeout_s: float = 300.0,
    seed: int = 0,
    name: str = "",
) -> Diagnosed:
    """Compile a function or model, compare it with eager execution, and locate what is wrong.

    The function is called with `args` and `kwargs`, and differentiated if its results require grad.
    Its caches, buffers and random state are restored. Compiled code runs in a subprocess, and all
    files go to one folder. Ctrl-C ends the search and keeps the smallest program found so far.

    Args:
        fn: A function or module.
        *args: Its arguments.
        backend: A backend of torch.compile: a name or a function.
        kwargs: Its keyword arguments.
        options: `options` of torch.compile.
        mode: `mode` of torch.compile.
        dynamic: `dynamic` of torch.compile.
        folder: Where the repro script and all other files are written; by default
            `shardscope-diagnosis`.
        max_queries: The number of compilations after which the search ends.
        timeout_s: Seconds that one compilation may take.
        seed: Random seed of the comparison.
        name: What reports call the function; by default its own name.

    Examples:
        >>> result = diagnose(model, tokens, backend="inductor")
        >>> result.condition, result.repro
    """
    compiler = Compiler(backend, options=options, mode=mode, dynamic=dynamic)
    _check(fn, max_queries, timeout_s)
    output_folder = OutputFolder(None if folder is None else Path(folder))
    try:
        with (
            open_fork_server(output_folder.sandbox) or nullcontext() as fork_server,
            Workers(
                output_folder.sandbox,
                preload=_PRELOADED,
                has_standby=False,
                fork_server=fork_server,
            ) as workers,
        ):
            # These import dynamo, which takes seconds; the worker imports it at the same time.
            from shardscope._torch.random_state import preserved_random_state

            with preserved_random_state():  # also from modules that draw numbers on import
                from shardscope.compile.diagnose.pipeline import Resources, run_diagnosis
                from shardscope.compile.diagnose.target import TargetFunction

                target = TargetFunction(fn, args, dict(kwargs or {}), name=name, seed=seed)
                resources = Resources(
                    output_folder, workers, fork_server, budget=max_queries, compile_s=timeout_s
                )
                recording = run_diagnosis(target, compiler, resources)
    finally:
        output_folder.clean_up()
    (diagnosis,) = recording.diagnoses
    return Diagnosed(diagnosis, recording)


def _check(fn: Any, max_queries: int, timeout_s: float) -> None:
    if not callable(fn):
        raise CompileError(
            f"diagnose() got {type(fn).__name__} instead of a function or a module. Give the "
            "function first, then what it is called with."
        )
    if max_queries < 1 or timeout_s <= 0:
        raise CompileError(
            f"diagnose() got max_queries={max_queries} and timeout_s={timeout_s}, which leave no "
            "room for a single compilation. Give positive numbers."
        )
