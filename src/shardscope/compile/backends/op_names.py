"""The name of an op, however it is written: `torch.relu`, `F.relu`, `nn.ReLU`, `x.relu()`, aten."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from shardscope._torch.dispatch import all_op_names, dispatcher_name
from shardscope.errors import BackendError

SYMBOLS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "//": "floor_divide",
    "%": "remainder",
    "**": "pow",
    "@": "matmul",
    "&": "bitwise_and",
    "|": "bitwise_or",
    "^": "bitwise_xor",
    "~": "bitwise_not",
    "<<": "bitwise_left_shift",
    ">>": "bitwise_right_shift",
    "<": "lt",
    "<=": "le",
    "==": "eq",
    "!=": "ne",
    ">": "gt",
    ">=": "ge",
}
SYMBOLS |= {
    f"{symbol}=": name for symbol, name in list(SYMBOLS.items())[: list(SYMBOLS).index("<")]
}
"""Operators of Python's, and those that assign."""

# Other names of ops in `operator`, as aliases in torch, and in aten.
OP_ALIASES = {
    "absolute": "abs",
    "and_": "bitwise_and",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "expit": "sigmoid",
    "fix": "trunc",
    "floordiv": "floor_divide",
    "greater": "gt",
    "greater_equal": "ge",
    "iadd": "add",
    "iand": "bitwise_and",
    "ifloordiv": "floor_divide",
    "ilshift": "bitwise_left_shift",
    "imatmul": "matmul",
    "imod": "remainder",
    "imul": "mul",
    "inv": "bitwise_not",
    "invert": "bitwise_not",
    "ior": "bitwise_or",
    "ipow": "pow",
    "irshift": "bitwise_right_shift",
    "isub": "sub",
    "itruediv": "div",
    "ixor": "bitwise_xor",
    "less": "lt",
    "less_equal": "le",
    "lshift": "bitwise_left_shift",
    "mod": "remainder",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "or_": "bitwise_or",
    "pos": "positive",
    "rshift": "bitwise_right_shift",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "to_copy": "to",
    "true_divide": "div",
    "truediv": "div",
    "xor": "bitwise_xor",
}

# The aten ops that composite ops run as.
WIDER = {
    "conv1d": ("convolution",),
    "conv2d": ("convolution",),
    "conv3d": ("convolution",),
    "conv_transpose1d": ("convolution",),
    "conv_transpose2d": ("convolution",),
    "conv_transpose3d": ("convolution",),
    "max_pool2d": ("max_pool2d_with_indices",),
    "max_pool3d": ("max_pool3d_with_indices",),
    "nll_loss": ("nll_loss_forward", "nll_loss2d_forward"),
}

_MODULES = {
    "bcewithlogitsloss": "binary_cross_entropy_with_logits",
    "bceloss": "binary_cross_entropy",
    "multiheadattention": "multi_head_attention_forward",
    "upsample": "interpolate",
}


def module_op(kind: type[nn.Module]) -> str | None:
    """The op that a module class of `torch.nn` calls: `layer_norm` for `nn.LayerNorm`."""
    if not kind.__module__.startswith("torch.nn."):
        return None
    squeezed = kind.__name__.lower()
    functions = _functions()
    candidates = (squeezed, re.sub(r"\dd$", "", squeezed), squeezed.removesuffix("loss"))
    names = (
        functions.get(_MODULES.get(candidate, candidate).replace("_", ""))
        for candidate in candidates
    )
    return next((name for name in names if name is not None), None)


@cache
def _functions() -> dict[str, str]:
    """Functions that modules may call, by their names without underscores."""
    homes = (torch, nn.functional)
    return {
        name.replace("_", ""): name
        for home in homes
        for name in dir(home)
        if name.islower() and not name.startswith("_") and not name.endswith("_")
    }


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
    """The name of the op that a node calls; None if it calls no op."""
    if node.op == "call_method":
        return _base_name(str(node.target))
    if node.op == "call_module":
        module = node.graph.owning_module
        return None if module is None else module_op(type(module.get_submodule(str(node.target))))
    return _name_of(node.target) if node.op == "call_function" else None


def names_meant(op: Any) -> frozenset[str]:
    """All names of the op that the user wrote; BackendError if torch has no such op."""
    name = _name_of_text(op) if isinstance(op, str) else _name_of(op)
    if name is None or not _is_op(name):
        raise BackendError(_unknown(op))
    return frozenset({name, *WIDER.get(name, ())})


def _is_op(name: str) -> bool:
    """Whether a name is that of an op; `torch.save`, for example, is not an op."""
    return "::" in name or name in _aten_names() or hasattr(nn.functional, name)


def _name_of(op: Any) -> str | None:
    """The name of an op from an object: a function, method, overload or module class."""
    dispatched = dispatcher_name(op)
    if dispatched is not None:
        return name_of_dispatched(dispatched)
    if isinstance(op, nn.Module):
        return module_op(type(op))
    if isinstance(op, type):
        return module_op(op) if issubclass(op, nn.Module) else None
    # Tensor methods and some builtins have no __module__; the user's functions do.
    home = getattr(op, "__module__", None) or "torch"
    name = getattr(op, "__name__", "")
    return _base_name(name) if name and home.split(".")[0] in _TORCHS else None


@cache
def name_of_dispatched(name: str) -> str:
    """The op name for a dispatcher name such as `aten::_softmax`, without overload."""
    namespace, _, op = name.partition("::")
    return _base_name(op) if namespace == "aten" else name


def _base_name(name: str) -> str:
    """A name without the affixes for in-place, reflected, native and other variants."""
    name = OP_ALIASES.get(name, name)
    if name.startswith("__") and name.endswith("__"):
        return _base_operator_name(name.strip("_"))
    name = re.sub(r"^(_native_|native_|_fused_|special_|_)", "", name.rstrip("_"))
    name = re.sub(r"^scaled_dot_product_\w+_attention(_for_cpu)?$", _ATTENTION, name)
    name = re.sub(r"^(cudnn_|miopen_|mkldnn_)?batch_norm(?!_backward)\w*$", "batch_norm", name)
    return OP_ALIASES.get(name, name)


_ATTENTION = "scaled_dot_product_attention"


def _base_operator_name(name: str) -> str:
    """The operator without prefix: `add` for `iadd` and `radd`, `or` for `ior`."""
    for candidate in (name, name[1:]):
        name_in_aten = OP_ALIASES.get(candidate, OP_ALIASES.get(f"{candidate}_", candidate))
        if name_in_aten in _aten_names():
            return name_in_aten
    return name


def _name_of_text(text: str) -> str | None:
    text = text.strip()
    if text in SYMBOLS:
        return SYMBOLS[text]
    text = re.sub(r"\(.*\)$", "", text)
    names = (_name_of(candidate) for candidate in _objects(text))
    return next((name for name in names if name is not None), None) or _name_of_dispatcher_op(text)


def _objects(text: str) -> Iterator[Any]:
    """The objects that `text` may name, the most likely first."""
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
    value: Any = torch
    for part in path.split(".")[1:]:
        # Ops without overloads lack those attributes, and torch.ops namespaces accept any name.
        try:
            value = getattr(value, part)
        except (AttributeError, RuntimeError):
            return
    yield value


def _name_of_dispatcher_op(text: str) -> str | None:
    """The op for names of the dispatcher, such as `aten::relu.default` or `relu_backward`."""
    op_name = text.split(".")[0] if "::" in text else f"aten::{text}"
    if op_name in all_op_names():
        return name_of_dispatched(op_name)
    name = _base_name(text)
    return name if "::" not in text and name in _aten_names() else None


@cache
def _aten_names() -> frozenset[str]:
    """The names of all aten ops, with and without affixes."""
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
