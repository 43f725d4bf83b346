"""Which ops an error points at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from shardscope.compile.backends import fault_runtime_error
from shardscope.compile.diagnose.accuracy.check_result import find_hints


def compute(x: torch.Tensor) -> torch.Tensor:
    first = x + 1
    second = first.relu()
    return second * 2


@pytest.mark.parametrize("stage", ["graph", "decomposed", "partitioned"])
@pytest.mark.parametrize("has_grad", [False, True])
def test_an_op_that_the_compiler_made_of_another_points_at_the_other(
    stage: str, has_grad: bool
) -> None:
    names: list[str] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        names.extend(node.name for node in graph.graph.nodes)
        return fault_runtime_error(graph, inputs, options={"op": "relu", "stage": stage})

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="Injected") as caught:
        torch.compile(compute, backend=backend)(torch.ones(3, requires_grad=has_grad))
    torch.compiler.reset()
    known = [name for name in find_hints(caught.value) if name in names]
    assert "second" in names
    assert known == ([] if stage == "graph" else ["second"])
