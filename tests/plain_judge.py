"""A judge that is as simple as can be: eager execution against what the backend made."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.outcome import Outcome, make_signature
from shardscope.record import Condition, Phase

__all__ = ["capture", "judge"]


def capture(function: Any, *inputs: Any, with_gradients: bool = True) -> Fragment:
    """The one graph that dynamo makes of a function, with the inputs in its order."""
    seen: list[Fragment] = []

    def keep(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append(Fragment(graph, tuple(example_inputs), with_gradients))
        return graph

    torch.compile(function, backend=keep, dynamic=False, fullgraph=True)(*inputs)
    torch.compiler.reset()
    (fragment,) = seen
    values = tuple(
        one.detach().clone().requires_grad_(one.requires_grad)
        if isinstance(one, torch.Tensor)
        else one
        for one in fragment.inputs
    )
    return Fragment(fragment.graph, values, with_gradients)


def judge(fragment: Fragment, compiler: Compiler) -> Outcome:
    """Compile, run, compare."""
    wanted, _ = _run(fragment, fragment.graph)
    try:
        compiled = _compile(fragment, compiler)
    except Exception as error:  # noqa: BLE001 - any is a verdict
        return _failed(Condition.COMPILE_ERROR, error, Phase.FORWARD)
    try:
        got, error = _run(fragment, compiled)
    except Exception as error:  # noqa: BLE001 - any is a verdict
        return _failed(Condition.RUNTIME_ERROR, error, Phase.FORWARD)
    if error is not None:
        return _failed(Condition.RUNTIME_ERROR, error, Phase.BACKWARD)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for one, other in zip(got[phase], wanted[phase], strict=True):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True):
                return Outcome(Condition.WRONG_RESULT, phase=phase)
    return Outcome(Condition.FINE)


def _failed(condition: Condition, error: BaseException, phase: Phase) -> Outcome:
    return Outcome(condition, phase=phase, error=str(error), signature=make_signature(error))


def _compile(fragment: Fragment, compiler: Compiler) -> Any:
    backend = compiler.backend
    if isinstance(backend, str):
        backend = torch._dynamo.backends.registry.lookup_backend(backend)
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(fragment.graph.graph, {}))
    return backend(fx.GraphModule(fragment.graph, nodes), _copies(fragment))


def _copies(fragment: Fragment) -> list[Any]:
    return [
        one.detach().clone().requires_grad_(one.requires_grad)
        if isinstance(one, torch.Tensor)
        else one
        for one in fragment.inputs
    ]


def _run(fragment: Fragment, function: Any) -> tuple[dict[Phase, list[Any]], Exception | None]:
    inputs = _copies(fragment)
    outputs = [one for one in function(*inputs) if isinstance(one, torch.Tensor)]
    results: dict[Phase, list[Any]] = {Phase.FORWARD: outputs, Phase.BACKWARD: []}
    grown = [one for one in outputs if one.requires_grad]
    if fragment.with_gradients and grown:
        try:
            torch.autograd.backward(grown, [torch.ones_like(one) for one in grown])
        except Exception as error:  # noqa: BLE001 - any is a verdict
            return results, error
        leaves = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
        results[Phase.BACKWARD] = [one.grad for one in leaves if one.grad is not None]
    return results, None
