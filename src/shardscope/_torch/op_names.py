"""Every op that torch's dispatcher knows, by name and by overload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope._torch.dispatch import is_higher_order, is_overload
from shardscope._torch.graph_nodes import is_packet
from shardscope._torch.private import find_name

__all__ = ["all_op_names", "dispatcher_name", "overloads_of"]


_all_op_names = find_name("torch._C._dispatch_get_all_op_names", "check whether an op exists")


def all_op_names() -> set[str]:
    """Each op once, as `aten::relu`; those of libraries loaded later are there once they are."""
    return {name.split(".")[0] for name in _all_op_names()}


def dispatcher_name(op: Any) -> str | None:
    """`aten::relu` for an op, whichever overload; None for what is no op of the dispatcher."""
    if is_overload(op):
        return str(op._schema.name)
    if is_packet(op):
        return str(op._qualified_op_name)
    if is_higher_order(op):
        return f"{op.namespace}::{op.name()}"
    return None


def overloads_of(name: str) -> Iterator[Any]:
    """The overloads of the op that the dispatcher has under `name`."""
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op)
    for overload in packet.overloads():
        yield getattr(packet, overload)
