"""The wheel works where only what it declares is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardscope"
# Whose plugins these are: the package is installed when the plugin is used.
OPTIONAL = {"pytest"}
TIMEOUT_S = 200

VERBS = """
import sys
sys.path += {paths!r}
from shardscope.cli import main
for arguments in {commands!r}:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
print("numpy" in sys.modules, "pytest" in sys.modules, sys.modules["shardscope"].__file__)
"""


def find_installed(requirements: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """What an installer would install for them, of what is installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [Requirement(text) for text in requirements]
    seen = set()
    while wanted:
        one = wanted.pop()
        key = (re.sub(r"[-_.]+", "-", one.name).lower(), frozenset(one.extras))
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = importlib.metadata.distribution(one.name)
        for text in found[key[0]].requires or ():
            needed = Requirement(text)
            extras = {"", *one.extras}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                wanted.append(needed)
    return found


def link_top_levels(
    distributions: Iterable[importlib.metadata.Distribution], folder: Path
) -> list[str]:
    """Have in a folder what these distributions installed, and nothing else."""
    for distribution in distributions:
        names = {file.parts[0] for file in distribution.files or ()}
        for name in names - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(name)))
            if source.exists() and not (folder / name).exists():
                (folder / name).symlink_to(source)
    return sorted(path.stem for path in folder.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, unpacked."""
    pytest.importorskip("hatchling", reason="it is installed with .[dev]")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=TIMEOUT_S)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def read_requirements(wheel: Path) -> list[str]:
    (metadata,) = wheel.glob("*.dist-info")
    declared = importlib.metadata.Distribution.at(metadata).requires or []
    requirements = [Requirement(text) for text in declared]
    return [
        str(one) for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})
    ]


def test_demo_show_and_report_need_only_what_is_declared(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    names = link_top_levels(find_installed(read_requirements(wheel)).values(), installed)
    assert "torch" in names
    assert "pytest" not in names
    commands = [
        ["demo", "--layers", "1", "-o", "demo.json"],
        ["show", "demo.json"],
        ["report", "demo.json", "-o", "demo.html"],
    ]
    program = VERBS.format(paths=[str(wheel), str(installed)], commands=commands)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],  # without site-packages
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert last == f"True False {wheel}/shardscope/__init__.py"
    assert json.loads((tmp_path / "demo.json").read_bytes())["collectives"]
    assert "<script" in (tmp_path / "demo.html").read_text()


def test_every_import_is_of_something_declared() -> None:
    """What torch brings along counts: it is there wherever torch is."""
    declared = importlib.metadata.distribution("shardscope").requires or []
    installed = find_installed(text for text in declared if "extra ==" not in text)
    tops = {
        file.parts[0].removesuffix(".py")
        for distribution in installed.values()
        for file in distribution.files or ()
    }
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    missing = imported - tops - set(sys.stdlib_module_names) - OPTIONAL - {"shardscope"}
    assert missing == set()
