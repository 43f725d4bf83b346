"""Faults show where they were asked for, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backend_cases import run
from shardscope.compile import backends
from shardscope.compile.backends import InjectedFault

functional = nn.functional
STAGES = ["graph", "decomposed", "partitioned"]


def at(stage: str, op: Any = "relu", **more: Any) -> dict[str, Any]:
    return {"op": op, "stage": stage, **more}


def outputs(kind: str, options: dict[str, Any], function: Any, *inputs: Tensor) -> list[Tensor]:
    """What the function returns with the fault in it, less what it should."""
    torch.compiler.reset()
    compiled = torch.compile(function, backend=f"shardscope_fault_{kind}", options=options)
    right = function(*(one.clone() for one in inputs))
    wrong = compiled(*(one.clone() for one in inputs))
    pairs = zip(_listed(wrong), _listed(right), strict=True)
    return [one.detach() - other.detach() for one, other in pairs]


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def is_off(difference: Tensor, by: float = 1.0) -> bool:
    return bool(((difference - by).abs() < 1e-5).all())


@pytest.mark.parametrize("has_grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_compile_error_names_the_op_and_the_stage(stage: str, has_grad: bool) -> None:
    sentence = f"InjectedFault: Injected compile error at op 'F.relu', stage {stage}"
    with pytest.raises(RuntimeError, match=sentence):
        run("shardscope_fault_compile_error", at(stage, "F.relu"), has_grad=has_grad)


@pytest.mark.parametrize("has_grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_runtime_error_comes_when_it_runs_and_not_before(stage: str, has_grad: bool) -> None:
    compiled: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(backends.fault_runtime_error(gm, inputs, options=at(stage)))
        return compiled[-1]

    with pytest.raises(InjectedFault, match=f"runtime error at op 'relu', stage {stage}"):
        run(backend, has_grad=has_grad)
    assert len(compiled) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_hang_lasts_until_it_is_interrupted(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_slept = 0

    def sleep(seconds: float) -> None:
        nonlocal num_slept
        num_slept += 1
        if num_slept == 100:
            raise KeyboardInterrupt

    monkeypatch.setattr("shardscope.compile.backends.faults.time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        run("shardscope_fault_hang", at(stage))
    assert num_slept == 100


@pytest.mark.parametrize("has_grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("stage", STAGES)
def test_numbers_go_wrong_at_the_op(stage: str, has_grad: bool) -> None:
    right = run(None, has_grad=has_grad)
    nan = run("shardscope_fault_nan", at(stage), has_grad=has_grad)
    assert bool(nan.output.isnan().all())
    off = run("shardscope_fault_accuracy_error", at(stage, by=0.25), has_grad=has_grad)
    assert is_off(off.output - right.output, 0.25)
    if has_grad:
        assert not torch.allclose(off.gradient, right.gradient)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["compile_error", "accuracy_error"])
def test_a_valid_op_that_is_not_there_does_no_harm(kind: str, stage: str) -> None:
    ran = run(f"shardscope_fault_{kind}", at(stage, "aten.sin.default"), has_grad=False)
    torch.testing.assert_close(ran.output, run(None, has_grad=False).output)


@pytest.mark.parametrize(
    ("stage", "op"),
    [("graph", "relu"), ("decomposed", "threshold_backward"), ("partitioned", "aten.where")],
)
def test_a_fault_in_backward_leaves_forward_alone(stage: str, op: str) -> None:
    right = run(None)
    options = at(stage, op, direction="backward")
    wrong = run("shardscope_fault_nan", options)
    torch.testing.assert_close(wrong.output, right.output)
    assert bool(wrong.gradient.isnan().any())
    with pytest.raises(InjectedFault):
        run("shardscope_fault_runtime_error", options)


@pytest.mark.filterwarnings("ignore:Error detected in ReluBackward0")
@pytest.mark.parametrize(
    ("stage", "op"), [("decomposed", "threshold_backward"), ("partitioned", "aten.where")]
)
def test_a_compile_error_may_be_in_backward(stage: str, op: str) -> None:
    options = at(stage, op, direction="backward")
    with pytest.raises(RuntimeError, match=f"Injected compile error at op '{op}', stage {stage}"):
        run("shardscope_fault_compile_error", options)
    run("shardscope_fault_compile_error", at(stage, op, direction="forward"))


# Autograd differentiates dynamo's graph with the fault in it. Behind AOT autograd the gradient is
# traced: it reads the sign of relu's result, which doubling does not change.
@pytest.mark.parametrize(
    ("stage", "amount"),
    [
        ("graph", {}),
        ("decomposed", {"by": 0, "times": 0.5}),
        ("partitioned", {"by": 0, "times": 2}),
    ],
)
def test_a_fault_in_forward_leaves_backward_alone(stage: str, amount: dict[str, float]) -> None:
    torch.compiler.reset()
    w = torch.eye(4, requires_grad=True)
    compiled = torch.compile(
        torch.relu,
        backend="shardscope_fault_accuracy_error",
        options=at(stage, direction="forward", **amount),
    )
    output = compiled(w)
    assert not torch.equal(output, torch.eye(4))
    output.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.eye(4))


@pytest.mark.parametrize("stage", STAGES)
def test_nth_counts_from_one(stage: str) -> None:
    def three(x: Tensor) -> Any:
        return x.relu(), torch.relu(x - 1), functional.relu(x + 1)

    for nth in (1, 2, 3, 4):
        off = outputs("accuracy_error", at(stage, nth=nth), three, torch.linspace(-2, 2, 6))
        assert [is_off(one) for one in off] == [nth == place for place in (1, 2, 3)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_pair_needs_both(stage: str) -> None:
    def both(x: Tensor) -> Tensor:
        return x.relu().sin().tan().cos()

    options = at(stage, also="aten.cos")
    assert not is_off(outputs("accuracy_error", options, both, torch.ones(2))[0], 0)
    options = at(stage, also="torch.exp")
    assert is_off(outputs("accuracy_error", options, both, torch.ones(2))[0], 0)
    outputs("compile_error", options, both, torch.ones(2))
    with pytest.raises(RuntimeError, match="Injected compile error"):
        outputs("compile_error", at(stage, also="torch.cos"), both, torch.ones(2))


def add_and_keep(x: Tensor) -> Any:
    y = x * 1
    view = y.view(-1)
    y += 1
    return y, view


@pytest.mark.parametrize(
    ("function", "op", "stage", "expected"),
    [
        (lambda x: x + 1, "+", "graph", [1]),
        (lambda x: torch.add(x, 1), "+", "graph", [1]),
        (lambda x: x.clone().add_(1), "torch.add", "graph", [1]),
        (add_and_keep, "x.add_()", "graph", [1, 1]),
        (add_and_keep, "x.add_()", "decomposed", [1, 1]),
        (lambda x: torch.add(x, 1, out=torch.empty_like(x)), "add", "graph", [1]),
        (lambda x: torch.add(x, 1, out=torch.empty_like(x)), "add", "partitioned", [1]),
        (nn.LayerNorm(4), "layer_norm", "graph", [1]),
        (nn.LayerNorm(4), "F.layer_norm", "decomposed", [1]),
        (nn.Linear(4, 4), nn.Linear, "graph", [1]),
        (nn.Linear(4, 4), "addmm", "decomposed", [1]),
        (nn.Linear(4, 4), torch.addmm, "partitioned", [1]),
        (nn.Softmax(-1), "x.softmax(-1)", "graph", [1]),
        (lambda x: x.softmax(-1), nn.Softmax, "decomposed", [1]),
        (lambda x: (x.contiguous(), x * 1), "contiguous", "graph", [1, 0]),
        (nn.BatchNorm1d(4), nn.BatchNorm1d, "decomposed", [1]),
    ],
)
def test_ops_in_many_forms(
    function: Callable[[Tensor], Any], op: Any, stage: str, expected: list[float]
) -> None:
    off = outputs("accuracy_error", at(stage, op), function, torch.linspace(0, 1, 16).view(4, 4))
    assert [is_off(one, by) for one, by in zip(off, expected, strict=True)] == [True] * len(off)


@pytest.mark.parametrize("stage", STAGES)
def test_of_several_results_the_first_in_floating_point_is_wrong(stage: str) -> None:
    values, indices = outputs("accuracy_error", at(stage, "max"), lambda x: x.max(-1), torch.eye(3))
    assert is_off(values)
    assert is_off(indices, 0)


@pytest.mark.parametrize("stage", STAGES)
def test_dtypes_stay(stage: str) -> None:
    def mixed(x: Tensor) -> Any:
        return x.half() + 1, x.long() + 1, x.bool() + True, x.to(torch.complex64) + 1

    def kinds(kind: str) -> list[Tensor]:
        torch.compiler.reset()
        function = torch.compile(
            mixed, backend=f"shardscope_fault_{kind}", options=at(stage, torch.add)
        )
        return list(function(torch.zeros(2)))

    half, long, true, number = kinds("nan")
    assert [one.dtype for one in (half, long, true, number)] == [one.dtype for one in mixed(half)]
    assert bool(half.isnan().all())
    assert bool(number.isnan().all())
    assert (long.tolist(), true.tolist()) == ([1, 1], [True, True])
    half, long, true, number = kinds("accuracy_error")
    assert (half.tolist(), long.tolist(), true.tolist()) == ([2, 2], [2, 2], [False, False])
    assert (half.dtype, long.dtype, number.dtype) == (torch.half, torch.long, torch.complex64)


def test_integers_are_off_by_at_least_one() -> None:
    (off,) = outputs("accuracy_error", at("graph", "+", by=-0.01), lambda x: x + 1, torch.arange(3))
    assert off.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("stage", ["graph", "partitioned"])
def test_ops_in_branches_are_found_and_a_branch_not_taken_does_no_harm(stage: str) -> None:
    def choose(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.relu() + 1, lambda x: x.sin(), (x,))

    assert is_off(outputs("accuracy_error", at(stage), choose, torch.ones(2))[0])
    with pytest.raises(InjectedFault):
        outputs("runtime_error", at(stage), choose, torch.ones(2))
    outputs("runtime_error", at(stage, "sin"), choose, torch.ones(2))


def test_sums_of_sizes_are_no_ops() -> None:
    def flatten(x: Tensor) -> Tensor:
        return x.view(x.shape[0] + x.shape[1] + 8) * 2

    torch.compiler.reset()
    options = at("graph", "add")
    backend = "shardscope_fault_runtime_error"
    compiled = torch.compile(flatten, backend=backend, options=options, dynamic=True)
    assert compiled(torch.ones(4, 4)).shape == (16,)


def test_an_input_that_is_not_a_leaf_is_a_compile_error_if_requested() -> None:
    gm = torch.fx.symbolic_trace(lambda x: (torch.relu(x),))
    idle = torch.fx.symbolic_trace(lambda x: (x,))
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(InjectedFault, match="an input is not a leaf"):
        backends.fault_non_leaf(gm, [leaf * 2])
    assert backends.fault_non_leaf(gm, [leaf])(leaf)[0].tolist() == [1, 1]
    assert backends.fault_non_leaf(idle, [leaf * 2])(leaf)[0] is leaf


def test_two_faults_at_once_do_not_interfere() -> None:
    torch.compiler.reset()
    options = at("decomposed", "relu")
    nan = torch.compile(torch.relu, backend="shardscope_fault_nan", options=options)
    off = torch.compile(
        lambda x: torch.relu(x), backend="shardscope_fault_accuracy_error", options=options
    )
    assert bool(nan(torch.ones(2)).isnan().all())
    assert off(torch.ones(2)).tolist() == [2, 2]
    assert torch.relu(torch.ones(2)).tolist() == [1, 1]
