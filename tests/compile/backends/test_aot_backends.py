"""What the backends behind AOT autograd catch, and what they let pass."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from backend_cases import compute, honest, misjudged, run
from older_torch import TORCH
from shardscope.compile import backends
from shardscope.compile.backends.graph_backends import run_boxed


def compiled_with(backend: str, function: Any, options: dict[str, Any] | None = None) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend=f"shardscope_{backend}", options=options)


CROSSREF = "aot_eager_decomp_partition_crossref"


@pytest.mark.parametrize("options", [None, {"check": "all"}])
def test_crossref_catches_a_wrong_fake_of_a_custom_op(options: dict[str, str] | None) -> None:
    with pytest.raises(Exception, match=r"backend_cases\.misjudged.*(dtype|Dtype)"):
        compiled_with(CROSSREF, lambda x: misjudged(x).sin(), options)(torch.ones(2))


@pytest.mark.parametrize("check", ["custom_ops", "all"])
def test_crossref_accepts_a_correct_fake(check: str) -> None:
    options = {"check": check}
    assert compiled_with(CROSSREF, honest, options)(torch.ones(2)).tolist() == [2, 2]


def test_crossref_accepts_a_wrong_fake_if_it_is_off() -> None:
    compiled = compiled_with(CROSSREF, lambda x: misjudged(x).sin(), {"check": "off"})
    assert compiled(torch.ones(2)).dtype == torch.float64


def test_crossref_checks_torchs_own_ops_if_check_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing of aten's is wrong on purpose: which ops the check is asked of is what differs.
    asked: list[tuple[str, bool]] = []

    def note(is_trusted: Any) -> Any:
        op = torch.ops.aten.sin.default
        asked.append((str(op), bool(is_trusted is not None and is_trusted(op))))
        return torch.no_grad()

    monkeypatch.setattr("shardscope.compile.backends.graph_backends.check_fakes", note)
    for check in ("custom_ops", "all"):
        compiled_with(CROSSREF, torch.sin, {"check": check})(torch.ones(2))
    assert asked == [("aten.sin.default", True), ("aten.sin.default", False)]


def test_torchs_own_setting_is_the_default_of_crossref(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []

    def note(check: str) -> Any:
        checks.append(check)
        return run_boxed

    monkeypatch.setattr("shardscope.compile.backends.aot.checking_compiler", note)
    gm = torch.fx.symbolic_trace(lambda x: (torch.relu(x),))
    for setting in (False, "all"):
        with torch._functorch.config.patch(fake_tensor_crossref=setting):
            backends.aot_eager_decomp_partition_crossref(gm, [torch.ones(2)])
    assert checks == ["custom_ops", "all"]


def test_torchs_setting_makes_the_plain_backend_check_too() -> None:
    with (
        torch._functorch.config.patch(fake_tensor_crossref="custom_ops"),
        pytest.raises(Exception, match=r"backend_cases\.misjudged"),
    ):
        compiled_with("aot_eager_decomp_partition", misjudged)(torch.ones(2))


@pytest.mark.parametrize(
    "name", ["aot_eager", "aot_eager_default_partitioner", "aot_eager_decomp_partition"]
)
def test_aot_shows_a_wrong_fake_that_eager_lets_pass(name: str) -> None:
    def use(x: Tensor) -> Tensor:
        return misjudged(x).to(torch.float32)

    assert compiled_with("eager", use)(torch.ones(2)).dtype == torch.float32
    # The fake is said to be float32, so the cast is left out.
    assert compiled_with(name, use)(torch.ones(2)).dtype == torch.float64
    assert compiled_with(name, honest)(torch.ones(2)).dtype == torch.float32


def graphs_of(name: str, function: Any = compute) -> tuple[list[str], list[str]]:
    forward: list[torch.fx.GraphModule] = []
    backward: list[torch.fx.GraphModule] = []

    def keep_forward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        forward.append(gm)
        return run_boxed(gm, inputs)

    def keep_backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        backward.append(gm)
        return gm.forward  # one by one, not in a list

    options = {"fw_compiler": keep_forward, "bw_compiler": keep_backward}
    ran = run(f"shardscope_{name}", options, function=function)
    torch.testing.assert_close(tuple(ran), tuple(run(None, function=function)))
    return ops_in(forward), ops_in(backward)


def ops_in(graphs: list[torch.fx.GraphModule]) -> list[str]:
    (gm,) = graphs
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_compilers_of_the_users_get_the_graphs_of_each_stage() -> None:
    forward, backward = graphs_of("aot_eager")
    assert "aten._softmax.default" in forward
    assert "aten.threshold_backward.default" in backward
    forward, backward = graphs_of("aot_eager_decomp_partition")
    assert "aten._softmax.default" not in forward
    assert "aten.threshold_backward.default" not in backward


def test_the_default_partitioner_never_recomputes() -> None:
    def cheap(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin().cos().sin().cos()

    _, backward = graphs_of("aot_eager_default_partitioner", cheap)
    _, recomputing = graphs_of("aot_eager", cheap)
    # Two cosines and two sines are what the gradients of four such ops need.
    assert sum(op in ("aten.sin.default", "aten.cos.default") for op in backward) == 4
    assert sum(op in ("aten.sin.default", "aten.cos.default") for op in recomputing) > 4


def test_boxed_compilers_free_each_input_after_its_last_use() -> None:
    alive: list[bool] = []
    inputs = [torch.ones(2), torch.ones(3)]
    first = weakref.ref(inputs[0])

    def look(x: Tensor) -> Tensor:
        gc.collect()
        alive.append(first() is not None)
        return x + 1

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(torch.sum, (x,))
    seen = graph.call_function(look, (y,))
    graph.output((total, seen))
    compiled = run_boxed(torch.fx.GraphModule({}, graph), inputs)
    total, seen = compiled(inputs)
    assert (float(total), seen.tolist()) == (2, [2, 2, 2])
    assert alive == [False]
    assert inputs == []


def test_invoke_subgraph_stays_one_call_where_it_is_traced() -> None:
    gm = torch.fx.symbolic_trace(lambda x: (x.sin().cos(),))
    traced = {
        name: make_fx(getattr(backends, name)(gm, [torch.ones(2)]))(torch.ones(2))
        for name in ("invoke_subgraph", "aot_eager")
    }
    assert "invoke_subgraph" in ops_in([traced["invoke_subgraph"]])
    assert "aten.sin.default" not in ops_in([traced["invoke_subgraph"]])
    assert "aten.sin.default" in ops_in([traced["aot_eager"]])


def test_torchs_bisector_reaches_our_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.compiler_bisector import CompilerBisector

    asked: list[str] = []
    monkeypatch.setattr(
        CompilerBisector, "get_config_change", classmethod(lambda cls, name: asked.append(name))
    )
    run("shardscope_aot_eager_decomp_partition", has_grad=False)
    assert "aot_eager_decomp_partition" in asked


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:The TorchScript type")
@pytest.mark.parametrize("name", ["torchscript", "aot_ts"])
def test_torchscript_runs_where_torchs_own_fails(name: str) -> None:
    if TORCH < (2, 14):  # from then on torch's own runs it too
        torchs = "ts" if name == "torchscript" else name
        with pytest.raises(RuntimeError, match="method cannot be used as a value"):
            run(torchs, has_grad=False)
    compiled = run(f"shardscope_{name}")
    torch.testing.assert_close(tuple(compiled), tuple(run(None)))


def test_torchscript_reports_what_it_cannot_represent() -> None:
    def choose(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    assert compiled_with("eager", choose)(torch.zeros(2)).tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
        compiled_with("torchscript", choose)(torch.zeros(2))
