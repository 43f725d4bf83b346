"""`diagnose` with real processes: what they leave behind, how they die, and Ctrl-C."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diagnosed_models as models
import shardscope
from shardscope import Diagnosed, diagnose
from shardscope.errors import CompileError
from shardscope.record import Condition, Phase, Stage
from warm_python import run_python

_HOMES = {
    "HOME": "home",
    "TMPDIR": "tmp",
    "TORCHINDUCTOR_CACHE_DIR": "caches/inductor",
    "TRITON_CACHE_DIR": "caches/triton",
    "XDG_CACHE_HOME": "caches/xdg",
}


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, a home and caches, each with something in it that is to stay."""
    for name, place in {**_HOMES, "": "work"}.items():
        folder = tmp_path / place
        (folder / "kernels").mkdir(parents=True)
        (folder / "kernels" / "sentinel.so").write_bytes(b"mine")
        if name:
            monkeypatch.setenv(name, str(folder))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def read_all(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files, with their contents and when they were written, and all folders."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        if path.is_file()
        else (b"", 0)
        for path in folder.rglob("*")
    }


class Small(nn.Module):
    """Buffers that change in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.relu(self.norm(x)))


def test_two_at_once_change_nothing_of_the_users_and_write_into_their_folder_alone(
    surroundings: Path,
) -> None:
    model = Small()
    model.drop.eval()
    tensor = torch.randn(8, 4, requires_grad=True)
    model(tensor).sum().backward()
    compiled_again = _compile_before(model)
    files, state = read_all(surroundings), _read(model, tensor)
    results: dict[str, Diagnosed] = {}

    def run(name: str, function: Any, *args: Any, **settings: Any) -> None:
        results[name] = diagnose(function, *args, **settings)

    options = {"op": "relu"}
    backend = "shardscope_fault_accuracy_error"
    wrong = threading.Thread(
        target=run,
        args=("wrong", models.broken, tensor),
        kwargs={"backend": backend, "options": options},
    )
    wrong.start()
    run("fine", model, tensor, backend="aot_eager")
    wrong.join()

    assert results["fine"].condition is Condition.FINE, results["fine"].diagnosis
    diagnosis = results["wrong"].diagnosis
    assert (diagnosis.condition, diagnosis.graph, diagnosis.is_minimal, diagnosis.is_verified) == (
        Condition.WRONG_RESULT,
        1,
        True,
        True,
    ), diagnosis.notes
    assert diagnosis.suspects[0].source.line == models.line_of("x = torch.relu(x)")
    repro = results["wrong"].repro
    assert repro is not None
    _check_surroundings(surroundings, files, repro)
    assert all(torch.equal(*pair) for pair in zip(_read(model, tensor), state, strict=True))
    assert (model.training, model.drop.training) == (True, False)
    assert not compiled_again()


def _check_surroundings(surroundings: Path, files: dict[str, Any], repro: Path) -> None:
    now = read_all(surroundings)
    assert {name: now.get(name) for name in files} == files
    new = {Path(name).parts[:2] for name in now.keys() - files.keys()}
    assert new == {("work", repro.parent.name)}
    assert [path.name for path in repro.parent.iterdir()] == ["repro.py"]


def _read(model: nn.Module, tensor: torch.Tensor) -> list[torch.Tensor]:
    grads = [tensor.grad, *(parameter.grad for parameter in model.parameters())]
    tensors = [*model.state_dict().values(), tensor, *grads, torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in tensors]


def _compile_before(model: nn.Module) -> Any:
    """Compile something of the user's; whether calling it then compiles it again."""
    calls = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.append(graph)
        return graph.forward

    torch.compiler.reset()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = torch.compile(models.deep, backend=backend)
    compiled(torch.ones(3))
    model.load_state_dict(state)

    def is_compiled_again() -> bool:
        before = len(calls)
        compiled(torch.ones(3))
        return len(calls) != before

    return is_compiled_again


def twofold(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x))


def test_a_crash_is_found_and_shown_by_a_script(surroundings: Path) -> None:
    folder = surroundings / "out"
    backend, options = "shardscope_fault_crash", {"op": "relu"}
    results = diagnose(twofold, torch.ones(2), backend=backend, options=options, folder=folder)
    diagnosis = results.diagnosis
    assert (diagnosis.condition, diagnosis.stage, diagnosis.phase) == (
        Condition.CRASH,
        Stage.BACKEND,
        Phase.FORWARD,
    )
    assert "SIGSEGV" in diagnosis.fact
    assert [suspect.op for suspect in diagnosis.suspects] == ["torch.relu"]
    assert (diagnosis.is_minimal, diagnosis.is_verified) == (True, True), diagnosis.notes
    assert [path.name for path in folder.iterdir()] == ["repro.py"]
    assert not list((surroundings / "work").glob("core*"))


SCRIPT = """\
import os, signal, sys
import torch
from shardscope import diagnose
from shardscope.compile.diagnose.worker_client import ProgressReporter

show, interrupted = ProgressReporter.show_num_queries, []

def interrupt(self, num_queries):
    show(self, num_queries)
    if num_queries == 6 and not interrupted:
        interrupted.append(num_queries)
        os.kill(os.getpid(), signal.SIGINT)

class Wrong:
    def __call__(self, graph, inputs):
        names = [getattr(node.target, "__name__", "") for node in graph.graph.nodes]
        by = "relu" in names and "tanh" in names
        return lambda *given: [one + by for one in graph(*given)]

def deep(x):
    for _ in range(8):
        x = torch.sin(x)
    x = torch.relu(x)
    return torch.tanh(x)

ProgressReporter.show_num_queries = interrupt
found = diagnose(deep, torch.ones(4), backend=Wrong())
print(found, found.repro, found.diagnosis.is_minimal, found.diagnosis.notes[-1])
"""


def test_ctrl_c_in_a_script_keeps_the_best_so_far(surroundings: Path) -> None:
    script = surroundings / "script.py"
    script.write_text(SCRIPT)
    # Not where the interpreter would find the package by itself: diagnosing starts others.
    ours = str(Path(shardscope.__file__).parents[1])
    end = run_python(script, env=os.environ | {"PYTHONPATH": ours}, timeout_s=200)
    assert (end.returncode, end.stderr) == (0, "")
    assert "Diagnosed(wrong_result" in end.stdout
    assert "shardscope-diagnosis/repro.py False The diagnosis was interrupted" in end.stdout
    folder = surroundings / "work" / "shardscope-diagnosis"
    assert {path.suffix for path in folder.iterdir()} == {".py", ".pt"}
    compile((folder / "repro.py").read_text(), "repro.py", "exec")


def test_torch_logs_nothing_of_an_op_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CompileError, match=r"Linear fails in eager mode, too \(RuntimeError"):
        diagnose(model, torch.ones(2, 3), backend="eager", folder=tmp_path / "diagnosis")
    assert [line for line in caplog.records if line.levelno >= logging.WARNING] == []


def test_diagnose_is_imported_without_dynamo_which_the_worker_imports_at_the_same_time() -> None:
    program = "import sys, shardscope; shardscope.diagnose; print('torch._dynamo' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == "False\n"
