"""The fault backends, by the names that torch.compile knows them under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardscope._torch.aot_backends import Compiled
from shardscope.compile.backends.faults.ahead import compile_decomposed, compile_partitioned
from shardscope.compile.backends.faults.captured import compile_captured
from shardscope.compile.backends.faults.plan import InjectedFault, Kind, read_plan
from shardscope.compile.backends.options import read_options

__all__ = [
    "fault_accuracy_error",
    "fault_compile_error",
    "fault_crash",
    "fault_hang",
    "fault_nan",
    "fault_non_leaf",
    "fault_runtime_error",
    "has_non_leaf",
]

Options = Mapping[str, Any] | None

_STAGES = {
    "graph": compile_captured,
    "decomposed": compile_decomposed,
    "partitioned": compile_partitioned,
}


def fault_compile_error(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Raise InjectedFault when a graph with the op is compiled.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> options = {"op": "relu"}
        >>> torch.compile(model, backend="shardscope_fault_compile_error", options=options)(x)
    """
    return _compile("compile_error", gm, example_inputs, options, mode)


def fault_runtime_error(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Raise InjectedFault when compiled code runs the op.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> options = {"op": "relu"}
        >>> torch.compile(model, backend="shardscope_fault_runtime_error", options=options)(x)
    """
    return _compile("runtime_error", gm, example_inputs, options, mode)


def fault_accuracy_error(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Change the op's result: by 1, or by the options `by` and `times`.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> options = {"op": "relu"}
        >>> torch.compile(model, backend="shardscope_fault_accuracy_error", options=options)(x)
    """
    return _compile("accuracy_error", gm, example_inputs, options, mode)


def fault_nan(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Make the op's result NaN if it is floating point.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> options = {"op": "relu"}
        >>> torch.compile(model, backend="shardscope_fault_nan", options=options)(x)
    """
    return _compile("nan", gm, example_inputs, options, mode)


def fault_hang(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Never return from the op until interrupted.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> options = {"op": "relu"}
        >>> torch.compile(model, backend="shardscope_fault_hang", options=options)(x)
    """
    return _compile("hang", gm, example_inputs, options, mode)


def fault_crash(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """End the process at the op with a segmentation fault.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> options = {"op": "relu"}
        >>> torch.compile(model, backend="shardscope_fault_crash", options=options)(x)
    """
    return _compile("crash", gm, example_inputs, options, mode)


def fault_non_leaf(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Raise InjectedFault when a graph is compiled for an input that is not an autograd leaf.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_fault_non_leaf")(x)
    """
    read_options("fault_non_leaf", options, mode, {})
    if has_non_leaf(gm, example_inputs):
        raise InjectedFault("Injected compile error: an input is not a leaf of autograd's graph.")
    return gm.forward


def has_non_leaf(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether the graph calls something, and an input of it is not a leaf."""
    tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
    is_trivial = not any(node.op.startswith("call_") for node in gm.graph.nodes)
    return not is_trivial and not all(one.is_leaf for one in tensors)


def _compile(
    kind: Kind,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    mode: str | None,
) -> Compiled:
    plan = read_plan(kind, options, mode)
    return _STAGES[plan.stage](gm, example_inputs, plan=plan)
