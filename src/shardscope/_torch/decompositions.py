"""Ops in terms of other ops: core ATen's table, Inductor's, and in-place ops as functional ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from shardscope._torch.dispatch import op_packet

__all__ = [
    "core_aten_table",
    "functional_variant",
    "inductor_table",
    "is_composite",
    "parts_of",
    "table_in_force",
    "with_defaults",
]

Table = Mapping[Any, Callable[..., Any]]


@cache
def core_aten_table() -> Table:
    """What export takes apart by default."""
    return dict(torch.export.default_decompositions().items())


@cache
def inductor_table() -> Table:
    """What Inductor takes apart before it lowers a graph."""
    return dict(table_in_force())


def table_in_force() -> Table:
    """The same, with Inductor's settings as they are now."""
    # Late: loading Inductor takes seconds, and only this level wants it.
    import torch._inductor.lowering  # noqa: F401 - some decompositions look there, and do not load it
    from torch._inductor.decomposition import select_decomp_table

    table: Table = select_decomp_table()
    return table


def is_composite(op: Any) -> bool:
    """Whether autograd sees the parts of the op, and not the op."""
    return bool(op._can_decompose())


def parts_of(op: Any) -> Callable[..., Any]:
    """What runs the parts of a composite op."""
    run: Callable[..., Any] = op.decompose
    return run


@cache
def functional_variant(op: Any) -> Any | None:
    """The op that returns what `op` writes into its first argument; None if there is none."""
    schema = op._schema
    name = op_packet(op).__name__
    is_in_place = name.endswith("_") and not name.startswith("__")
    # A copy into something from outside the graph stays one: somebody has to make it.
    if not schema.is_mutable or not is_in_place or name == "copy_":
        return None
    packet = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_"), None)
    for overload in () if packet is None else packet.overloads():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and _takes(candidate) == _takes(op):
            return candidate
    return None


def with_defaults(op: Any, twin: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments, and the defaults of those left out for which its twin has none."""
    pairs = list(zip(op._schema.arguments, twin._schema.arguments, strict=True))[len(args) :]
    return (
        *args,
        *(
            one.default_value
            for one, other in pairs
            if not one.kwarg_only and not other.has_default_value()
        ),
    )


def _takes(op: Any) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in op._schema.arguments]
