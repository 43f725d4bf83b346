"""Where the package is installed, its backends work by name and nobody is offered them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]

_LOOK = """
import sys, torch
assert "torch._dynamo" not in sys.modules, "to import torch takes no longer"
offered = torch.compiler.list_backends()
assert "inductor" in offered
print([name for name in offered if name.startswith("shardscope")])
print(len([name for name in torch.compiler.list_backends(exclude_tags=()) if "shardscope" in name]))
assert not any(name.startswith("shardscope.compile") for name in sys.modules)
print(torch.compile(lambda x: x + 1, backend="shardscope_eager")(torch.ones(1)).item())
try:
    fault = {"backend": "shardscope_fault_compile_error", "options": {"op": "relu"}}
    torch.compile(torch.relu, **fault)(torch.ones(1))
except Exception as error:
    print(type(error).__name__, "Injected compile error" in str(error))
assert torch.compiler.list_backends() == offered, "using them changes nothing"
"""


def install(folder: Path) -> int:
    """What an installation leaves for Python to find; the number of our backends."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    info = folder / "shardscope-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardscope\nVersion: 1.0\n")
    lines = (
        [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        for group, entries in groups.items()
    )
    (info / "entry_points.txt").write_text("\n".join(line for part in lines for line in part))
    return len(groups["torch_dynamo_backends"])


def test_backends_work_by_name_and_are_not_in_torchs_list(tmp_path: Path) -> None:
    num_backends = install(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    result = subprocess.run(
        [sys.executable, "-c", _LOOK],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "[]",
        str(num_backends),
        "2.0",
        "BackendCompilerFailed True",
    ]
