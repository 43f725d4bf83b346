"""How a person would write an op: the name under which torch or Python offers it."""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from shardscope._torch.dispatch import is_higher_order, is_overload
from shardscope._torch.graph_nodes import is_packet
from shardscope.errors import CompileError

__all__ = ["NotPrintable", "is_importable", "module_of", "name_op", "spell_target"]

# Where people look for an op first. Importing torch imports all of them.
_HOMES = (
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch.sparse",
    "torch.nested",
    "torch.func",
    "torch.nn",
    "torch.utils.checkpoint",
    "torch.Tensor",
)
_PYTHONS = {"math": math, "operator": operator, "builtins": builtins}
_PUBLIC_BODIES = {
    "cond": "torch.cond",
    "tag_activation_checkpoint": "torch.utils.checkpoint.checkpoint",
    "autograd_function_apply": "torch.autograd.Function",
    "invoke_subgraph": "torch.compiler.nested_compile_region",
}


class NotPrintable(CompileError):  # noqa: N818 - a fact about the program, not a mistake
    """Something in a program that cannot be written as source."""


def name_op(node: fx.Node) -> str:
    """The op of a node, as a report names it: torch.relu, Tensor.relu, aten.relu.default."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op == "call_module":
        return _name_module(node)
    if node.op != "call_function":
        return str(node.target)
    if is_higher_order(node.target):
        name = node.target.name()  # type: ignore[union-attr]
        return _PUBLIC_BODIES.get(name, f"higher_order.{name}")
    try:
        return spell_target(node.target).removeprefix("torch.ops.")
    except NotPrintable:
        return _name_plainly(node.target)


def _name_module(node: fx.Node) -> str:
    owner = node.graph.owning_module
    if owner is None:
        return str(node.target)
    kind = type(owner.get_submodule(str(node.target)))
    is_torchs = getattr(torch.nn, kind.__name__, None) is kind
    return f"torch.nn.{kind.__name__}" if is_torchs else kind.__qualname__


def _name_plainly(target: Any) -> str:
    """A name without an address, whatever it is."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if not isinstance(name, str):
        return type(target).__name__
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else name


def spell_target(target: Any) -> str:
    """Source text for what a node calls, or for any other object with a name."""
    if is_overload(target) or is_packet(target):
        return f"torch.ops.{target}"
    if is_higher_order(target):
        return f"torch.ops.higher_order.{target.name()}"
    known = _known_names().get(id(target))
    if known is not None and known[0] is target:
        return known[1]
    found = _find_path(target)
    if found is None:
        raise NotPrintable(f"{_name_plainly(target)} cannot be reached by a name of torch's.")
    return found


def is_importable(target: Any) -> bool:
    """Whether torch or Python offers it by a name."""
    try:
        spell_target(target)
    except NotPrintable:
        return False
    return True


def module_of(name: str) -> str:
    """The module to import before a spelt name can be used, or "" if `import torch` will do."""
    parts = name.split(".")
    if parts[0] == "torch" and (len(parts) == 2 or name.startswith(("torch.ops.", *_own_homes()))):
        return ""
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if module in sys.modules:
            return "" if module in ("torch", "builtins") else module
    return ""


def _own_homes() -> Iterator[str]:
    # Python takes `import torch.utils.checkpoint` for granted no more than we do.
    return (f"{home}." for home in _HOMES[1:] if home != "torch.utils.checkpoint")


@cache
def _known_names() -> dict[int, tuple[Any, str]]:
    """Everything callable in the places where people look, by identity; the first place counts."""
    known: dict[int, tuple[Any, str]] = {}
    for prefix, name, value in _walk_homes():
        if callable(value) and not name.startswith("_"):
            known.setdefault(id(value), (value, f"{prefix}{name}"))
    return known


def _walk_homes() -> Iterator[tuple[str, str, Any]]:
    for home, module in _PYTHONS.items():
        prefix = "" if home == "builtins" else f"{home}."
        yield from ((prefix, name, value) for name, value in vars(module).items())
    for home in _HOMES:
        place: Any = torch
        for part in home.split(".")[1:]:
            place = getattr(place, part)
        names = dir(place) if isinstance(place, type) else list(vars(place))
        yield from ((f"{home}.", name, getattr(place, name, None)) for name in names)


def _find_path(target: Any) -> str | None:
    """Its import path, if it is torch's or Python's own and the path leads to it."""
    module = getattr(target, "__module__", None)
    if not isinstance(module, str) or not _is_everybodys(module):
        return None
    for attribute in ("__qualname__", "__name__"):
        path = getattr(target, attribute, None)
        if isinstance(path, str) and _follow(module, path) is target:
            return f"{module}.{path}"
    return None


def _is_everybodys(module: str) -> bool:
    """Whether anybody with torch installed has the module."""
    root = module.split(".")[0]
    return root == "torch" or (root in sys.stdlib_module_names and root != "__main__")


def _follow(module: str, path: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
