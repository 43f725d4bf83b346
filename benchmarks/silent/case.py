"""What a program in `cases/` says of itself.

A case is a TARGET of `shardscope parity`: it defines `model()`, `batch(model)`, `optimizer(model)`,
`train_step(model, batch, optimizer)` for the single device, perhaps `parallelize(model, mesh)`, and
`parallel_train_step(model, batch, optimizer, mesh)` where ranks take another step. `CASE` describes
it. Code that is wrong in one variant and right in the other asks `is_buggy()`, once, when the file
is imported; the wrong line, or the line where a right one is missing, ends with `# BUG`.

    SILENT_BUG=corrected shardscope parity benchmarks/silent/cases/undivided_heads.py --mesh tp=2
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import final


def is_buggy() -> bool:
    """Whether this process runs the variant with the bug; SILENT_BUG=corrected runs the other."""
    return os.environ.get("SILENT_BUG", "buggy") == "buggy"


@final
@dataclass(frozen=True)
class Case:
    """A silent bug: where it was found, and what a tool should say about it.

    `locations` are the names of modules or subjects that are right to blame, as patterns; the
    statement with the comment `# BUG` is always right, and so is its function unless that is an
    entire step (see `scoring.py`). `causes` are the values of `Suspect` that are right.
    """

    source: str  # such as "torchtitan 179d9e100", or "classic"
    summary: str  # what is wrong, and what users saw
    mesh: Mapping[str, int]
    causes: tuple[str, ...]
    locations: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = ()
    batch_dim: int = 0
    num_steps: int = 2


_FOLDER = Path(__file__).parent / "cases"


def list_cases() -> list[str]:
    """The names of all cases."""
    return sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem != "__init__")


def find_file(name: str) -> Path:
    """The program of a case."""
    return _FOLDER / f"{name}.py"


def load_case(name: str, *, is_buggy: bool) -> ModuleType:
    """Import the program of a case in one variant; the module is a new one each time."""
    variant = "buggy" if is_buggy else "corrected"
    spec = importlib.util.spec_from_file_location(f"silent_{name}_{variant}", find_file(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = os.environ.get("SILENT_BUG")
    os.environ["SILENT_BUG"] = variant
    try:
        spec.loader.exec_module(module)
    finally:
        os.environ.pop("SILENT_BUG")
        if before is not None:
            os.environ["SILENT_BUG"] = before
    return module
