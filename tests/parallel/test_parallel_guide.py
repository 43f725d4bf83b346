"""The guide's programs run as printed, and print what the guide says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardscope
from rank_processes import run_ranks

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "parallel.md"
BLOCK = re.compile(r"```([\w -]*)\n(.*?)```", re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Language and text of every block, in order."""
    return [(found[1], found[2]) for found in BLOCK.finditer(GUIDE.read_text())]


def file_name(text: str) -> str | None:
    """The name of the file that a block is, if it is one."""
    found = re.match(r"# (\w+\.py)\n", text)
    return found[1] if found else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the guide's files lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Also where the path to the package is a relative one.
    monkeypatch.setenv("PYTHONPATH", str(Path(shardscope.__file__).parents[1]))
    for language, text in blocks():
        name = file_name(text)
        if language == "python" and name:
            (tmp_path / name).write_text(text)
        elif language == "toml":
            (tmp_path / "plan.toml").write_text(text)
    yield tmp_path
    sys.modules.pop("llama", None)


def test_programs_in_the_guide_print_what_it_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = blocks()
    names: dict[str, Any] = {"__name__": "guide"}
    num_run = 0
    for (language, text), (following, printed) in zip(found, [*found[1:], ("", "")], strict=True):
        if language == "python" and not file_name(text):
            exec(compile(text, "guide.py", "exec"), names)
            said = capsys.readouterr().out
            assert said == (printed if following == "" else ""), text
            num_run += 1
    assert num_run > 5


def test_the_plan_in_the_guide_is_what_the_program_writes(folder: Path) -> None:
    (printed,) = [text for language, text in blocks() if language == "toml"]
    program = next(text for _, text in blocks() if 'plan.write("plan.toml")' in text)
    (folder / "plan.toml").unlink()
    exec(compile(program, "guide.py", "exec"), {"__name__": "guide"})
    assert (folder / "plan.toml").read_text() == printed


def test_ranks_in_the_guide_run(folder: Path) -> None:
    found = blocks()
    (at,) = [i for i, (_, text) in enumerate(found) if file_name(text) == "serve.py"]
    # Not how they end: torch's gloo now and then aborts a process then, without us too.
    for (_, printed), expected in zip(
        run_ranks(2, folder / "serve.py"), found[at + 2][1].splitlines(), strict=True
    ):
        assert expected in printed.splitlines(), printed


def test_ranks_in_the_guide_train(folder: Path) -> None:
    found = blocks()
    (at,) = [i for i, (_, text) in enumerate(found) if file_name(text) == "train.py"]
    (_, printed), *_ = run_ranks(2, folder / "train.py")
    assert [one for one in printed.splitlines() if one.startswith("step")] == (
        found[at + 2][1].splitlines()
    )


def test_links_in_the_guide_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", GUIDE.read_text())
    assert [link for link in links if not (GUIDE.parent / link).exists()] == []
