"""Ops in terms of other ops: core ATen's table, Inductor's, and in-place ops as functional ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from shardscope._torch.dispatch import op_packet

Table = Mapping[Any, Callable[..., Any]]


@cache
def core_aten_table() -> Table:
    """The decompositions that export applies by default."""
    return dict(torch.export.default_decompositions().items())


@cache
def inductor_table() -> Table:
    """The decompositions that Inductor applies before it lowers a graph, cached."""
    return dict(table_in_force())


def table_in_force() -> Table:
    """Inductor's decompositions under its current settings."""
    # Late import: loading Inductor takes seconds, and only this function needs it.
    import torch._inductor.lowering  # noqa: F401 - some decompositions look there, and do not load it
    from torch._inductor.decomposition import select_decomp_table

    table: Table = select_decomp_table()
    return table


def is_composite(op: Any) -> bool:
    """Whether the op is composite: autograd sees its decomposition, not the op."""
    return bool(op._can_decompose())


def parts_of(op: Any) -> Callable[..., Any]:
    """The function that runs a composite op's decomposition."""
    run: Callable[..., Any] = op.decompose
    return run


@cache
def functional_variant(op: Any) -> Any | None:
    """The functional variant of an in-place op (`add` of `add_`); None if there is none."""
    schema = op._schema
    name = op_packet(op).__name__
    is_in_place = name.endswith("_") and not name.startswith("__")
    # copy_ stays: it may write into a tensor from outside the graph.
    if not schema.is_mutable or not is_in_place or name == "copy_":
        return None
    packet = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_"), None)
    for overload in () if packet is None else packet.overloads():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and _argument_types(candidate) == _argument_types(op):
            return candidate
    return None


def with_defaults(op: Any, twin: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args`, extended by defaults of `op` for omitted arguments that are required by `twin`."""
    pairs = list(zip(op._schema.arguments, twin._schema.arguments, strict=True))[len(args) :]
    return (
        *args,
        *(
            argument.default_value
            for argument, twin_argument in pairs
            if not argument.kwarg_only and not twin_argument.has_default_value()
        ),
    )


def _argument_types(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]
