"""Operators and torch's functions on their way to another process: by name, and what defines them.

An op that the user registered may not exist there: it is defined again, from its functions or by an
import of the module that registered it.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Any, final

import torch

from shardscope._torch.custom_ops import CustomOp, describe_custom_op, register_custom_op
from shardscope._torch.operators import find_operator, name_operator, registered_at
from shardscope.compile.diagnose.isolation.importable import is_importable
from shardscope.errors import CompileError

__all__ = ["OperatorForm", "build_operator", "describe_operator", "find_function", "name_function"]

_TORCHS = ("aten", "prim", "prims", "higher_order")


@final
@dataclass(frozen=True)
class OperatorForm:
    """The names that lead to an op, and what must be done first where they lead nowhere."""

    names: tuple[str, ...]
    module: str = ""  # to import
    libraries: tuple[str, ...] = ()  # to load
    definition: CustomOp | None = None


def describe_operator(operator: Any) -> OperatorForm:
    """An op as plain data; raises CompileError if only this process can have it."""
    names = name_operator(operator)
    namespace, name = names[:2]
    if namespace == "higher_order":
        return OperatorForm(names, module=type(operator).__module__)
    if namespace in _TORCHS:
        return OperatorForm(names)
    if definition := describe_custom_op(f"{namespace}::{name}"):
        return OperatorForm(names, definition=definition)
    file = registered_at(namespace, name)
    libraries = tuple(sorted(torch.ops.loaded_libraries))
    module = _find_module(file, f"{namespace}::{name}") if file.endswith(".py") else ""
    return OperatorForm(names, module=module, libraries=libraries)


def build_operator(form: OperatorForm) -> Any:
    """The op of this process that has the names."""
    found = find_operator(form.names)
    if found is not None:
        return found
    for library in form.libraries:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    if form.definition is not None:
        register_custom_op(form.definition)
    found = find_operator(form.names, module=form.module)
    if found is None:
        raise CompileError(
            f"the op {'.'.join(form.names)} exists in your process alone: the worker found nothing "
            f"that defines it. Define it with torch.library.custom_op, or load its library with "
            f"torch.ops.load_library."
        )
    return found


def name_function(function: FunctionType) -> tuple[str, str] | None:
    """Where a function of torch's is that is not where it says: several are made by wrappers."""
    if not (function.__module__ or "").startswith("torch"):
        return None
    place = _misplaced_functions().get(id(function))
    return place if place is not None and find_function(*place) is function else None


def find_function(holder: str, name: str) -> Any:
    """What `name_function` named."""
    return getattr(_holders()[holder], name, None)


def _holders() -> dict[str, Any]:
    return {
        "torch": torch,
        "torch.nn.functional": torch.nn.functional,
        "torch.functional": torch.functional,
        "torch.Tensor": torch.Tensor,
    }


@functools.cache
def _misplaced_functions() -> dict[int, tuple[str, str]]:
    return {
        id(value): (holder, name)
        for holder, where in _holders().items()
        for name, value in vars(where).items()
        if isinstance(value, FunctionType) and not _is_in_place(value)
    }


def _is_in_place(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _find_module(file: str, op: str) -> str:
    """The module of a file, which another process can import."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file and is_importable(name):
            return name
    raise CompileError(
        f"the op {op} is registered in {file}, which the worker cannot import. Move it to a module "
        f"of its own, or define it with torch.library.custom_op."
    )
