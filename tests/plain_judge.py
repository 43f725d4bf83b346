"""A simple accuracy check: compares a compiled subgraph with eager execution."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardscope.compile.diagnose.accuracy.check_result import CheckResult, make_signature
from shardscope.compile.diagnose.stage_bisect.attempt import check_with_parts_disabled
from shardscope.compile.diagnose.stage_bisect.bisect import (
    StageFinding,
    StageToggles,
    locate_stage,
)
from shardscope.compile.diagnose.subgraph.subgraph import Compiler, Subgraph
from shardscope.record import Condition, Phase

__all__ = ["capture", "judge", "locate_stage_here"]


def capture(function: Any, *inputs: Any, with_gradients: bool = True) -> Subgraph:
    """The one graph that dynamo makes of a function, with the inputs in its order."""
    seen: list[Subgraph] = []

    def keep(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append(Subgraph(graph, tuple(example_inputs), with_gradients))
        return graph

    torch.compile(function, backend=keep, dynamic=False, fullgraph=True)(*inputs)
    torch.compiler.reset()
    (subgraph,) = seen
    values = tuple(
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value in subgraph.inputs
    )
    return Subgraph(subgraph.graph, values, with_gradients)


def judge(subgraph: Subgraph, compiler: Compiler) -> CheckResult:
    """Compile, run, compare."""
    wanted, _ = _run(subgraph, subgraph.graph)
    try:
        compiled = _compile(subgraph, compiler)
    except Exception as error:  # noqa: BLE001 - any is a verdict
        return _failed(Condition.COMPILE_ERROR, error, Phase.FORWARD)
    try:
        got, error = _run(subgraph, compiled)
    except Exception as error:  # noqa: BLE001 - any is a verdict
        return _failed(Condition.RUNTIME_ERROR, error, Phase.FORWARD)
    if error is not None:
        return _failed(Condition.RUNTIME_ERROR, error, Phase.BACKWARD)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for left, right in zip(got[phase], wanted[phase], strict=True):
            if not torch.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True):
                return CheckResult(Condition.WRONG_RESULT, phase=phase)
    return CheckResult(Condition.FINE)


def locate_stage_here(
    subgraph: Subgraph, compiler: Compiler, *, outcome: CheckResult
) -> StageFinding:
    """Find the stage in which a subgraph fails with `outcome`, in this process."""

    def ask(toggles: StageToggles) -> CheckResult:
        return check_with_parts_disabled(
            subgraph, compiler, toggles, check_accuracy=judge, phase=outcome.phase
        )

    return locate_stage(ask, outcome=outcome)


def _failed(condition: Condition, error: BaseException, phase: Phase) -> CheckResult:
    return CheckResult(condition, phase=phase, error=str(error), signature=make_signature(error))


def _compile(subgraph: Subgraph, compiler: Compiler) -> Any:
    backend = compiler.backend
    if isinstance(backend, str):
        backend = torch._dynamo.backends.registry.lookup_backend(backend)
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(subgraph.graph.graph, {}))
    return backend(fx.GraphModule(subgraph.graph, nodes), _copies(subgraph))


def _copies(subgraph: Subgraph) -> list[Any]:
    return [
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value in subgraph.inputs
    ]


def _run(subgraph: Subgraph, function: Any) -> tuple[dict[Phase, list[Any]], Exception | None]:
    inputs = _copies(subgraph)
    outputs = [value for value in function(*inputs) if isinstance(value, torch.Tensor)]
    results: dict[Phase, list[Any]] = {Phase.FORWARD: outputs, Phase.BACKWARD: []}
    grown = [output for output in outputs if output.requires_grad]
    if subgraph.with_gradients and grown:
        try:
            torch.autograd.backward(grown, [torch.ones_like(value) for value in grown])
        except Exception as error:  # noqa: BLE001 - any is a verdict
            return results, error
        leaves = [
            value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        results[Phase.BACKWARD] = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return results, None
