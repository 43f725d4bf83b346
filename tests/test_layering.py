"""Imports point one way: each room may know only the rooms below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardscope"

EVERYTHING_BELOW_CLI = {
    "record",
    "_torch",
    "world",
    "comm",
    "shard",
    "numerics",
    "compile",
    "parallel",
    "contract",
    "report",
    "errors",
    "version",
}

# The rooms, and single files at the top, that files of a room may import besides their own.
ALLOWED = {
    "record": {"errors", "drawing"},
    "errors": set(),
    # The one door from a recording to its page, opened when somebody asks for that.
    "drawing": {"report"},
    "version": set(),
    "_torch": {"record", "errors", "version"},
    "world": {"record", "_torch", "errors"},
    "comm": {"record", "_torch", "world", "errors", "version"},
    # Memory and coverage are charged to modules and lines as collectives are.
    "shard": {"record", "_torch", "world", "comm", "errors", "version"},
    # How far off a number may be, whoever computed it: ranks or a compiler.
    "numerics": {"record", "_torch", "shard", "errors"},
    # Ops are charged to modules and lines as collectives are; results are judged as ranks' are.
    "compile": {"record", "_torch", "world", "comm", "shard", "numerics", "errors", "version"},
    # A program is verified with the numerics, the worlds and the matching of names of the others.
    "parallel": {"record", "_torch", "world", "comm", "shard", "numerics", "errors", "version"},
    # What it must keep: whoever has a recording can check it.
    "contract": {"record", "errors"},
    "report": {"record"},
    "compat": EVERYTHING_BELOW_CLI,
    "cli": EVERYTHING_BELOW_CLI | {"compat"},
    # Beside cli the only place that puts rooms together: what other programs call to run things.
    "plugins": EVERYTHING_BELOW_CLI | {"testing"},  # an error names where people find it
    "testing": {"plugins"},
    "__main__": {"cli"},
    # The public API, whose names load when first used.
    "__init__": EVERYTHING_BELOW_CLI,
}

TORCHLESS = ("record", "contract", "report", "errors", "version", "drawing")

FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, anywhere in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; say the whole name."
            module = node.module or ""
            # `from shardscope import record` names a room only in what it imports.
            names = [alias.name for alias in node.names] if module == "shardscope" else [""]
            yield from ((node.lineno, f"{module}.{name}".rstrip(".")) for name in names)


def rooms_in_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Modules of ours that a file names in a string, to import them when they are needed."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.fullmatch(r"shardscope\.(\w+)(\.\w*)*", node.value)
            if found is not None and found[1] in ALLOWED:
                yield node.lineno, node.value


def test_every_room_says_what_it_may_import() -> None:
    assert len(FILES) > 100
    new = {room_of(path) for path in FILES} - set(ALLOWED)
    assert new == set(), f"{sorted(new)} are new rooms: say here what they may import."


def imports_upwards(path: Path) -> Iterator[str]:
    """What a file imports that its room may not, each told in a sentence."""
    room = room_of(path)
    allowed = ALLOWED.get(room, set()) | {room}
    for line, module in (*imported_modules(path), *rooms_in_strings(path)):
        if module.split(".")[0] != "shardscope":
            continue
        target = module.split(".")[1] if "." in module else "__init__"
        if target not in allowed:
            yield (
                f"{path.relative_to(SOURCE)}:{line} imports {module}, but {room} may import only "
                f"{', '.join(sorted(allowed))}. Move the code to the room that it belongs to."
            )


def test_a_file_imports_only_rooms_below_its_own() -> None:
    wrong = [sentence for path in FILES for sentence in imports_upwards(path)]
    assert wrong == [], "\n".join(wrong)


def test_reading_and_showing_a_recording_needs_no_torch() -> None:
    torch_imports = [
        f"{path.relative_to(SOURCE)}:{line}: {module}"
        for path in FILES
        if room_of(path) in TORCHLESS
        for line, module in imported_modules(path)
        if module.split(".")[0] == "torch"
    ]
    assert torch_imports == []


def test_the_check_sees_imports_wherever_they_hide(tmp_path: Path) -> None:
    file = tmp_path / "hidden.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from shardscope.comm.trace import Trace\n"
        "def late():\n"
        "    import shardscope.cli.show as show\n"
        "    from shardscope import world\n"
        "    return 'shardscope.report.text'\n"
    )
    assert list(imported_modules(file)) == [
        (1, "typing"),
        (3, "shardscope.comm.trace"),
        (5, "shardscope.cli.show"),
        (6, "shardscope.world"),
    ]
    assert list(rooms_in_strings(file)) == [(7, "shardscope.report.text")]
