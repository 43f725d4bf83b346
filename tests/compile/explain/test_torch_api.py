"""torch's own names: its classes and how it prints them, with figures that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends import debugging

from shardscope import compat, explaining
from shardscope.compat import ExplainOutput, ExplainWithBackend


def function(x: torch.Tensor) -> torch.Tensor:
    x = torch.relu(x) + 1
    torch._dynamo.graph_break()
    return torch.sin(x) * 2


def run(backend: Any, target: Callable[..., Any] = function, **options: Any) -> Any:
    torch._dynamo.reset()
    torch.compile(target, backend=backend, **options)(torch.ones(4))
    return backend.output()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_where_torch_is_right_everything_is_printed_as_torch_does(backend: str) -> None:
    ours, torchs = run(ExplainWithBackend(backend)), run(debugging.ExplainWithBackend(backend))
    assert isinstance(ours, ExplainOutput)
    assert (ours.graph_count, ours.graph_break_count, ours.op_count) == (2, 1, 4)
    assert str(ours) == str(torchs)


def test_every_part_is_printed_as_torch_does() -> None:
    given: dict[str, Any] = {
        "graphs": [],
        "graph_count": 0,
        "graph_break_count": 0,
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


def no_graph(x: torch.Tensor) -> int:
    return 3


def methods(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).relu()


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        print(end="")
    return x + 1


def inner(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x + 1


def nested(x: torch.Tensor) -> torch.Tensor:
    return inner(x.sin()) * 2


FIGURES = {  # graphs, breaks, ops
    no_graph: (0, 0, 0),
    methods: (1, 0, 3),
    in_a_loop: (0, 1, 0),
    nested: (3, 1, 3),
    function: (2, 1, 4),
}


@pytest.mark.parametrize("target", FIGURES, ids=lambda one: one.__name__)
def test_figures_are_right_and_those_of_explaining(target: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    backend = ExplainWithBackend("eager")
    with explaining() as e:
        torch.compile(target, backend=backend)(torch.ones(4))
    wanted = (e.explanation.num_graphs, e.explanation.num_break_events, e.explanation.num_ops)
    for output in (backend.output(), compat.explain(target)(torch.ones(4))):
        figures = (output.graph_count, output.graph_break_count, output.op_count)
        assert figures == wanted == FIGURES[target]
        assert len(output.break_reasons) == output.graph_break_count
        assert str(output).startswith(f"Graph Count: {wanted[0]}\n")


def test_what_is_compiled_again_is_no_break() -> None:
    torch._dynamo.reset()
    backend = ExplainWithBackend("eager")
    compiled = torch.compile(methods, backend=backend, dynamic=False)
    for size in (2, 3):
        compiled(torch.ones(size))
    output = backend.output()
    assert (output.graph_count, output.graph_break_count) == (2, 0)


def test_what_other_backends_compile_is_not_counted() -> None:
    torch._dynamo.reset()
    backend = ExplainWithBackend("eager")
    torch.compile(function, backend="eager")(torch.ones(4))
    assert backend.output().graph_break_count == 0


def test_explain_gives_what_torchs_gives_and_changes_nothing() -> None:
    x, calls = torch.ones(4), [0]

    def counting(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x.add_(1)

    output = compat.explain(counting)(x)
    user_code = torch._dynamo.explain(lambda x: x.add_(1))(torch.ones(4))
    assert (x.tolist(), calls) == ([1.0] * 4, [0])
    assert type(output.out_guards[0]) is type(user_code.out_guards[0])
    assert output.ops_per_graph == [["add_"]]
    assert output.compile_times.startswith("TorchDynamo compilation metrics")
    with pytest.warns(FutureWarning, match="is deprecated"):
        assert compat.explain(counting, x).graph_count == 1


def test_what_the_function_raises_is_raised() -> None:
    def fail(x: torch.Tensor) -> None:
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        compat.explain(fail)(torch.ones(2))
