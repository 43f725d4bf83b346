"""The README's program runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.record import load

README = Path(__file__).parents[1] / "README.md"


def test_program_in_the_readme_runs_and_saves_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(program, "readme.py", "exec"), {"__name__": "readme"})
    recording = load(tmp_path / "step.json.gz")
    assert recording.run.world_size == 1024
    assert capsys.readouterr().out.startswith("forward all_gather dp[0-1016/8]")
    owners = [c.owner for c in recording.collectives if c.axis == "tp" and c.phase == "forward"]
    assert owners == ["0.down", "1.down"]


def test_links_in_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README.read_text())
    assert len(links) > 4
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_verbs_in_the_readme_exist() -> None:
    verbs = set(
        re.findall(
            r"shardscope (\w+)",
            "".join(re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)),
        )
    )
    assert verbs
    for verb in verbs:
        assert CliRunner().invoke(main, [verb, "--help"]).exit_code == 0, verb
