"""The joint program of one rank: forward, and the gradients of its share of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardscope._torch.programs import expression_of, fake_mode_of
from shardscope._torch.programs import traced as without_data
from shardscope.errors import ParallelError
from shardscope.parallel.blame import explained
from shardscope.parallel.exported import local_example
from shardscope.parallel.flow import Flow, Role, Value, values_in
from shardscope.parallel.layouts import Seat
from shardscope.parallel.partition import RankProgram
from shardscope.parallel.symbols import symbols_in
from shardscope.parallel.tidy import own_outputs, relax_views, tidy

__all__ = ["JointGraph", "differentiate", "trace_joint", "trained_parameters"]


@final
@dataclass(frozen=True, eq=False)
class JointGraph:
    """Takes what the forward program takes, inputs without gaps; returns what that returns, then
    the gradients, each in memory of its own.
    """

    graph_module: fx.GraphModule
    num_outputs: int  # before the gradients
    parameters: tuple[str, ...]  # whose gradients follow, in order


def trace_joint(flow: Flow, rank: RankProgram) -> JointGraph:
    """Differentiate the rank's forward program with respect to its parameters."""
    forward = fx.Interpreter(rank.as_module())
    run = differentiate(flow, forward.run)
    mode = fake_mode_of([value.example for value, _ in flow.inputs])
    is_open = bool(flow.sizes.known)
    with without_data(mode, has_open_sizes=is_open), torch.fx.traceback.preserve_node_meta():
        examples = [_example(value, role, flow, rank.seat) for value, role in flow.inputs]
        traced = _trace(run, examples)
    _check_open(flow)
    tidy(traced.graph)
    relax_views(traced.graph)
    own_outputs(traced.graph, start=len(flow.outputs))
    traced.recompile()
    return JointGraph(traced, len(flow.outputs), tuple(trained_parameters(flow)))


def _check_open(flow: Flow) -> None:
    """That differentiating left open what export left open, or other sizes would be wrong."""
    fixed = [one for one in map(expression_of, flow.sizes.known.values()) if not symbols_in(one)]
    if fixed:
        raise ParallelError(
            f"torch {torch.__version__} makes dynamic sizes of the program static when it "
            f"differentiates it ({', '.join(map(str, fixed))} is what they were exported with). "
            "Export it with static sizes, partition it for inference, or use a newer torch."
        )


def _trace(run: Callable[..., Any], examples: list[Any]) -> fx.GraphModule:
    with explained(
        "the backward pass cannot be traced without data",
        "Replace the op whose gradient depends on values, or parallelize without a loss.",
    ):
        traced: fx.GraphModule = make_fx(run)(*examples)
    return traced


def _example(value: Value, role: Role, flow: Flow, seat: Seat) -> Any:
    """Of inputs, one without gaps: how a tensor lies decides which views are traced."""
    example = local_example(value, seat, flow.sizes)
    is_input = role.kind == "input" and isinstance(example, Tensor)
    return example.contiguous() if is_input else example


def trained_parameters(flow: Flow) -> list[str]:
    """The parameters that have gradients, in the program's order."""
    return [role.name for _, role in _trained(flow)]


def differentiate(flow: Flow, forward: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A function that returns what `forward` returns, then its loss's gradients."""
    inputs = [value for value, _ in flow.inputs]
    wanted = [inputs.index(value) for value, _ in _trained(flow)]
    loss = _loss_index(flow)

    def run(*given: Any) -> list[Any]:
        values = list(given)
        for index in wanted:
            values[index] = values[index].detach().requires_grad_()
        with torch.enable_grad():
            outputs = forward(*values)
            _check_loss(outputs[loss])
            gradients = torch.autograd.grad(
                outputs[loss],
                [values[index] for index in wanted],
                allow_unused=True,
                materialize_grads=True,
            )
        kept = [one.detach() if isinstance(one, Tensor) else one for one in outputs]
        return [*kept, *gradients]

    return run


def _trained(flow: Flow) -> list[tuple[Value, Role]]:
    """Parameters that the loss depends on; others have no gradient, as in eager code."""
    needed = _behind_the_loss(flow)
    return [
        (value, role)
        for value, role in flow.inputs
        if role.kind == "parameter" and value.example.requires_grad and value in needed
    ]


def _behind_the_loss(flow: Flow) -> set[Value]:
    needed = set(values_in(flow.outputs[_loss_index(flow)][0]))
    for step in reversed(flow.steps):
        if needed.intersection(step.outputs):
            needed.update(step.inputs)
    return needed


def _check_loss(loss: Any) -> None:
    kind = type(loss).__name__
    if isinstance(loss, Tensor):
        if loss.requires_grad and loss.numel() == 1:
            return
        kind = f"a tensor of shape {list(loss.shape)}"
        if not loss.requires_grad:
            kind += " that depends on no parameter"
    raise ParallelError(
        f"the program's first output is {kind}, and training begins at one number that depends on "
        "the parameters. Return the loss first, or give parallelize() the model and loss=."
    )


def _loss_index(flow: Flow) -> int:
    for index, (_, role) in enumerate(flow.outputs):
        if role.kind == "output":
            return index
    raise ParallelError("the program returns nothing, so there is no loss to differentiate.")
