"""Checks that the exported program computes what the model itself does.

torch.export drops custom backward functions, hooks on tensors and nested no_grad() regions. A
comparison of the ranks with the exported program would not find what is lost there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor, nn

from shardscope._torch.dispatch import TorchDispatchMode
from shardscope._torch.tree import flatten, unflatten
from shardscope.errors import ParallelError
from shardscope.numerics import perturb_ulp_
from shardscope.parallel.equivalence import (
    MeanRngMode,
    StepResult,
    compare,
    named_buffers,
    named_parameters,
)
from shardscope.parallel.ir.graph import Role, ShardingGraph, Value, explained
from shardscope.parallel.passes import WithLoss
from shardscope.parallel.passes.capture import expand_objects
from shardscope.parallel.passes.exported import CallArguments
from shardscope.record import FINE, TensorKind


def check_export_fidelity(
    original: Callable[[], nn.Module],
    graph: ShardingGraph,
    example: CallArguments,
    trained: Sequence[str],
    captured: Callable[[], StepResult],
) -> None:
    """Compare the model with the result of `captured`, with random ops replaced by their means.

    `original` returns a copy of the model. `trained` names the parameters whose gradients are
    compared; none for inference. Raises ParallelError if they differ.
    """
    with MeanRngMode(), _PassDropoutGradient():  # type: ignore[no-untyped-call]
        expected = _run_model(original, graph, example, trained)
        perturbed = _run_model(original, graph, example, trained, is_perturbed=True)
        actual = captured()
    verdicts = compare(expected, None, actual, perturbed_runs=[(perturbed, None)])
    wrong = [verdict for verdict in verdicts if verdict.agreement not in FINE]
    if not wrong:
        return
    first_wrong = wrong[0]
    what = {
        TensorKind.GRADIENT: f"the gradient of {first_wrong.name}",
        TensorKind.BUFFER: f"what {first_wrong.name} is after the call",
    }.get(first_wrong.kind, f"output {first_wrong.name}")
    raise ParallelError(
        f"torch.export's program differs from the model itself in {what} "
        f"({str(first_wrong.agreement).replace('_', ' ')}), before it is partitioned. "
        "torch.export does "
        "not keep custom backward functions, hooks on tensors, in-place writes under no_grad(), or "
        "such regions inside others. Write what is affected without them."
    )


def _run_model(
    original: Callable[[], nn.Module],
    graph: ShardingGraph,
    example: CallArguments,
    trained: Sequence[str],
    *,
    is_perturbed: bool = False,
) -> StepResult:
    model = original()
    leaves, tree = flatten(example)
    inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = unflatten(inputs, tree)
    if is_perturbed:
        args, kwargs = perturb_ulp_(model, (args, kwargs))
    old_buffers = {name: buffer.detach().clone() for name, buffer in named_buffers(model)}
    torch.manual_seed(0)
    with _errors_of_the_model(model), torch.enable_grad() if trained else torch.no_grad():
        results = flatten(expand_objects(model(*args, **kwargs))[0])[0]
        if trained:
            results[0].backward()
    names = [role.name for _, role in graph.outputs if role.kind == "output"]
    outputs = [
        (f"[{name}]", result.detach())
        for name, result in zip(names, results, strict=True)
        if isinstance(result, Tensor)
    ]
    gradients = {
        _program_name(name, model): parameter.grad for name, parameter in named_parameters(model)
    }
    buffers = {_program_name(name, model): buffer.detach() for name, buffer in named_buffers(model)}
    changed = {
        _program_name(name, model)
        for name, buffer in named_buffers(model)
        if not torch.equal(torch.nan_to_num(old_buffers[name]), torch.nan_to_num(buffer.detach()))
    }
    written = {role.name for _, role in graph.outputs if role.kind == "input mutation"}
    for (_, role), value in zip(_inputs(graph), flatten((args, kwargs))[0], strict=True):
        if role.name in written:
            buffers[role.name] = value.detach()
            changed.add(role.name)
    trained_gradients = {
        name: grad for name in trained if (grad := gradients.get(name)) is not None
    }
    return StepResult(outputs, trained_gradients, buffers, frozenset(changed))


@final
class _PassDropoutGradient(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the backward of a dropout that keeps everything the identity.

    It would scale gradients by 1 / (1 - p), which dropout as bernoulli and a product does not: a
    functional program has the latter where the model has the former.
    """

    supports_higher_order_operators = True  # torch raises for them otherwise

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten.native_dropout_backward.default:
            gradient = args[0]
            assert isinstance(gradient, Tensor)
            return gradient.clone()
        return func(*args, **(kwargs or {}))


def _errors_of_the_model(model: nn.Module) -> AbstractContextManager[None]:
    has_loss = isinstance(model, WithLoss)
    name = type(model.model if has_loss else model).__name__
    call = "loss(model(*args, **kwargs), *targets).backward()" if has_loss else "model(*args)"
    return explained(
        f"{name} itself fails in eager mode on these inputs",
        f"Make {call} work, or pass verify=False to skip the comparison.",
    )


def _inputs(graph: ShardingGraph) -> list[tuple[Value, Role]]:
    return [(value, role) for value, role in graph.inputs if role.kind == "input"]


def _program_name(name: str, root: nn.Module) -> str:
    """The name in the program: without the prefix of WithLoss, which contains the model."""
    return name.removeprefix("model.") if isinstance(root, WithLoss) else name
