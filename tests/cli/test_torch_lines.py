"""A command that fails prints one sentence, without the warnings and tracebacks of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TARGETS = {
    # torch logs what an op on tensors without data raises, and warns of plans that match nothing.
    "reads_values": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
    def forward(self, x):
        y = self.up(x)
        return y * 2 if y.sum().item() > 0 else y
def parallelize(model, mesh):
    return parallelize_module(model, mesh, {"nothing.*": ColwiseParallel()})
""",
    # A graph that fails prints a traceback of its own; dynamo wraps the error.
    "wrong_shape": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
    def forward(self, x):
        return self.up(x) @ torch.ones(3, 3)
def parallelize(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel()})
""",
    "no_kernel": """
library = torch.library.Library("shardscope_torch_lines", "DEF")
library.define("nothing(Tensor x) -> Tensor")
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
    def forward(self, x):
        return torch.ops.shardscope_torch_lines.nothing(self.up(x))
def parallelize(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel()})
""",
    "broken_backend": """
def backend(graph, inputs):
    raise RuntimeError("this backend is broken")
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
    def forward(self, x):
        return self.up(x).relu()
def make():
    return torch.compile(Model(), backend=backend)
def parallelize(model, mesh):
    return model
""",
    # A collective that was never waited for: torch's C++ code warns when the process ends.
    "mixed": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.down(self.up(x).softmax(-1))
def parallelize(model, mesh):
    up = ColwiseParallel(use_local_output=False)
    down = RowwiseParallel(use_local_output=False)
    return parallelize_module(model, mesh, {"up": up, "down": down})
""",
    "wrong_mesh": """
Model = lambda: nn.Linear(8, 8)
def parallelize(model, mesh):
    import warnings
    warnings.warn("noise")
    return fully_shard(model, mesh=mesh["dp_shard"])
""",
}
HEAD = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)
make = lambda: Model()
"""
TAIL = """
plan = {"up": "colwise"}
def model(): return make()
def batch(model): return torch.randn(4, 8)
"""
CASES = [
    ("trace reads_values.py --mesh tp=2", "run again with --data."),
    ("audit reads_values.py --mesh tp=2", "run again with --data."),
    ("coverage reads_values.py", "--data"),
    ("visualize reads_values.py up.weight --mesh tp=2", "up.weight is not a DTensor"),
    ("parallelize reads_values.py", "reads_values.py:"),
    ("trace wrong_shape.py --mesh tp=2", "wrong_shape.py, line"),
    ("memory wrong_shape.py", "wrong_shape.py, line"),
    ("parity wrong_shape.py", "wrong_shape.py, line"),
    ("explain wrong_shape.py", "[4, 8] X [3, 3]"),
    ("diagnose wrong_shape.py --backend aot_eager", "fails in eager mode"),
    ("trace no_kernel.py --mesh tp=2", "torch.library.register_fake"),
    ("trace broken_backend.py --mesh tp=2", "RuntimeError: this backend is broken"),
    ("explain broken_backend.py", "RuntimeError: this backend is broken"),
    ("trace mixed.py --mesh tp=2 --data", "got mixed torch.Tensor and DTensor"),
    ("trace wrong_mesh.py --mesh tp=2", "Give --mesh the axes that parallelize() uses."),
    ("memory wrong_mesh.py --mesh tp=2", "dp_shard"),
    ("parity wrong_mesh.py", "dp_shard"),
]
HINT = re.compile(
    r"shardscope: (1 line of warnings and logs is|\d+ lines of warnings and logs are) not shown\. "
    r"Run again with `shardscope --debug …` to see them\."
)
RUNNER = """
import sys
from shardscope.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["shardscope", *line.split()]
    try:
        main()
    except SystemExit as end:
        print(f"exit code {end.code}", file=sys.stderr, flush=True)
"""


def test_failing_commands_print_one_sentence_and_exit_with_2(here: Path) -> None:
    for name, text in TARGETS.items():
        (here / f"{name}.py").write_text(HEAD + text + TAIL)
    # One process for all: it is importing torch that takes time.
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input="\n".join(command for command, _ in CASES),
        capture_output=True,
        text=True,
        cwd=here,
        check=True,
    )
    hints = [line for line in done.stderr.splitlines() if HINT.fullmatch(line)]
    lines = [line for line in done.stderr.splitlines() if line not in hints]
    assert len(lines) == 2 * len(CASES), done.stderr
    assert 3 <= len(hints) < len(CASES), done.stderr  # only where something was not shown
    for (command, words), sentence, code in zip(CASES, lines[::2], lines[1::2], strict=True):
        assert code == "exit code 2", command
        assert sentence.startswith("shardscope: "), command
        assert words in sentence, (command, sentence)


def test_warnings_are_printed_if_the_command_succeeds_or_debugs(here: Path) -> None:
    target = TARGETS["reads_values"].replace(
        "return y * 2 if y.sum().item() > 0 else y", "return y"
    )
    (here / "train.py").write_text(HEAD + target + TAIL)
    (here / "fails.py").write_text(HEAD + TARGETS["reads_values"] + TAIL)
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input="trace train.py --mesh tp=2\n--debug trace fails.py --mesh tp=2",
        capture_output=True,
        text=True,
        cwd=here,
        check=True,
    )
    success, _, failure = done.stderr.partition("exit code 0\n")
    assert "UserWarning" in success
    assert "nothing" in success
    assert "UserWarning" in failure
    assert "Traceback (most recent call last)" in failure
