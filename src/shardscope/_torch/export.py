"""Symbolic sizes of torch.export programs, and tracing of ops on them as export does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic

from shardscope._torch.dispatch import detect_fake_mode
from shardscope._torch.fake import FakeTensorMode
from shardscope._torch.private import find_name

enable_python_dispatcher = find_name(
    "torch._dispatch.python.enable_python_dispatcher", "run ops on symbolic sizes"
)
ConstantSource = find_name(
    "torch._dynamo.source.ConstantSource", "name the symbolic sizes of shards of a program's inputs"
)


def expression_of(size: Any) -> Any:
    """The sympy expression of a symbolic size; any other value is returned unchanged.

    Comparing a SymInt would add a guard to the program; comparing its expression does not.
    """
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def fake_mode_of(values: Any) -> Any:
    """The fake tensor mode that export traced with; a new one if there are no fake tensors."""
    return detect_fake_mode(values) or FakeTensorMode()


@contextmanager
def traced(mode: Any, *, has_open_sizes: bool) -> Iterator[None]:
    """Run ops as export does: without data and, for symbolic sizes, by Python decompositions.

    Some C++ kernels need concrete sizes (linear of a non-contiguous input, in torch 2.11).
    """
    with enable_python_dispatcher() if has_open_sizes else nullcontext(), mode:
        yield


def hint_of(size: Any) -> int:
    """The number that export traced a symbolic size with."""
    return int(size.node.hint)


def divide_size(size: Any, num_ranks: int) -> Any:
    """A new symbolic size: that of an equal shard on each of `num_ranks` ranks."""
    env, expression = size.node.shape_env, size.node.expr
    # torch specializes on a size that it sees as 1.
    hint = max(2, hint_of(size) // num_ranks)
    source = ConstantSource(f"piece_of_{expression}")
    symbol = env.create_symbol(
        hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
    )
    full_range = env.var_to_range[expression]
    lowest = max(1, -(-int(full_range.lower) // num_ranks))
    highest = full_range.upper // num_ranks if full_range.upper.is_Integer else full_range.upper
    env.var_to_range[symbol] = type(full_range)(lowest, highest)
    return env.create_symintnode(symbol, hint=hint, source=source)


def range_of(size: Any) -> Any:
    """The value range of a symbolic size, as in a program's range constraints."""
    return size.node.shape_env.var_to_range[size.node.expr]
