"""torch's own names: what it counts, and how it prints it, with any backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends import debugging

from shardscope.compat import ExplainOutput, ExplainWithBackend


def function(x: torch.Tensor) -> torch.Tensor:
    x = torch.relu(x) + 1
    torch._dynamo.graph_break()
    return x.sin() * 2


def run(backend: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    torch.compile(function, backend=backend, **options)(torch.ones(4))
    return backend.output()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_counts_and_print_are_torchs(backend: str) -> None:
    ours, torchs = run(ExplainWithBackend(backend)), run(debugging.ExplainWithBackend(backend))
    assert isinstance(ours, ExplainOutput)
    assert (ours.graph_count, ours.graph_break_count, ours.op_count) == (2, 1, 3)
    assert str(ours) == str(torchs)


def test_every_part_is_printed_as_torch_does() -> None:
    given: dict[str, Any] = {
        "graphs": [],
        "graph_count": 0,
        "graph_break_count": -1,
        "break_reasons": [],
        "op_count": 0,
        "ops_per_graph": [["add", "mul"], []],
        "out_guards": ["a guard\n"],
        "compile_times": "long",
    }
    assert str(ExplainOutput(**given)) == str(debugging.ExplainOutput(**given))


def test_a_function_is_a_backend_and_gets_the_options() -> None:
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        seen.append(options)
        return graph.forward

    explained = ExplainWithBackend(backend)
    assert run(explained, options={"speed": 3}).graph_count == 2  # with torch's, a TypeError
    assert seen == [{"options": {"speed": 3}}] * 2


def test_no_graph_is_minus_one_break_as_in_torch() -> None:
    torch._dynamo.reset()
    explained = ExplainWithBackend("eager")
    torch.compile(lambda: 3, backend=explained)()
    assert explained.output().graph_break_count == -1
