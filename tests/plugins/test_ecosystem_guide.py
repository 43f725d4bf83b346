"""The guide's programs run as printed, and so do its commands."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.record import load

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "ecosystem.md"


@pytest.mark.filterwarnings("ignore::UserWarning")  # trainers have much to say
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
def test_programs_and_commands_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("lightning") is None or find_spec("transformers") is None:
        pytest.skip("lightning or transformers is not installed")
    import_module("lightning_models")  # before the guide does, which would change torch
    monkeypatch.chdir(tmp_path)
    for program in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(program, "guide.py", "exec"), {"__name__": "guide"})
    for name in ("lightning", "transformers"):
        assert len(load(f"{name}-0.json.gz").collectives) >= 6
    assert "reduce_scatter" in capsys.readouterr().out
    commands = re.findall(r"shardscope (export .*?)\s+# (\S+\w)", GUIDE.read_text())
    assert len(commands) == 5
    for command, written in commands:
        result = CliRunner().invoke(main, shlex.split(command))
        assert result.exit_code == 0, result.output
        if "." in written:
            assert Path(written).exists(), written


def test_links_in_the_guide_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", GUIDE.read_text())
    assert links
    assert [link for link in links if not (GUIDE.parent / link).exists()] == []
