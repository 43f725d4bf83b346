"""Imports point one way: each package imports only packages below it, and so do subpackages."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from source_trees import list_nodes

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardscope"

EVERYTHING_BELOW_CLI = {
    "record",
    "_torch",
    "world",
    "attribution",
    "plan",
    "hang",
    "comm",
    "shard",
    "numerics",
    "compile",
    "parallel",
    "contract",
    "report",
    "launch",
    "checks",
    "errors",
    "version",
}

# The packages, and single files at the top, that files of a package may import besides their own.
ALLOWED = {
    "record": {"errors", "drawing"},
    "errors": set(),
    # Imports the HTML renderer when `recording.html()` is called; records know nothing else of it.
    "drawing": {"report"},
    "version": set(),
    "_torch": {"record", "errors", "version"},
    "world": {"record", "_torch", "errors"},
    # Module names, call sites and run identity, which every instrument charges its records to.
    "attribution": {"record", "_torch", "world", "errors", "version"},
    # What ranks have issued, and who waits for whom, read from recordings without torch.
    "hang": {"record", "errors"},
    "comm": {"record", "_torch", "world", "attribution", "hang", "errors", "version"},
    # Plans as users write them, which `audit` and `parallelize` read.
    "plan": {"record", "errors"},
    "shard": {"record", "_torch", "world", "attribution", "plan", "numerics", "errors", "version"},
    "numerics": {"record", "_torch", "attribution", "errors"},
    "compile": {"record", "_torch", "world", "attribution", "numerics", "errors", "version"},
    # Observes a program with several instruments.
    "launch": {
        "record",
        "_torch",
        "world",
        "attribution",
        "hang",
        "comm",
        "shard",
        "compile",
        "numerics",
        "parallel",
        "errors",
    },
    # Compares the ranks of a launched program.
    "checks": {"record", "_torch", "world", "hang", "launch", "errors"},
    "parallel": {
        "record",
        "_torch",
        "world",
        "attribution",
        "plan",
        "numerics",
        "errors",
        "version",
    },
    # A contract is checked wherever there is a recording, without torch.
    "contract": {"record", "errors"},
    "report": {"record", "errors", "drawing"},
    "compat": EVERYTHING_BELOW_CLI,
    "cli": EVERYTHING_BELOW_CLI | {"compat"},
    # Trainers and test runners: beside cli, the only package that combines others.
    "plugins": EVERYTHING_BELOW_CLI | {"testing"},
    "testing": {"plugins"},
    "__main__": {"cli"},
    # The public API, whose names load when first used, and the magics of notebooks.
    "__init__": EVERYTHING_BELOW_CLI | {"plugins"},
}

TORCHLESS = ("record", "hang", "contract", "report", "errors", "version", "drawing")

FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, anywhere in it, with the line."""
    for node in list_nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the full name."
            module = node.module or ""
            # `from shardscope import record` names a package only in what it imports.
            names = [alias.name for alias in node.names] if module == "shardscope" else [""]
            yield from ((node.lineno, f"{module}.{name}".rstrip(".")) for name in names)


def modules_in_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Modules of ours that a file names in a string, to import them when they are needed."""
    for node in list_nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"shardscope\.(\w+)(\.\w*)*", node.value)
            if match is not None and match[1] in ALLOWED:
                yield node.lineno, node.value


def test_every_package_lists_what_it_may_import() -> None:
    assert len(FILES) > 100
    new = {package_of(path) for path in FILES} - set(ALLOWED)
    assert new == set(), f"{sorted(new)} are new packages: list here what they may import."


def imports_upwards(path: Path) -> Iterator[str]:
    """A sentence for each import of a file that its package may not have."""
    package = package_of(path)
    allowed = ALLOWED.get(package, set()) | {package}
    for line, module in (*imported_modules(path), *modules_in_strings(path)):
        if module.split(".")[0] != "shardscope":
            continue
        target = module.split(".")[1] if "." in module else "__init__"
        if target not in allowed:
            yield (
                f"{path.relative_to(SOURCE)}:{line} imports {module}, but {package} may import "
                f"only {', '.join(sorted(allowed))}. Move the code to the package it belongs to."
            )


def test_a_file_imports_only_packages_below_its_own() -> None:
    wrong = [sentence for path in FILES for sentence in imports_upwards(path)]
    assert wrong == [], "\n".join(wrong)


def subpackage_imports() -> dict[str, set[str]]:
    """For each subpackage (a folder, by its path) the subpackages that its files import."""
    folders = {path.relative_to(SOURCE).parent for path in FILES}
    imports: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        importer = path.relative_to(SOURCE).parent
        if importer == Path("."):
            continue  # the public API and its helpers, on top of everything
        for node in list_nodes(path):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            parts = node.module.split(".")
            for name in [alias.name for alias in node.names] if parts[0] == "shardscope" else []:
                target = Path(*parts[1:], name)
                while target not in folders:
                    target = target.parent
                if target not in (importer, Path(".")):
                    imports[str(importer)].add(str(target))
    return imports


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """The subpackages on circles of imports, and those between two circles; none is a []."""
    names = set(imports) | {target for targets in imports.values() for target in targets}
    while True:
        importing = {name for name in names if imports.get(name, set()) & names}
        imported = {target for name in names for target in imports.get(name, set())}
        if importing & imported == names:
            return sorted(names)
        names = importing & imported & names


def test_subpackages_do_not_import_each_other_in_circles() -> None:
    assert find_cycle(subpackage_imports()) == []


def test_a_circle_of_subpackages_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_reading_and_showing_a_recording_needs_no_torch() -> None:
    torch_imports = [
        f"{path.relative_to(SOURCE)}:{line}: {module}"
        for path in FILES
        if package_of(path) in TORCHLESS
        for line, module in imported_modules(path)
        if module.split(".")[0] == "torch"
    ]
    assert torch_imports == []


def test_the_check_sees_late_imports_and_strings(tmp_path: Path) -> None:
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
    assert list(modules_in_strings(file)) == [(7, "shardscope.report.text")]
