"""One name for an op, however it is written: `torch.relu`, `F.relu`, `nn.ReLU`, `x.relu()`, aten.

A name here is what aten calls the op, without what is about its kernel: no overload, no `_` for in
place, no `native_`. Ops of other libraries keep theirs in front: `mylib::relu`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from shardscope._torch.op_names import all_op_names, dispatcher_name
from shardscope.compile.backends.python_names import OTHER_NAMES, SYMBOLS, WIDER, module_op
from shardscope.errors import BackendError

__all__ = ["name_of_dispatched", "name_of_node", "names_meant"]

_PREFIXES = {
    "F": "torch.nn.functional",
    "functional": "torch.nn.functional",
    "nn": "torch.nn",
    "Tensor": "torch.Tensor",
    "tensor": "torch.Tensor",
    "ops": "torch.ops",
}
_TORCHS = ("torch", "_operator", "operator", "builtins", "math")
_HOMES = (torch, nn.functional, torch.Tensor, torch.special, torch.linalg)


def name_of_node(node: fx.Node) -> str | None:
    """The op that a node calls; None for what is no op of torch's or of a library's."""
    if node.op == "call_method":
        return _plain(str(node.target))
    if node.op == "call_module":
        module = node.graph.owning_module
        return None if module is None else module_op(type(module.get_submodule(str(node.target))))
    return _name_of(node.target) if node.op == "call_function" else None


def names_meant(op: Any) -> frozenset[str]:
    """Every name of the op that the user wrote; BackendError if torch has no such op."""
    name = _name_of_text(op) if isinstance(op, str) else _name_of(op)
    if name is None or not _is_op(name):
        raise BackendError(_unknown(op))
    return frozenset({name, *WIDER.get(name, ())})


def _is_op(name: str) -> bool:
    """`torch.save` has a name as ops have, and is none."""
    return "::" in name or name in _aten_names() or hasattr(nn.functional, name)


def _name_of(op: Any) -> str | None:
    """The name of an op given as itself: a function, a method, an overload, a class of modules."""
    dispatched = dispatcher_name(op)
    if dispatched is not None:
        return name_of_dispatched(dispatched)
    if isinstance(op, nn.Module):
        return module_op(type(op))
    if isinstance(op, type):
        return module_op(op) if issubclass(op, nn.Module) else None
    # Methods of tensors, and some builtins, say no module; a function of the user's does.
    home = getattr(op, "__module__", None) or "torch"
    name = getattr(op, "__name__", "")
    return _plain(name) if name and home.split(".")[0] in _TORCHS else None


@cache
def name_of_dispatched(name: str) -> str:
    """The name of what the dispatcher calls `aten::_softmax`, without overload."""
    namespace, _, op = name.partition("::")
    return _plain(op) if namespace == "aten" else name


def _plain(name: str) -> str:
    """A name of Python's or aten's without what says in place, reflected, native and so on."""
    name = OTHER_NAMES.get(name, name)
    if name.startswith("__") and name.endswith("__"):
        return _plain_operator(name.strip("_"))
    name = re.sub(r"^(_native_|native_|_fused_|special_|_)", "", name.rstrip("_"))
    name = re.sub(r"^scaled_dot_product_\w+_attention(_for_cpu)?$", _ATTENTION, name)
    name = re.sub(r"^(cudnn_|miopen_|mkldnn_)?batch_norm(?!_backward)\w*$", "batch_norm", name)
    return OTHER_NAMES.get(name, name)


_ATTENTION = "scaled_dot_product_attention"


def _plain_operator(name: str) -> str:
    """`iadd`, `radd` and `add` are one; so are `ior` and `or`."""
    for candidate in (name, name[1:]):
        known = OTHER_NAMES.get(candidate, OTHER_NAMES.get(f"{candidate}_", candidate))
        if known in _aten_names():
            return known
    return name


def _name_of_text(text: str) -> str | None:
    text = text.strip()
    if text in SYMBOLS:
        return SYMBOLS[text]
    text = re.sub(r"\(.*\)$", "", text)
    found = (_name_of(one) for one in _objects(text))
    return next((name for name in found if name is not None), None) or _name_of_dispatchers(text)


def _objects(text: str) -> Iterator[Any]:
    """What `text` may stand for, in the order in which people mean it."""
    head, _, rest = text.partition(".")
    if not rest:
        homes = (*_HOMES, nn, torch.ops.aten)
        yield from (getattr(home, text) for home in homes if hasattr(home, text))
        return
    if head == "operator":
        yield getattr(operator, rest, None)
    start = head if head == "torch" else _PREFIXES.get(head, f"torch.ops.{head}")
    yield from _resolve(f"{start}.{rest}")
    if head not in _PREFIXES and head != "torch" and hasattr(torch.Tensor, rest):
        yield getattr(torch.Tensor, rest)  # x.relu


def _resolve(path: str) -> Iterator[Any]:
    found: Any = torch
    for part in path.split(".")[1:]:
        # An op without overloads has no attribute for each; a namespace has any attribute.
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return
    yield found


def _name_of_dispatchers(text: str) -> str | None:
    """`aten::relu.default`, `relu_backward`, and other names that only the dispatcher knows."""
    whole = text.split(".")[0] if "::" in text else f"aten::{text}"
    if whole in all_op_names():
        return name_of_dispatched(whole)
    name = _plain(text)
    return name if "::" not in text and name in _aten_names() else None


@cache
def _aten_names() -> frozenset[str]:
    """What aten has, in plain names and its own."""
    own = {name.removeprefix("aten::") for name in all_op_names() if name.startswith("aten::")}
    return frozenset(own | {re.sub(r"^(_native_|native_|_)", "", name) for name in own})


def _unknown(op: Any) -> str:
    near = get_close_matches(str(op).split(".")[-1], sorted(_aten_names()), n=1, cutoff=0.75)
    hint = f" Did you mean {near[0]!r}?" if near and isinstance(op, str) else ""
    return (
        f"op={op!r} is not an op that torch has.{hint} Write it as you would call it ('relu', "
        "'torch.relu', 'F.relu', 'nn.ReLU', 'x.relu()', '+', 'aten.relu.default', "
        "'mylib::op'), or give the function or class."
    )
