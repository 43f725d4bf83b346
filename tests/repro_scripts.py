"""Fragments captured from functions, and what has to hold of the scripts that they become."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx

from shardscope.compile.diagnose.accuracy.check_result import CheckResult
from shardscope.compile.diagnose.subgraph.subgraph import Subgraph
from shardscope.record import Condition

__all__ = ["WRONG", "assert_same", "assert_tidy", "capture", "copy_inputs", "load"]

WRONG = CheckResult(Condition.WRONG_RESULT, fact="output 0 is off")


def capture(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Subgraph:
    """The first graph that dynamo makes of a call, with its inputs."""
    found: list[Subgraph] = []

    def keep(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            if not found:
                subgraph = Subgraph(graph, copy_inputs(inputs), torch.is_grad_enabled())
                found.append(replace(subgraph, has_symbolic_sizes=dynamic or False))
            return graph.forward(*inputs)

        return call

    torch.compiler.reset()
    torch.compile(function, backend=keep, dynamic=dynamic)(*args)
    return found[0]


def copy_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value in inputs
    )


_NUMBERS = count()


def load(path: Path, name: str = "") -> dict[str, Any]:
    """What a script defines; under the name `__main__` it runs, too."""
    name = name or f"repro_{next(_NUMBERS)}"  # dynamo remembers modules by their names
    module = ModuleType(name)
    module.__file__ = str(path)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        exec(compile(path.read_text(encoding="utf-8"), "repro.py", "exec"), vars(module))
    finally:
        if name == "__main__" and before is not None:
            sys.modules[name] = before
    return vars(module)


def assert_same(subgraph: Subgraph, path: Path) -> str:
    """Check that the script computes, bit for bit, what the subgraph computes; returns its text."""
    scope = load(path)
    # FX's own code for a graph gets `(-1) ** x` wrong.
    graph = fx.Interpreter(subgraph.graph).run
    constants = scope["make_inputs"]()[len(subgraph.inputs) :]
    expected = scope["run"](graph, copy_inputs(subgraph.inputs), subgraph.with_gradients)
    inputs = scope["make_inputs"]()
    found = scope["run"](scope["f"], inputs, subgraph.with_gradients)
    assert len(inputs) == len(subgraph.inputs) + len(constants)
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert tensors
    for name, value in tensors.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)
        assert found[name].stride() == value.stride()
    return path.read_text()


def assert_tidy(text: str) -> None:
    """Valid, readable, without addresses, and with no import but of torch and Python."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            root = module.split(".")[0]
            assert root == "torch" or root in sys.stdlib_module_names
    assert not re.search(r"0x[0-9a-f]{6}", text)
    assert str(Path(__file__).parents[1]) not in text
    assert max(map(len, text.splitlines())) <= 100
