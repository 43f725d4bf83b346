"""The guide's program does what the guide says."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from home_workers import stay_at_home

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "diagnose.md"
_ROUNDED = re.compile(r"\d+\.\d+(e[-+]\d+)?")  # not the same on all processors


def words(text: str) -> str:
    return _ROUNDED.sub("#", " ".join(text.split()))


def test_the_program_in_the_guide_prints_what_the_guide_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_at_home(monkeypatch)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.chdir(tmp_path)  # lines are shown relative to it
    text = GUIDE.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "guide.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "guide", None)  # as it was before, afterwards
    del sys.modules["guide"]
    importlib.import_module("guide")
    printed = words(capsys.readouterr().out)
    _, shown = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    for line in shown.splitlines():
        assert words(line) in printed, line
    script = (tmp_path / "shardscope-diagnosis" / "repro.py").read_text()
    assert "node.target = F.relu6" in script
