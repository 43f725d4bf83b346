"""Plain values as source text: what an op takes besides tensors."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict

from shardscope.compile.diagnose.repro.spelling import NotPrintable, spell_target

__all__ = ["spell_index", "spell_value"]

Namer = Callable[[fx.Node], str]


def _no_names(node: fx.Node) -> str:
    raise NotPrintable(f"{node.name} is computed by the program, not a value.")


def spell_value(value: Any, name_node: Namer = _no_names) -> str:
    """A value as an expression; nodes in it by the names that `name_node` gives them."""
    if isinstance(value, fx.Node):
        return name_node(value)
    if isinstance(value, float | complex) and type(value) in (float, complex):
        return _spell_number(value)
    if type(value) is str:
        return _spell_text(value)
    if value is None or type(value) in (bool, int, bytes):
        return repr(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice({', '.join(spell_value(part, name_node) for part in parts)})"
    if isinstance(value, list | tuple | dict | set | frozenset):
        return _spell_collection(value, name_node)
    return _spell_of_torch(value)


def spell_index(index: Any, name_node: Namer = _no_names) -> str:
    """What stands between square brackets."""
    if isinstance(index, tuple) and type(index) is tuple and index:
        parts = [_spell_subscript(one, name_node) for one in index]
        return f"{parts[0]}," if len(parts) == 1 else ", ".join(parts)
    return _spell_subscript(index, name_node)


def _spell_subscript(index: Any, name_node: Namer) -> str:
    if not isinstance(index, slice):
        return spell_value(index, name_node)
    ends = (index.start, index.stop)
    text = ":".join("" if one is None else spell_value(one, name_node) for one in ends)
    return text if index.step is None else f"{text}:{spell_value(index.step, name_node)}"


def _spell_text(value: str) -> str:
    """As repr does, between double quotes where nothing has to be escaped for them."""
    text = ascii(value)
    return text if '"' in text or "\\" in text else f'"{text[1:-1]}"'


def _spell_number(value: float | complex) -> str:
    if isinstance(value, complex):
        if cmath.isfinite(value) and math.copysign(1, value.real) > 0 < math.copysign(
            1, value.imag
        ):
            return repr(value)
        return f"complex({_spell_number(value.real)}, {_spell_number(value.imag)})"
    if math.isnan(value):
        return "torch.nan"
    if math.isinf(value):
        return "torch.inf" if value > 0 else "-torch.inf"
    return repr(value)


def _spell_collection(value: Any, name_node: Namer) -> str:
    if isinstance(value, dict):
        if type(value) is not dict and not isinstance(value, immutable_dict):
            raise NotPrintable(f"a {type(value).__qualname__} has no literal form.")
        pairs = (
            f"{spell_value(key, name_node)}: {spell_value(one, name_node)}"
            for key, one in value.items()
        )
        return f"{{{', '.join(pairs)}}}"
    parts = [spell_value(one, name_node) for one in value]
    if isinstance(value, torch.Size):
        return f"torch.Size([{', '.join(parts)}])"
    if hasattr(value, "_fields"):
        return f"{spell_target(type(value))}({', '.join(parts)})"
    if isinstance(value, list):
        return f"[{', '.join(parts)}]"
    if isinstance(value, tuple):
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    kind = type(value).__name__
    return f"{kind}([{', '.join(sorted(parts))}])"  # sets have no order of their own


def _spell_of_torch(value: Any) -> str:
    if isinstance(value, torch.device):
        return f"torch.device({_spell_text(str(value))})"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise NotPrintable("a size that was left open has no number.")
    if getattr(value, "name", None) in getattr(
        type(value), "__members__", ()
    ):  # torch's, or enum's
        return f"{spell_target(type(value))}.{value.name}"
    if isinstance(value, range):
        return repr(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return spell_value(value.item())
    return spell_target(value)
