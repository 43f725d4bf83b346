"""The guide's program runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardscope.record import load

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "memory.md"


def test_program_in_the_guide_runs_and_saves_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    exec(compile(program, "guide.py", "exec"), {"__name__": "guide"})
    (profile,) = load("memory.json.gz").memory
    assert capsys.readouterr().out.startswith(f"{profile.peak_bytes} backward ")


def test_links_in_the_guide_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", GUIDE.read_text())
    assert len(links) > 1
    assert [link for link in links if not (GUIDE.parent / link).exists()] == []
