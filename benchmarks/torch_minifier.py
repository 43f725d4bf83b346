"""torch's own tools on a failing program, each as a user would run it, in processes of their own.

    python benchmarks/torch_minifier.py models:relu_in_100 inductor \
        --config cpp.inject_relu_bug_TESTING_ONLY=compile_error --tool "minifier after aot"

A program is `module:function`; the function returns another one and its arguments. Everything that
the tools write goes to a folder that is deleted.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

__all__ = ["TOOLS", "Attempt", "Failed", "Task", "Workplace", "attempt", "last_line"]

HERE = Path(__file__).resolve().parent
USER = HERE / "torch_user"
SCRIPT = USER / "torch_user_script.py"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A program and the backend that gets it wrong."""

    program: str
    backend: str
    has_wrong_numbers: bool = False  # torch's minifier must be told
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the program
    options: Mapping[str, Any] = field(default_factory=dict)  # of the backend
    config: Mapping[str, Any] = field(default_factory=dict)  # Inductor's


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What became of one tool's attempt."""

    tool: str
    outcome: str  # found, nothing found, timed out, crashed: …
    ops: tuple[str, ...] = ()  # what is left of the program, or what the tool blames
    num_calls: int = 0  # of the backend
    seconds: float = 0.0


class Failed(Exception):  # noqa: N818 - it is a result
    """The tool did not come to an end; says how."""


class _Crashed(Failed):
    """A signal ended it."""


class Workplace:
    """A folder for everything, and processes that have some seconds left in all."""

    def __init__(self, folder: Path, task: Task, limit_seconds: float) -> None:
        self.folder = folder
        self._end = time.monotonic() + limit_seconds
        self._counts = folder / "counts"
        self._counts.touch()
        (folder / "tmp").mkdir()
        self._environment = _environment(folder, task)

    @property
    def num_calls(self) -> int:
        """Of the backend, in all processes."""
        return len(self._counts.read_text().splitlines())

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python; raises if it does not end in time, or is ended by a signal."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**self._environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=max(self._end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            _end_all(process)
            raise Failed("timed out") from None
        if process.returncode < 0:
            raise _Crashed(f"crashed: {signal.Signals(-process.returncode).name}")
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def _end_all(process: subprocess.Popen[str]) -> None:
    """The process and those that it started, which share its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _environment(folder: Path, task: Task) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH", "PYTORCH", "AOT"))
    }
    paths = [str(USER), *kept.get("PYTHONPATH", "").split(":"), str(HERE), str(HERE.parent / "src")]
    return {
        **kept,
        "PYTHONPATH": ":".join(filter(None, paths)),
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # or the bisector would be given old results
        "TORCH_COMPILE_DEBUG_DIR": str(folder),
        "TORCH_USER_COUNTS": str(folder / "counts"),
        "TORCH_USER_COUNTS_INDUCTOR": "1" if task.backend == "inductor" else "",
        "TORCH_USER_TASK": json.dumps(asdict(task)),
    }


def _minify(place: Workplace, task: Task, after: str) -> tuple[str, ...]:
    # Level 3 writes the script before anything fails, so that a crash or a hang leaves one too.
    for level in ("4",) if task.has_wrong_numbers else ("2", "3"):
        variables = {"TORCHDYNAMO_REPRO_AFTER": after, "TORCHDYNAMO_REPRO_LEVEL": level}
        with suppress(_Crashed):
            place.run(str(SCRIPT), "run", **variables)
        launchers = sorted(place.folder.rglob("minifier_launcher.py"), key=_age)
        if launchers:
            break
    else:
        raise Failed("nothing found: it saw no failure")
    done = place.run(str(launchers[-1]))
    repros = sorted(place.folder.rglob("repro.py"), key=_age)
    if not repros:
        raise Failed(f"crashed: {last_line(done.stderr)}")
    return tuple(_ops_in(repros[-1]))


def _age(path: Path) -> float:
    return path.stat().st_mtime


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "without a word"


def _ops_in(repro: Path) -> Iterator[str]:
    """The calls in the forward of the module that the script defines."""
    for node in ast.walk(ast.parse(repro.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            for statement in node.body:
                if isinstance(statement, ast.Assign) and _is_op(statement.value):
                    yield ast.unparse(statement.value)


def _is_op(value: ast.expr) -> bool:
    is_part = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant)
    return not is_part and not isinstance(value, ast.Constant | ast.Attribute | ast.Name)


def _bisect(place: Workplace, task: Task) -> tuple[str, ...]:
    # Its runs are counted instead: it calls other backends as well.
    done = place.run(str(SCRIPT), "bisect", TORCH_USER_COUNTS_INDUCTOR="")
    if done.returncode != 0:
        raise Failed(f"crashed: {last_line(done.stderr)}")
    # The bisector prints too, before and after.
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"found"'))
    return tuple(json.loads(line)["found"])


TOOLS = {
    "minifier after dynamo": lambda place, task: _minify(place, task, "dynamo"),
    "minifier after aot": lambda place, task: _minify(place, task, "aot"),
    "bisector": _bisect,
}


def attempt(tool: str, task: Task, *, limit_seconds: float = 600) -> Attempt:
    """Run one of torch's tools on a task."""
    with tempfile.TemporaryDirectory(prefix="torch-tools-") as folder:
        place = Workplace(Path(folder), task, limit_seconds)
        start = time.perf_counter()
        ops: tuple[str, ...] = ()
        try:
            ops = TOOLS[tool](place, task)
            outcome = "found" if ops else "nothing found"
        except Failed as failure:
            outcome = str(failure)
        seconds = time.perf_counter() - start
        return Attempt(
            tool=tool, outcome=outcome, ops=ops, num_calls=place.num_calls, seconds=seconds
        )


def _parse(pairs: Sequence[str]) -> dict[str, Any]:
    parsed = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed


@click.command()
@click.argument("program")
@click.argument("backend")
@click.option("--argument", multiple=True, help="NAME=VALUE, of the program.")
@click.option("--option", multiple=True, help="NAME=VALUE, of the backend.")
@click.option("--config", multiple=True, help="NAME=VALUE, of Inductor.")
@click.option("--wrong-numbers", is_flag=True, help="It fails without an error.")
@click.option("--tool", type=click.Choice(list(TOOLS)), multiple=True, default=list(TOOLS))
@click.option("--limit", default=600.0, help="Seconds for each tool.")
def main(
    program: str,
    backend: str,
    argument: tuple[str, ...],
    option: tuple[str, ...],
    config: tuple[str, ...],
    wrong_numbers: bool,
    tool: tuple[str, ...],
    limit: float,
) -> None:
    """Run torch's tools on PROGRAM with BACKEND, and print what each gives as JSON."""
    task = Task(
        program=program,
        backend=backend,
        has_wrong_numbers=wrong_numbers,
        arguments=_parse(argument),
        options=_parse(option),
        config=_parse(config),
    )
    for one in tool:
        print(json.dumps(asdict(attempt(one, task, limit_seconds=limit))), flush=True)


if __name__ == "__main__":
    main()
