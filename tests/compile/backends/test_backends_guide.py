"""The guide's programs print what the guide says, and its tables name what there is."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from shardscope.compile import backends

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "backends.md"


def test_programs_in_the_guide_print_what_the_guide_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    blocks = re.findall(r"```(\w*)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "", "python", ""]
    programs = zip(blocks[::2], blocks[1::2], strict=True)
    for number, ((_, program), (_, shown)) in enumerate(programs):
        # Dynamo imports the module that a function is from.
        (tmp_path / f"backends_guide_{number}.py").write_text(program)
        import_module(f"backends_guide_{number}")
        assert capsys.readouterr().out == shown


def test_the_tables_name_every_backend_and_no_other() -> None:
    rows = re.findall(r"(?m)^\| (`[^|]*) \|", GUIDE.read_text())
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    faults = {name.removeprefix("fault_") for name in backends.__all__ if name[0].islower()}
    ladder = {f"shardscope_{name}" for name in faults} | {"inductor", "ts"}
    assert faults <= named
    assert named <= faults | ladder
