"""Finds the stage that causes a failure, with faults that are put into each stage."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from plain_judge import capture, judge, locate_stage_here
from shardscope.compile.diagnose.accuracy.check_result import CheckResult
from shardscope.compile.diagnose.stage_bisect.attempt import check_with_parts_disabled
from shardscope.compile.diagnose.stage_bisect.bisect import (
    StageFinding,
    StageToggles,
    locate_stage,
)
from shardscope.compile.diagnose.subgraph.subgraph import Compiler, Subgraph
from shardscope.record import Condition, Phase, Stage

aten = torch.ops.aten


def program(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x * 2).relu() + 1


def make_subgraph(function: Callable[..., Any] = program, *, with_gradients: bool) -> Subgraph:
    x = torch.linspace(-2, 2, 12).reshape(3, 4).requires_grad_(with_gradients)
    return capture(function, x, with_gradients=with_gradients)


def locate(
    subgraph: Subgraph, backend: Any, condition: Condition = Condition.WRONG_RESULT
) -> StageFinding:
    compiler = Compiler(backend)
    outcome = judge(subgraph, compiler)
    assert outcome.condition is condition, outcome
    return locate_stage_here(subgraph, compiler, outcome=outcome)


def run_as_is(graph: fx.GraphModule, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


def change(op: Any, into: Any) -> Callable[[fx.GraphModule], None]:
    def apply(graph: fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            if node.target is op:
                node.target = into
        graph.recompile()

    return apply


def breaking_compiler(op: Any, into: Any) -> Callable[..., Any]:
    def compile_graph(graph: fx.GraphModule, inputs: Any) -> Any:
        change(op, into)(graph)
        return make_boxed_func(graph.forward)

    return compile_graph


def raise_it(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("broken on purpose")


def raise_when_run(graph: fx.GraphModule, inputs: Any) -> Any:
    return make_boxed_func(raise_it)


def wrong_silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x) * 1.5


def broken_partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    forward, backward = default_partition(joint, joint_inputs, **kwargs)
    change(aten.threshold_backward.default, lambda grad, *_: grad)(backward)
    for node in backward.graph.nodes:
        if node.name == "threshold_backward":
            node.target = aten.threshold_backward.default
            node.args = (node.args[0], node.args[1], -10)
    backward.recompile()
    return forward, backward


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_backend_that_compiles_what_aot_hands_it_wrongly_is_located_with_the_op(
    with_gradients: bool,
) -> None:
    broken = aot_autograd(fw_compiler=breaking_compiler(aten.relu.default, aten.neg.default))
    finding = locate(make_subgraph(with_gradients=with_gradients), broken)
    assert (finding.stage, finding.part) == (Stage.BACKEND, "aten.relu.default")
    assert finding.phase is Phase.FORWARD


def test_a_backend_that_compiles_backward_wrongly_is_located_with_the_op_of_backward() -> None:
    op = aten.silu_backward.default
    broken = aot_autograd(
        fw_compiler=run_as_is, bw_compiler=breaking_compiler(op, lambda grad, x: grad * 3)
    )
    finding = locate(make_subgraph(with_gradients=True), broken)
    assert (finding.stage, finding.phase) == (Stage.BACKEND, Phase.BACKWARD)
    assert finding.part == "aten.silu_backward.default"


def test_a_backend_without_aot_autograd_is_the_cause() -> None:
    def broken(graph: fx.GraphModule, inputs: Any) -> Any:
        change(operator.add, operator.sub)(graph)
        return graph

    finding = locate(make_subgraph(with_gradients=False), broken)
    assert finding == StageFinding(
        Stage.BACKEND,
        phase=Phase.FORWARD,
        notes=("The backend does not get as far as AOT autograd.",),
    )


def test_a_backend_that_changes_the_graph_before_aot_autograd_is_the_cause_and_aot_is_not() -> None:
    def broken(graph: fx.GraphModule, inputs: Any) -> Any:
        change(operator.add, operator.sub)(graph)
        return aot_autograd(fw_compiler=run_as_is)(graph, inputs)

    finding = locate(make_subgraph(with_gradients=True), broken)
    assert (finding.stage, finding.part) == (Stage.BACKEND, "outside of AOT autograd")


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_wrong_decomposition_is_located_by_name(with_gradients: bool) -> None:
    broken = aot_autograd(
        fw_compiler=run_as_is,
        decompositions={
            aten.silu.default: wrong_silu,
            aten.relu.default: lambda x: torch.clamp_min(x, 0),
        },
    )
    finding = locate(make_subgraph(with_gradients=with_gradients), broken)
    assert (finding.stage, finding.part) == (Stage.DECOMPOSITION, "decomposition of aten.silu")


def test_a_decomposition_that_raises_is_located_by_name() -> None:
    broken = aot_autograd(
        fw_compiler=run_as_is,
        decompositions={
            aten.mul.Tensor: lambda x, y: torch.mul(y, x) if isinstance(y, torch.Tensor) else x + x,
            aten.silu.default: raise_it,
        },
    )
    finding = locate(make_subgraph(with_gradients=True), broken, Condition.COMPILE_ERROR)
    assert (finding.stage, finding.part) == (Stage.DECOMPOSITION, "decomposition of aten.silu")


def test_a_wrong_partition_is_located_with_the_op_that_it_changed() -> None:
    broken = aot_autograd(fw_compiler=run_as_is, partition_fn=broken_partition)
    finding = locate(make_subgraph(with_gradients=True), broken)
    assert (finding.stage, finding.phase) == (Stage.PARTITION, Phase.BACKWARD)
    assert finding.part == (
        "aten.threshold_backward.default in the backward graph, in broken_partition"
    )


def test_a_partition_that_raises_is_located_by_name() -> None:
    broken = aot_autograd(fw_compiler=run_as_is, partition_fn=raise_it)
    finding = locate(make_subgraph(with_gradients=True), broken, Condition.COMPILE_ERROR)
    assert (finding.stage, finding.part) == (Stage.PARTITION, "raise_it")


@pytest.mark.parametrize(
    ("compile_graph", "condition"),
    [(raise_it, Condition.COMPILE_ERROR), (raise_when_run, Condition.RUNTIME_ERROR)],
)
def test_compilers_that_raise_and_code_that_raises_are_the_backends(
    compile_graph: Any, condition: Condition
) -> None:
    broken = aot_autograd(fw_compiler=compile_graph)
    finding = locate(make_subgraph(with_gradients=False), broken, condition)
    assert finding.stage is Stage.BACKEND


def test_aot_autograd_is_the_cause_of_what_every_backend_that_uses_it_gets_wrong() -> None:
    with torch.library._scoped_library("shardscope_stages", "DEF") as library:
        library.define("half(Tensor x) -> Tensor")
        library.impl("half", lambda x: x[:2].clone(), "CPU")
        library._register_fake("half", lambda x: x.new_empty(7, 7))

        def lying(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.shardscope_stages.half(x).relu()

        graph = fx.symbolic_trace(lying)
        nodes = graph.graph
        last = next(node for node in nodes.nodes if node.op == "output")
        with nodes.inserting_before(last):
            view = nodes.call_method("view", (last.args[0], 8))
        last.args = ((view,),)
        graph.recompile()
        subgraph = Subgraph(graph, (torch.ones(3, 4),), with_gradients=False)
        finding = locate(subgraph, aot_autograd(fw_compiler=run_as_is), Condition.COMPILE_ERROR)
    assert (finding.stage, finding.part) == (Stage.AOT, "")


def test_a_decomposition_that_kills_the_process_is_found_by_trials_in_others() -> None:
    """What raises here stands for what would end the process: nothing more is known of it."""

    def deadly(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.shardscope_stages.die(x)

    with torch.library._scoped_library("shardscope_stages", "DEF") as library:
        library.define("die(Tensor x) -> Tensor")
        library.impl("die", raise_it, "CPU")
        library._register_fake("die", torch.empty_like)
        table = {
            aten.mul.Tensor: lambda x, y: torch.add(x, x, alpha=y - 1),
            aten.relu.default: deadly,
        }
        compiler = Compiler(aot_autograd(fw_compiler=run_as_is, decompositions=table))
        subgraph = make_subgraph(with_gradients=False)
        dead = CheckResult(Condition.CRASH, error="SIGSEGV")

        def ask(toggles: StageToggles) -> CheckResult:
            toggles = pickle.loads(pickle.dumps(toggles))
            result = check_with_parts_disabled(
                subgraph, compiler, toggles, check_accuracy=judge, phase=Phase.FORWARD
            )
            result = pickle.loads(pickle.dumps(result))
            return dead if result.condition is Condition.RUNTIME_ERROR else result

        finding = locate_stage(ask, outcome=dead)
    assert (finding.stage, finding.part) == (Stage.DECOMPOSITION, "decomposition of aten.relu")
