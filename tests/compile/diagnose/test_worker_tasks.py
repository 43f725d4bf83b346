"""Tasks of the worker are marked, and reach it through the client only."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import get_type_hints

import pytest

import shardscope.compile.diagnose
from home_workers import HomeWorkers
from shardscope.compile.diagnose import worker_tasks
from shardscope.compile.diagnose.subgraph.subgraph import Compiler
from shardscope.compile.diagnose.worker.server import TASKS, WorkerContext, runs_in_worker
from shardscope.compile.diagnose.worker_client import Timeouts, WorkerClient
from shardscope.compile.diagnose.worker_tasks import check_ops

DIAGNOSE = Path(shardscope.compile.diagnose.__file__).parent


def test_every_public_function_of_worker_tasks_is_a_task_and_no_other_function_is() -> None:
    public = {
        name: value
        for name, value in vars(worker_tasks).items()
        if isinstance(value, FunctionType)
        and value.__module__ == worker_tasks.__name__
        and not name.startswith("_")
    }
    assert public == TASKS


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_receives_the_context_of_the_worker_first(name: str) -> None:
    first, *_ = inspect.signature(TASKS[name]).parameters
    assert get_type_hints(TASKS[name], vars(worker_tasks))[first] is WorkerContext


def direct_calls(path: Path) -> Iterator[str]:
    """Calls of tasks by name in a file, instead of through the client."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("worker_tasks")
        for alias in node.names
        if alias.name in TASKS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in imported:
            yield f"{path.name}:{node.lineno} calls {ast.unparse(node.func)}"


def test_no_task_is_called_in_the_users_process() -> None:
    files = [path for path in DIAGNOSE.rglob("*.py") if path.name != "worker_tasks.py"]
    assert [call for path in files for call in direct_calls(path)] == []


def test_a_direct_call_of_a_task_is_found(tmp_path: Path) -> None:
    file = tmp_path / "caller.py"
    file.write_text(
        "from shardscope.compile.diagnose.worker_tasks import OpSubset, check_ops\n"
        "client.run(check_ops, OpSubset(0), compiler)\n"
        "check_ops(context, OpSubset(0), compiler)\n"
    )
    assert list(direct_calls(file)) == ["caller.py:3 calls check_ops"]


def test_the_client_runs_tasks_only() -> None:
    def check_ops(context: WorkerContext) -> None: ...

    client = WorkerClient(HomeWorkers(), Compiler("eager"), Timeouts(60.0))  # type: ignore[arg-type]
    message = r"check_ops is not a task of the worker. Mark it with @runs_in_worker"
    with pytest.raises(TypeError, match=message):
        client.run(check_ops)
    with pytest.raises(TypeError, match=message):
        client.read(check_ops)
    with pytest.raises(TypeError, match=message):
        client.prepare(check_ops, name="preparation")
    assert client.num_calls == 0


def test_two_tasks_do_not_have_the_same_name() -> None:
    with pytest.raises(AssertionError, match="there are two tasks called check_ops"):
        runs_in_worker(check_ops)
    assert TASKS["check_ops"] is check_ops
