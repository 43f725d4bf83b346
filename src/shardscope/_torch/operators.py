"""Operators of `torch.ops` by name: which things are some, and where others were registered."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch

from shardscope._torch.dispatch import is_higher_order, is_overload
from shardscope._torch.graph_nodes import is_packet
from shardscope._torch.private import find_name

__all__ = ["find_operator", "is_operator", "name_operator", "registered_at", "spell_operator"]

_dump = find_name("torch._C._dispatch_dump", "import the module that registered an op in a worker")
_TORCHS = ("aten", "prim", "prims")
_NAMESPACES = (type(torch.ops), type(torch.ops.aten))
_REGISTERED = re.compile(r"^debug: registered at (.+):\d+", re.MULTILINE)


def is_operator(value: object) -> bool:
    """Whether it is an op of `torch.ops`, with or without its overload, or a higher-order one."""
    return is_overload(value) or is_packet(value) or is_higher_order(value)


def name_operator(operator: Any) -> tuple[str, ...]:
    """The names that lead from `torch.ops` to it: aten, add, Tensor."""
    if is_higher_order(operator):
        return ("higher_order", operator.name())
    if is_packet(operator):
        return tuple(str(operator).split("."))
    namespace, _, rest = operator.name().partition("::")
    name, _, overload = rest.partition(".")
    return (namespace, name, overload or "default")


def spell_operator(value: Any) -> str:
    """An expression for one of torch's own ops, or for `torch.ops.aten`; empty for others."""
    if isinstance(value, _NAMESPACES):
        return str(value.__name__)
    if not is_overload(value) and not is_packet(value):
        return ""
    names = name_operator(value)
    return ".".join(["torch.ops", *names]) if names[0] in _TORCHS else ""


def find_operator(names: tuple[str, ...], *, module: str = "") -> Any:
    """What the names lead to, after an import of the module that defines it; None if nothing."""
    if module:
        importlib.import_module(module)
    found: Any = torch.ops
    for name in names:
        found = getattr(found, name, None)
    return found


def registered_at(namespace: str, name: str) -> str:
    """The file that registered an op, of Python's or C++; empty if torch does not know."""
    found = _REGISTERED.search(_dump(f"{namespace}::{name}"))
    return found[1] if found else ""
