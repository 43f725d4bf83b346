"""What the backends that run dynamo's graph catch, and what they let pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backend_cases import compute, honest, lying, misjudged, picky, run
from shardscope.compile import backends
from shardscope.errors import GraphRunError


def compiled_with(backend: str, function: Any, options: dict[str, Any] | None = None) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend=f"shardscope_{backend}", options=options)


def test_eager_accepts_every_graph_that_runs() -> None:
    assert compiled_with("eager", lying)(torch.ones(2)).tolist() == [4, 4]
    assert compiled_with("eager", misjudged)(torch.ones(2)).dtype == torch.float64


def test_eager_raises_what_the_graph_raises() -> None:
    with pytest.raises(ValueError, match="picky takes no negative numbers"):
        compiled_with("eager", picky)(-torch.ones(2))


def test_eager_noexcept_wraps_what_the_graph_raises_and_names_the_place() -> None:
    with pytest.raises(GraphRunError) as caught:
        compiled_with("eager_noexcept", lambda x: picky(x.neg()))(torch.ones(2))
    assert isinstance(caught.value.__cause__, ValueError)
    sentence = str(caught.value)
    assert sentence.startswith("The graph that dynamo captured raised an error when it ran at `")
    assert "torch.ops.backend_cases.picky" in sentence
    assert "ValueError: picky takes no negative numbers" in sentence


def test_eager_noexcept_begins_with_the_message_given_and_lets_interrupts_pass() -> None:
    options = {"message": "Layer 3 failed"}
    with pytest.raises(GraphRunError, match=r"^Layer 3 failed at `"):
        compiled_with("eager_noexcept", picky, options)(-torch.ones(2))

    def interrupt(x: Tensor) -> Any:
        raise KeyboardInterrupt

    graph = torch.fx.Graph()
    graph.output(graph.call_function(interrupt, (graph.placeholder("x"),)))
    run_graph = backends.eager_noexcept(torch.fx.GraphModule({}, graph), [torch.ones(2)])
    with pytest.raises(KeyboardInterrupt):
        run_graph(torch.ones(2))


def test_eager_debug_reports_a_wrong_schema_and_accepts_a_correct_one() -> None:
    with pytest.raises(RuntimeError, match="not defined as mutable but was mutated") as caught:
        compiled_with("eager_debug", lying)(torch.ones(2))
    assert "backend_cases.lying" in str(caught.value)
    assert compiled_with("eager_debug", honest)(torch.ones(2)).tolist() == [2, 2]


def test_eager_debug_accepts_a_wrong_fake_and_ops_that_take_functions() -> None:
    assert compiled_with("eager_debug", misjudged)(torch.ones(2)).dtype == torch.float64

    def choose(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    assert compiled_with("eager_debug", choose)(torch.zeros(2)).tolist() == [1, 1]


def test_pre_dispatch_eager_prints_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    run("shardscope_pre_dispatch_eager")
    assert capsys.readouterr().out == ""
    run("shardscope_pre_dispatch_eager", {"print": True})
    # Ops as they are before autograd and decomposition: composite ones among them.
    printed = capsys.readouterr().out
    assert "torch.ops.aten.matmul.default" in printed
    assert "torch.ops.aten.softmax.int" in printed


def test_pre_dispatch_eager_does_not_run_the_graph_to_trace_it() -> None:
    calls = []

    def add_in_place(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    x = torch.zeros(2)
    calls.append(compiled_with("pre_dispatch_eager", add_in_place)(x))
    assert x.tolist() == [1, 1]
    assert calls[0].tolist() == [2, 2]


@pytest.mark.parametrize("dynamic", [False, True])
def test_pre_dispatch_eager_knows_tensors_that_the_graph_makes(dynamic: bool) -> None:
    def fill(x: Tensor) -> Tensor:
        y = x + torch.arange(3)
        y[0] = 7
        return y

    torch.compiler.reset()
    compiled = torch.compile(fill, backend="shardscope_pre_dispatch_eager", dynamic=dynamic)
    assert compiled(torch.ones(3)).tolist() == [7, 2, 3]


def test_pre_dispatch_eager_catches_what_cannot_be_traced_so_early() -> None:
    def repeat(x: Tensor) -> Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False)

    x = torch.ones(2, requires_grad=True)
    torch.testing.assert_close(compiled_with("eager", repeat)(x), x.sin())
    with pytest.raises(RuntimeError, match="While executing %tag_activation_checkpoint"):
        compiled_with("pre_dispatch_eager", repeat)(x)


class Functions(TorchFunctionMode):
    """Notes what is called in it."""

    def __init__(self, seen: list[str], *, mark: str = "") -> None:
        super().__init__()
        self.seen, self.mark = seen, mark

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{self.mark}{func.__name__}")
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Notes which ops are dispatched in it."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_eager_with_modes_shows_each_function_to_the_modes_at_every_call() -> None:
    seen: list[str] = []
    modes = [Functions(seen, mark="outer "), lambda: Functions(seen, mark="inner ")]
    compiled = compiled_with("eager_with_modes", lambda x: x.sin().relu(), {"modes": modes})
    for _ in range(2):
        compiled(torch.ones(2))
    assert seen == ["inner sin", "outer sin", "inner relu", "outer relu"] * 2


def test_eager_with_modes_leaves_the_modes_when_the_graph_raises() -> None:
    seen: list[str] = []
    compiled = compiled_with("eager_with_modes", picky, {"modes": [Functions(seen)]})
    with pytest.raises(ValueError, match="picky"):
        compiled(-torch.ones(2))
    seen.clear()
    torch.ones(2).sin()
    assert seen == []


def test_with_mode_shows_aten_ops_of_forward_and_backward() -> None:
    seen: list[str] = []
    run("shardscope_aot_eager_decomp_partition_with_mode", {"mode": Ops(seen)})
    assert "aten.relu.default" in seen
    # Inductor's decompositions have taken softmax apart, and tanh's gradient.
    assert "aten._softmax.default" not in seen
    assert seen.index("aten.relu.default") < len(seen) - seen[::-1].index("aten.mm.default") - 1
    eager: list[str] = []
    with Ops(eager):
        run(None, function=compute)
    assert "aten._softmax.default" in eager
