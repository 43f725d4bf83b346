"""Formats plain values, line breaks and variable names in generated source."""

from __future__ import annotations

import builtins
import cmath
import keyword
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict

from shardscope.compile.diagnose.subgraph.op_names import NotPrintable, format_target
from shardscope.compile.diagnose.worker import harness

Namer = Callable[[fx.Node], str]


def _no_names(node: fx.Node) -> str:
    raise NotPrintable(f"{node.name} is computed by the program, not a value.")


def format_value(value: Any, name_node: Namer = _no_names) -> str:
    """A value as an expression; `name_node` gives the variable names of nodes in it."""
    if isinstance(value, fx.Node):
        return name_node(value)
    if isinstance(value, float | complex) and type(value) in (float, complex):
        return _format_number(value)
    if type(value) is str:
        return _format_text(value)
    if value is None or type(value) in (bool, int, bytes):
        return repr(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice({', '.join(format_value(part, name_node) for part in parts)})"
    if isinstance(value, list | tuple | dict | set | frozenset):
        return _format_collection(value, name_node)
    return _format_of_torch(value)


def format_index(index: Any, name_node: Namer = _no_names) -> str:
    """An index as it is written between square brackets."""
    if isinstance(index, tuple) and type(index) is tuple and index:
        parts = [_format_subscript(part, name_node) for part in index]
        return f"{parts[0]}," if len(parts) == 1 else ", ".join(parts)
    return _format_subscript(index, name_node)


def _format_subscript(index: Any, name_node: Namer) -> str:
    if not isinstance(index, slice):
        return format_value(index, name_node)
    ends = (index.start, index.stop)
    text = ":".join("" if end is None else format_value(end, name_node) for end in ends)
    return text if index.step is None else f"{text}:{format_value(index.step, name_node)}"


def _format_text(value: str) -> str:
    """Like repr, but with double quotes if the text needs no escapes."""
    text = ascii(value)
    return text if '"' in text or "\\" in text else f'"{text[1:-1]}"'


def _format_number(value: float | complex) -> str:
    if isinstance(value, complex):
        if cmath.isfinite(value) and math.copysign(1, value.real) > 0 < math.copysign(
            1, value.imag
        ):
            return repr(value)
        return f"complex({_format_number(value.real)}, {_format_number(value.imag)})"
    if math.isnan(value):
        return "torch.nan"
    if math.isinf(value):
        return "torch.inf" if value > 0 else "-torch.inf"
    return repr(value)


def _format_collection(value: Any, name_node: Namer) -> str:
    if isinstance(value, dict):
        if type(value) is not dict and not isinstance(value, immutable_dict):
            raise NotPrintable(f"a {type(value).__qualname__} has no literal form.")
        pairs = (
            f"{format_value(key, name_node)}: {format_value(item, name_node)}"
            for key, item in value.items()
        )
        return f"{{{', '.join(pairs)}}}"
    parts = [format_value(item, name_node) for item in value]
    if isinstance(value, torch.Size):
        return f"torch.Size([{', '.join(parts)}])"
    if hasattr(value, "_fields"):
        return f"{format_target(type(value))}({', '.join(parts)})"
    if isinstance(value, list):
        return f"[{', '.join(parts)}]"
    if isinstance(value, tuple):
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    kind = type(value).__name__
    return f"{kind}([{', '.join(sorted(parts))}])"  # sets are unordered


def _format_of_torch(value: Any) -> str:
    if isinstance(value, torch.device):
        return f"torch.device({_format_text(str(value))})"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise NotPrintable("a size that was left open has no number.")
    if getattr(value, "name", None) in getattr(
        type(value), "__members__", ()
    ):  # torch's, or enum's
        return f"{format_target(type(value))}.{value.name}"
    if isinstance(value, range):
        return repr(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return format_value(value.item())
    return format_target(value)


_WIDTH = 100
_NUMBERS_WIDTH = 96  # they are indented in the body of a function
_UNBROKEN: Any = {"break_long_words": False, "break_on_hyphens": False}


def wrap_call(function: str, parts: Sequence[str], end: str, *, indent: str) -> list[str]:
    """A call or a definition on one line, or with one argument per line."""
    line = f"{indent}{function}({', '.join(parts)}){end}"
    if len(line) <= _WIDTH or not parts:
        return [line]
    inner = f"{indent}    "
    return [f"{indent}{function}(", *(f"{inner}{part}," for part in parts), f"{indent}){end}"]


def wrap_numbers(line: str) -> list[str]:
    """A long line of nested lists with one row per line; rows that are too long take several lines.

    All spaces after the first bracket must be inside brackets.
    """
    if len(line) <= _NUMBERS_WIDTH:
        return [line]
    first, *rows = line.replace("], [", "],\n[").split("\n")
    lines = textwrap.wrap(first, _NUMBERS_WIDTH, subsequent_indent="    ", **_UNBROKEN)
    for row in rows:
        lines += textwrap.wrap(
            row, _NUMBERS_WIDTH, initial_indent="    ", subsequent_indent="     ", **_UNBROKEN
        )
    return lines


def with_remark(lines: list[str], remark: str) -> list[str]:
    """Lines of code with a comment after the first, or before it if the line would be too long."""
    if not remark:
        return lines
    if len(lines[0]) + len(remark) + 4 <= _WIDTH:
        return [f"{lines[0]}  # {remark}", *lines[1:]]
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [f"{indent}# {remark}", *lines]


# Names that the script itself defines, and the modules that it imports.
_SCRIPT = {
    *harness.__all__,
    *(
        "check",
        "check_numbers",
        "f",
        "passing_f",
        "main",
        "code",
        "make_inputs",
        "make_passing_inputs",
        "load_saved",
    ),
    *("compile_f", "compile_passing_f", "saved", "Any", "torch", "math", "operator", "functools"),
    *("atexit", "os", "pathlib", "pickle", "re", "shutil", "signal", "subprocess", "sys"),
    *("copy", "glob", "tempfile", "time", "traceback"),
}
_BUILTINS = {*dir(builtins)} - {*keyword.kwlist}
_FIXED = {"torch", *keyword.kwlist}  # names that cannot be replaced
_RESERVED = {*_SCRIPT, *_BUILTINS, *_FIXED}
# How dynamo names an input by its origin: L_self_modules_up_parameters_weight_.
_DYNAMO = re.compile(r"_?(?:modules|parameters|buffers|stack\d+)_")
_LONGEST = 40


@final
class Names:
    """Gives each variable and function of a script a unique name."""

    def __init__(self) -> None:
        self._taken = set(_RESERVED)
        self._user_names: set[str] = set()  # names of the user's functions and globals
        self._replacements: dict[str, str] = {}

    def give(self, preferred: str) -> str:
        """A unique name that is equal or similar to `preferred`."""
        name = re.sub(r"\W", "_", preferred, flags=re.ASCII)[-_LONGEST:].lstrip("_") or "value"
        name = name if not name[0].isdigit() else f"v{name}"
        unique, number = name, 1
        while unique in self._taken:
            unique, number = f"{name}_{number}", number + 1
        self._taken.add(unique)
        return unique

    def give_input(self, preferred: str) -> str:
        """A name for an input, without the prefixes that dynamo adds."""
        short = re.sub(r"^[lL]_(?:self_|fn_|model_|mod_)?", "", preferred)
        short = _DYNAMO.sub("_", short).strip("_")
        return self.give(re.sub(r"_+", "_", short) or preferred)

    def reserve(self, name: str) -> bool:
        """Reserve a name for the user's object of that name; False if the name is not available.

        If the script itself uses the name, the script's use is replaced: see `replacements`.
        """
        if name in self._user_names or name in _FIXED or name in self._taken - _RESERVED:
            return False
        self._taken.add(name)
        self._user_names.add(name)
        return True

    def replacements(self) -> dict[str, str]:
        """The script's own names that the user's objects have taken, and what to write instead."""
        clashing = sorted(self._user_names & _RESERVED)
        self._replacements |= {
            name: f"builtins.{name}" if name in _BUILTINS else self.give(name)
            for name in clashing
            if name not in self._replacements
        }
        return self._replacements


def exchange_names(source: str, names: Mapping[str, str]) -> str:
    """Source with names replaced; attributes are left unchanged."""
    if not names:
        return source
    # A name before a quote is a string prefix.
    pattern = rf"(?<![\w.])(?:{'|'.join(map(re.escape, names))})(?![\w\"'])"
    return re.sub(pattern, lambda match: names[match[0]], source)


def comment(text: str, *, width: int = _WIDTH) -> str:
    """Text that is safe inside a comment: one line without unprintable characters."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    printable = " ".join(printable.split())
    return printable if len(printable) <= width else f"{printable[: width - 1]}…"
