"""Names for what a script holds: short, unlike each other, and never Python's own."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Mapping
from typing import final

from shardscope.compile.diagnose.repro import harness

__all__ = ["Names", "comment", "exchange_names"]

# What the script itself calls so, and the modules that it imports.
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
_FIXED = {"torch", *keyword.kwlist}  # what nobody can call something else
_TAKEN = {*_SCRIPT, *_BUILTINS, *_FIXED}
# How dynamo spells where it found an input: L_self_modules_up_parameters_weight_.
_DYNAMO = re.compile(r"_?(?:modules|parameters|buffers|stack\d+)_")
_LONGEST = 40
_WIDTH = 100


@final
class Names:
    """Gives each thing of a script a name of its own."""

    def __init__(self) -> None:
        self._taken = set(_TAKEN)
        self._users: set[str] = set()  # as the user has them
        self._others: dict[str, str] = {}

    def give(self, wish: str) -> str:
        """A name as near to the wish as it can be."""
        name = re.sub(r"\W", "_", wish, flags=re.ASCII)[-_LONGEST:].lstrip("_") or "value"
        name = name if not name[0].isdigit() else f"v{name}"
        unique, number = name, 1
        while unique in self._taken:
            unique, number = f"{name}_{number}", number + 1
        self._taken.add(unique)
        return unique

    def give_input(self, wish: str) -> str:
        """A name for an input, without dynamo's account of where it came from."""
        short = re.sub(r"^[lL]_(?:self_|fn_|model_|mod_)?", "", wish)
        short = _DYNAMO.sub("_", short).strip("_")
        return self.give(re.sub(r"_+", "_", short) or wish)

    def reserve(self, name: str) -> bool:
        """Take a name for what the user calls so; False if something else has it.

        What the script itself calls so, or takes from Python, gets another name: see `others`.
        """
        if name in self._users or name in _FIXED or name in self._taken - _TAKEN:
            return False
        self._taken.add(name)
        self._users.add(name)
        return True

    def others(self) -> dict[str, str]:
        """Names of the script's own that the user has taken, and what to write instead."""
        clashing = sorted(self._users & _TAKEN)
        self._others |= {
            name: f"builtins.{name}" if name in _BUILTINS else self.give(name)
            for name in clashing
            if name not in self._others
        }
        return self._others


def exchange_names(source: str, names: Mapping[str, str]) -> str:
    """Source with names exchanged for others; attributes are not names."""
    if not names:
        return source
    # A name before a quote says what kind of string follows.
    pattern = rf"(?<![\w.])(?:{'|'.join(map(re.escape, names))})(?![\w\"'])"
    return re.sub(pattern, lambda found: names[found[0]], source)


def comment(text: str, *, width: int = _WIDTH) -> str:
    """Text made safe to stand after a #: one line that nothing in it can end."""
    plain = "".join(one if one.isprintable() else " " for one in text)
    plain = " ".join(plain.split())
    return plain if len(plain) <= width else f"{plain[: width - 1]}…"
