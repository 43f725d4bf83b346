"""The guide's programs print what the guide says, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardscope.compile import backends

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "backends.md"


def test_programs_in_the_guide_print_what_the_guide_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "", "python", ""]
    for (_, program), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        exec(compile(program, "guide.py", "exec"), {"__name__": "guide"})
        assert capsys.readouterr().out == shown


def test_the_tables_name_every_backend_and_no_other() -> None:
    rows = re.findall(r"(?m)^\| (`[^|]*) \|", GUIDE.read_text())
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    faults = {name.removeprefix("fault_") for name in backends.__all__ if name[0].islower()}
    ladder = {f"shardscope_{name}" for name in faults} | {"inductor", "ts"}
    assert faults <= named
    assert named <= faults | ladder
