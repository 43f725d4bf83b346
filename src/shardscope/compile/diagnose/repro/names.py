"""Names for what a script holds: short, unlike each other, and never Python's own."""

from __future__ import annotations

import builtins
import keyword
import re
from typing import final

from shardscope.compile.diagnose.repro import harness

__all__ = ["Names", "comment"]

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
    *("tempfile", "traceback"),
}
_TAKEN = {*_SCRIPT, *dir(builtins), *keyword.kwlist}
# How dynamo spells where it found an input: L_self_modules_up_parameters_weight_.
_DYNAMO = re.compile(r"_?(?:modules|parameters|buffers|stack\d+)_")
_LONGEST = 40
_WIDTH = 100


@final
class Names:
    """Gives each thing of a script a name of its own."""

    def __init__(self) -> None:
        self._taken = set(_TAKEN)

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
        """Take a name as it is; False if something else has it."""
        if name in self._taken:
            return False
        self._taken.add(name)
        return True


def comment(text: str, *, width: int = _WIDTH) -> str:
    """Text made safe to stand after a #: one line that nothing in it can end."""
    plain = "".join(one if one.isprintable() else " " for one in text)
    plain = " ".join(plain.split())
    return plain if len(plain) <= width else f"{plain[: width - 1]}…"
