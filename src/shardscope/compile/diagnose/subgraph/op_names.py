"""Names of ops, for reports (with module and source line) and for source code."""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from shardscope._torch.dispatch import is_higher_order, is_overload
from shardscope._torch.graph import EXITS, SETTERS, is_level_machinery, is_packet
from shardscope.attribution.call_sites import user_source
from shardscope.compile.diagnose.subgraph.subgraph import Subgraph
from shardscope.compile.explain.frames import function_name, module_of
from shardscope.errors import CompileError
from shardscope.record import Source, SuspectOp

# Namespaces to search for an op, in order. Importing torch imports all of them.
_NAMESPACES = (
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
_STDLIB_NAMESPACES = {"math": math, "operator": operator, "builtins": builtins}
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
        return format_target(node.target).removeprefix("torch.ops.")
    except NotPrintable:
        return _name_without_address(node.target)


def _name_module(node: fx.Node) -> str:
    owner = node.graph.owning_module
    if owner is None:
        return str(node.target)
    kind = type(owner.get_submodule(str(node.target)))
    is_torchs = getattr(torch.nn, kind.__name__, None) is kind
    return f"torch.nn.{kind.__name__}" if is_torchs else kind.__qualname__


def _name_without_address(target: Any) -> str:
    """The name of an object without its address."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if not isinstance(name, str):
        return type(target).__name__
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else name


def format_target(target: Any) -> str:
    """Source text for the target of a node, or for any other importable object."""
    if is_overload(target) or is_packet(target):
        return f"torch.ops.{target}"
    if is_higher_order(target):
        return f"torch.ops.higher_order.{target.name()}"
    entry = _names_by_id().get(id(target))
    if entry is not None and entry[0] is target:
        return entry[1]
    path = _find_path(target)
    if path is None:
        raise NotPrintable(
            f"{_name_without_address(target)} cannot be reached by a name of torch's."
        )
    return path


def is_importable(target: Any) -> bool:
    """Whether torch or Python has a public name for it."""
    try:
        format_target(target)
    except NotPrintable:
        return False
    return True


def module_to_import(name: str) -> str:
    """The module to import before a formatted name can be used; "" if `import torch` is enough."""
    parts = name.split(".")
    if parts[0] == "torch" and (
        len(parts) == 2 or name.startswith(("torch.ops.", *_preloaded_namespaces()))
    ):
        return ""
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if module in sys.modules:
            return "" if module in ("torch", "builtins") else module
    return ""


def _preloaded_namespaces() -> Iterator[str]:
    # `import torch` does not guarantee that torch.utils.checkpoint is imported.
    return (
        f"{namespace}." for namespace in _NAMESPACES[1:] if namespace != "torch.utils.checkpoint"
    )


@cache
def _names_by_id() -> dict[int, tuple[Any, str]]:
    """Every callable in the searched namespaces, by id; the first namespace has precedence."""
    names: dict[int, tuple[Any, str]] = {}
    for prefix, name, value in _walk_namespaces():
        if callable(value) and not name.startswith("_"):
            names.setdefault(id(value), (value, f"{prefix}{name}"))
    return names


def _walk_namespaces() -> Iterator[tuple[str, str, Any]]:
    for namespace_name, module in _STDLIB_NAMESPACES.items():
        prefix = "" if namespace_name == "builtins" else f"{namespace_name}."
        yield from ((prefix, name, value) for name, value in vars(module).items())
    for namespace_name in _NAMESPACES:
        namespace: Any = torch
        for part in namespace_name.split(".")[1:]:
            namespace = getattr(namespace, part)
        names = dir(namespace) if isinstance(namespace, type) else list(vars(namespace))
        yield from ((f"{namespace_name}.", name, getattr(namespace, name, None)) for name in names)


def _find_path(target: Any) -> str | None:
    """Its import path, if it is in torch or the standard library and the path leads to it."""
    module = getattr(target, "__module__", None)
    if not isinstance(module, str) or not _is_always_installed(module):
        return None
    for attribute in ("__qualname__", "__name__"):
        path = getattr(target, attribute, None)
        if isinstance(path, str) and _follow(module, path) is target:
            return f"{module}.{path}"
    return None


def _is_always_installed(module: str) -> bool:
    """Whether the module comes with Python or torch."""
    root = module.split(".")[0]
    return root == "torch" or (root in sys.stdlib_module_names and root != "__main__")


def _follow(module: str, path: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


_SWITCHES = {*SETTERS, *EXITS, *EXITS.values()}


def describe_ops(subgraph: Subgraph) -> tuple[SuspectOp, ...]:
    """The ops of a subgraph in order, without ops that compute nothing."""
    return tuple(
        SuspectOp(
            op=name_op(node),
            module=module_of(node) or None,
            source=_find_source(node),
        )
        for node in _list_ops(subgraph.graph)
    )


def _find_source(node: fx.Node) -> Source | None:
    """The user's line behind a node, with the name of the function that the user wrote."""
    source = user_source(node.meta.get("stack_trace") or "")
    return source and replace(source, function=function_name(source.function))


def _list_ops(graph: fx.GraphModule) -> Iterator[fx.Node]:
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    written = [node for node in nodes if not _is_support(node)]
    return iter(written or nodes)


def _is_support(node: fx.Node) -> bool:
    """Whether the node computes nothing: it takes an item of a tuple, or switches a mode."""
    return (
        name_op(node) == "operator.getitem"
        or node.target in _SWITCHES
        or is_level_machinery(node.target)
    )
