"""The guide's program does what the guide says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "explain.md"


def test_the_program_in_the_guide_prints_what_the_guide_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.chdir(tmp_path)  # lines are shown relative to it
    torch.manual_seed(0)
    text = GUIDE.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "guide.py"
    file.write_text(program)
    exec(compile(program, str(file), "exec"), {"__name__": "guide"})
    printed = " ".join(capsys.readouterr().out.split())
    _, shown = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    for line in shown.splitlines():
        assert " ".join(line.split()) in printed, line
