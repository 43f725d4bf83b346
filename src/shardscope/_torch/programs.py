"""What lies behind the values that torch.export traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic

from shardscope._torch.dispatch import detect_fake_mode
from shardscope._torch.fakes import FakeTensorMode
from shardscope._torch.private import find_name
from shardscope._torch.pytree_values import flatten, unflatten

__all__ = [
    "divide_size",
    "enable_python_dispatcher",
    "expression_of",
    "fake_mode_of",
    "flatten",
    "flatten_as",
    "hint_of",
    "range_of",
    "traced",
    "unflatten",
]


enable_python_dispatcher = find_name(
    "torch._dispatch.python.enable_python_dispatcher", "run ops on symbolic sizes"
)
ConstantSource = find_name(
    "torch._dynamo.source.ConstantSource", "name the symbolic sizes of shards of a program's inputs"
)
tree_flatten_spec = find_name(
    "torch.fx._pytree.tree_flatten_spec", "accept inputs whose keys are in a different order"
)


def expression_of(size: Any) -> Any:
    """The sympy expression of a size that was left open; anything else as it is.

    Comparing a SymInt would add a guard to the program; comparing its expression does not.
    """
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def fake_mode_of(values: Any) -> Any:
    """The mode whose tensors without data export traced with; a new one where there are none."""
    return detect_fake_mode(values) or FakeTensorMode()


@contextmanager
def traced(mode: Any, *, has_open_sizes: bool) -> Iterator[None]:
    """Ops run as export ran them: without data, and where sizes are open as Python spells them.

    Some that are spelt in C++ ask for numbers (linear of what is not contiguous, in torch 2.11).
    """
    with enable_python_dispatcher() if has_open_sizes else nullcontext(), mode:
        yield


def flatten_as(nest: Any, tree: Any) -> list[Any] | None:
    """The leaves in the order of another nest with the same keys; None if it has others."""
    try:
        leaves: list[Any] = tree_flatten_spec(nest, tree)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError):
        return None
    return leaves if len(leaves) == len(flatten(nest)[0]) else None


def hint_of(size: Any) -> int:
    """The number that export traced an open size with."""
    return int(size.node.hint)


def divide_size(size: Any, num_ranks: int) -> Any:
    """A new open size: that of one of so many equal pieces."""
    env, expression = size.node.shape_env, size.node.expr
    # Torch takes a size that it sees as 1 for 1 for ever.
    hint = max(2, hint_of(size) // num_ranks)
    source = ConstantSource(f"piece_of_{expression}")
    symbol = env.create_symbol(
        hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
    )
    whole = env.var_to_range[expression]
    lowest = max(1, -(-int(whole.lower) // num_ranks))
    highest = whole.upper // num_ranks if whole.upper.is_Integer else whole.upper
    env.var_to_range[symbol] = type(whole)(lowest, highest)
    return env.create_symintnode(symbol, hint=hint, source=source)


def range_of(size: Any) -> Any:
    """Between what an open size may lie, as a program's range constraints have it."""
    return size.node.shape_env.var_to_range[size.node.expr]
