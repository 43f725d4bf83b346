"""What each module offers: `__all__` is complete, sorted and true, and the top level is lazy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import shardscope
from source_trees import list_nodes, parse

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardscope"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__main__.py"  # importing it runs the command line
}


@cache
def listed_names(path: Path) -> list[str] | None:
    """`__all__` as written, or None."""
    for node in parse(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    return None


def defined_names(path: Path) -> set[str]:
    """Public functions, classes and constants that the module itself defines."""
    names: set[str] = set()
    for node in list_nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def names_taken_elsewhere() -> dict[str, set[str]]:
    """Names that other files of ours import, by the module they import them from."""
    taken: dict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for node in list_nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardscope"):
                taken[node.module or ""] |= {alias.name for alias in node.names}
    return taken


# Modules that users import by name; in others, public names are those without an underscore.
PUBLIC_MODULES = {
    "shardscope.compat",
    "shardscope.errors",
    "shardscope.plugins.accelerate",
    "shardscope.plugins.lightning",
    "shardscope.plugins.mlflow",
    "shardscope.plugins.pytest",
    "shardscope.plugins.ray",
    "shardscope.plugins.tensorboard",
    "shardscope.plugins.torchtitan",
    "shardscope.plugins.training_loop",
    "shardscope.plugins.transformers",
    "shardscope.plugins.wandb",
    "shardscope.testing",
    # Copied into repro scripts, whose variables must not repeat a name of it.
    "shardscope.compile.diagnose.worker.harness",
}


def test_only_packages_and_public_modules_have_all() -> None:
    listing = {name for name, path in FILES.items() if listed_names(path) is not None}
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}
    assert listing - packages == PUBLIC_MODULES


def test_names_are_imported_from_where_they_are_defined_or_exported() -> None:
    all_taken = names_taken_elsewhere()
    missing = {}
    for name, path in FILES.items():
        own = f"{name}."
        submodules = {other.removeprefix(own) for other in FILES if other.startswith(own)}
        offered = submodules | defined_names(path) | set(listed_names(path) or [])
        missing[name] = all_taken[name] - offered
    assert {name: sorted(names) for name, names in missing.items() if names} == {}


def test_all_lists_only_what_exists() -> None:
    missing = [
        f"{module}.{name}"
        for module, path in FILES.items()
        for name in listed_names(path) or []
        if not hasattr(import_module(module), name)
    ]
    assert missing == []


def test_every_module_can_be_imported() -> None:
    for name in FILES:
        import_module(name)


def test_all_is_sorted_constants_first_then_classes_then_functions() -> None:
    def rank(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    listed = {name: listed_names(path) or [] for name, path in FILES.items()}
    # Sorted, and each name once.
    wrong = {name for name, names in listed.items() if names != sorted({*names}, key=rank)}
    assert wrong == set()


def test_the_public_names_are_those_of_the_lazy_table() -> None:
    assert shardscope.__all__ == list(shardscope._HOMES)
    assert sorted(shardscope.__all__) == dir(shardscope)


def test_every_public_name_resolves_to_the_object_of_its_defining_module() -> None:
    for name, home in shardscope._HOMES.items():
        assert getattr(shardscope, name) is getattr(import_module(home), name)


def test_type_checkers_see_every_public_name() -> None:
    tree = parse(SOURCE / "__init__.py")
    seen = {
        (alias.name, node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(shardscope._HOMES.items())


def test_a_name_we_do_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shardscope' has no attribute 'tracee'"):
        _ = shardscope.tracee


@pytest.mark.parametrize(
    "statement",
    [
        "import shardscope",
        "import shardscope; shardscope.load, shardscope.save, shardscope.merge, shardscope.diff",
        "from shardscope import Recording, ShardscopeError, __version__",
        "import shardscope.cli.show, shardscope.cli.export, shardscope.cli.report",
        "import shardscope.cli.diff, shardscope.cli.tui, shardscope.report.tui.browser",
        "import shardscope.contract, shardscope.cli.contract, shardscope.plugins.pytest",
        "import shardscope.report.text.summary, shardscope.report.export.csv",
    ],
)
def test_reading_recordings_does_not_import_torch(statement: str) -> None:
    program = f"{statement}\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


def test_importing_any_public_name_leaves_the_random_numbers_of_the_program_alone() -> None:
    program = """
import random
state = random.getstate()
import shardscope
for name in shardscope.__all__:
    getattr(shardscope, name)
    assert random.getstate() == state, name
import shardscope.compat, shardscope.report.show, shardscope.cli
assert random.getstate() == state
print("kept")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("kept", "")


def test_docstrings_have_no_lone_surrogates_which_python_3_13_does_not_compile() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in list_nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                (ast.get_docstring(node, clean=False) or "").encode()
