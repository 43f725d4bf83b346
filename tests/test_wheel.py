"""The wheel works where only what it declares is installed, and the sdist builds the same wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from shardscope.version import TESTED_TORCH, __version__
from source_trees import list_nodes

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardscope"
# Whose plugins these are: the package is installed when the plugin is used. anyio comes with mcp.
OPTIONAL = {"IPython", "anyio", "mcp", "pytest"}
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


def build(project: Path, target: str, folder: Path) -> Path:
    """Build a wheel or an sdist of a project, without an environment of its own."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=TIMEOUT_S)
    (built,) = (path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, unpacked."""
    pytest.importorskip("hatchling", reason="it is installed with .[dev]")
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(build(ROOT, "wheel", folder)) as archive:
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
        for node in list_nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    missing = imported - tops - set(sys.stdlib_module_names) - OPTIONAL - {"shardscope"}
    assert missing == set()


def list_files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_the_wheel_has_every_file_of_the_package_and_its_licence_and_nothing_else(
    wheel: Path,
) -> None:
    info = f"shardscope-{__version__}.dist-info"
    about = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert list_files(wheel) == {
        *(f"shardscope/{name}" for name in list_files(SOURCE)),
        *about,
        f"{info}/licenses/LICENSE",
    }
    # What is not Python, and would be missed only by users.
    for name in ("report/bundle/app.js", "report/tui/browser.tcss", "py.typed"):
        assert (wheel / "shardscope" / name).is_file()


def test_the_metadata_are_valid_and_the_readme_renders(wheel: Path) -> None:
    metadata = Metadata.from_email((next(wheel.glob("*.dist-info")) / "METADATA").read_bytes())
    assert str(metadata.version) == __version__
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert all(f" {version}" in (metadata.summary or "") for version in TESTED_TORCH)
    assert "<h1>shardscope</h1>" in MarkdownIt("commonmark").render(metadata.description or "")
    licence = next(wheel.glob("*.dist-info")) / "licenses" / "LICENSE"
    assert "Apache License" in licence.read_text()


def test_the_sdist_has_what_the_wheel_needs_and_builds_the_same_wheel(
    wheel: Path, tmp_path: Path
) -> None:
    for name in ("sdist", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build(ROOT, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    project = tmp_path / f"shardscope-{__version__}"
    tops = {name.split("/")[0] for name in list_files(project)}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "src"} <= tops
    assert not tops & {"tests", "web", "docs", "benchmarks", "examples"}
    assert not [name for name in list_files(project) if "node_modules" in name]
    with zipfile.ZipFile(build(project, "wheel", tmp_path / "wheel")) as archive:
        rebuilt = archive.read(f"shardscope-{__version__}.dist-info/RECORD").decode()
    (record,) = wheel.glob("*.dist-info/RECORD")
    assert rebuilt == record.read_text()


def test_the_citation_has_the_fields_of_cff_and_our_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    assert all(set(author) & {"name", "family-names"} for author in citation["authors"])
