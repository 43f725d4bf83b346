"""Collectives as nodes of FX graphs, and public names of what nodes call.

Functional collectives are ops that take their group by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.overrides import resolve_name

from shardscope._torch.collectives.schema import process_group
from shardscope._torch.dispatch import is_higher_order, is_overload
from shardscope._torch.graph import is_packet
from shardscope._torch.private import find_name

# Loading it registers the ops' kernels for tensors without data.
find_name("torch.distributed._functional_collectives", "trace collectives without a process group")


def _find_op(name: str) -> Any:
    op = f"torch.ops._c10d_functional.{name}.default"
    return find_name(op, "insert collectives into programs")


ALL_REDUCE = _find_op("all_reduce")
ALL_GATHER = _find_op("all_gather_into_tensor")
REDUCE_SCATTER = _find_op("reduce_scatter_tensor")
ALL_TO_ALL = _find_op("all_to_all_single")
WAIT = _find_op("wait_tensor")

# Namespaces of the ops, of their differentiable variants, of older graphs, and of DTensor.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")

_COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)


def is_collective(op: Any) -> bool:
    """Whether `op` is one of the four functional collectives above."""
    return op in _COLLECTIVES


def as_collective_overload(target: Any) -> Any | None:
    """The overload of a node's target if it is a collective or waits for one, else None.

    Dynamo's graphs name the packet, whose only overload is the default one.
    """
    if is_packet(target):
        target = getattr(target, "default", None)
    is_collective_op = is_overload(target) and target.namespace in _NAMESPACES
    return target if is_collective_op else None


def size_and_rank(group: Any) -> tuple[int, int] | None:
    """The size of a group and this process's rank in it; None if there is no such group."""
    try:
        resolved = process_group(group)
    except (RuntimeError, ValueError, LookupError):
        return None
    return (resolved.size(), resolved.rank()) if isinstance(resolved, dist.ProcessGroup) else None


_COLLECTIVE_PREFIXES = ("_c10d_functional.", "c10d_functional.", "_dtensor.", "c10d.", "symm_mem.")
# Ops that wait for a collective or wrap its result, without communication of their own.
_LOCAL = (".wait_tensor", "._wrap_tensor_autograd")
# The ops that torch 2.15 writes for attributes that a program reads.
_ATTRIBUTES = {
    "aten.mH": "Tensor.mH",
    "aten.mT": "Tensor.mT",
    "aten.matrix_H": "Tensor.H",
    "aten.numpy_T": "Tensor.T",
}
_MODES = (
    "torch._C._set_grad_enabled",
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    "torch.autograd.grad_mode._enter_inference_mode",
    "torch.autograd.grad_mode._exit_inference_mode",
    "torch._functorch.",
    "torch._C._functorch.",
    "torch._C._autograd._saved_tensors_hooks",
)


def is_bookkeeping(node: fx.Node) -> bool:
    """Whether a node computes nothing: it sets a global mode, or reads an element of a tuple."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return isinstance(node.args[0].meta.get("example_value"), tuple | list)
    return node.op == "call_function" and name_target(node).startswith(_MODES)


def name_target(node: fx.Node) -> str:
    """`torch.relu`, `Tensor.relu`, `operator.add`, `aten.mm.default`, `nn.Linear`."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op == "call_module":
        module = node.graph.owning_module
        return type(module.get_submodule(str(node.target))).__name__ if module else "module"
    if node.target is getattr:  # x.T and the like
        return f"Tensor.{node.args[1]}"
    assert callable(node.target)
    return _name_function(node.target)


@lru_cache(maxsize=4096)
def _name_function(function: Callable[..., Any]) -> str:
    if is_overload(function):
        return str(function)
    if is_packet(function):
        return _ATTRIBUTES.get(str(function), str(function))
    if is_higher_order(function):
        return str(function.name())
    name = getattr(function, "__name__", type(function).__name__)
    if getattr(operator, name, None) is function:
        return f"operator.{name}"
    if getattr(torch, name, None) is function:
        return f"torch.{name}"
    if getattr(torch.nn.functional, name, None) is function:
        return f"torch.nn.functional.{name}"
    public_name = resolve_name(function)
    if public_name:
        return str(public_name)
    module = _module(function)
    return f"{module}.{name}" if module else name


def _module(function: Any) -> str:
    return getattr(function, "__module__", None) or ""


def inner_graphs(node: fx.Node) -> list[tuple[str, fx.GraphModule]]:
    """The subgraphs among a higher-order op's arguments, with their attribute names."""
    owner = node.graph.owning_module
    graphs: list[tuple[str, fx.GraphModule]] = []
    if owner is None or not is_higher_order(node.target):
        return graphs
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            value = operator.attrgetter(str(argument.target))(owner)
            if isinstance(value, fx.GraphModule):
                graphs.append((str(argument.target), value))
    return graphs


def is_collective_name(op: str) -> bool:
    """Whether ops with this name communicate with other ranks."""
    return op.startswith(_COLLECTIVE_PREFIXES) and not any(local in op for local in _LOCAL)


def find_group(node: fx.Node) -> tuple[int, ...]:
    """The ranks of the group that a collective names; empty if this process has no such group."""
    names = [
        argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, str)
    ]
    for name in reversed(names):
        try:
            group = process_group(name)
        except (RuntimeError, ValueError):
            continue
        return tuple(dist.get_process_group_ranks(group))
    return ()
