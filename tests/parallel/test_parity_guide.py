"""The guide's program does what the guide says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "parity.md"


def test_the_program_in_the_guide_prints_what_the_guide_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    monkeypatch.chdir(tmp_path)  # lines are shown relative to it
    text = GUIDE.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "parity.py"
    file.write_text(program)
    exec(compile(program, str(file), "exec"), {"__name__": "guide"})
    printed = " ".join(capsys.readouterr().out.split())
    _, shown, *_ = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    for line in shown.splitlines():
        words = re.sub(r"\d\.\de-\d\d", "", line).split("parity.py:")
        assert " ".join(words[-1].split()) in re.sub(r" \d\.\de-\d\d", "", printed), line
