"""The guide's blocks, in order: files are written, commands run, output is as shown."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from plugin_loading import LOADED
from shardscope.cli import main

pytest_plugins = ["pytester"]

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "contracts.md"
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def test_the_guide_runs_as_written(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.syspath_prepend(pytester.path)
    printed = ""
    for kind, text in BLOCK.findall(GUIDE.read_text()):
        if kind == "python":
            (pytester.path / text.split()[1]).write_text(text)
        elif kind == "toml":
            assert (pytester.path / "shardscope.toml").read_text() == text
        elif kind == "sh":
            printed = "".join(_run(command, pytester) for command in text.splitlines())
        elif kind == "":
            squeezed = " ".join(printed.split())
            assert all(" ".join(part.split()) in squeezed for part in text.split("…"))
    pytester.runpytest_inprocess(*LOADED, "test_world.py").assert_outcomes(passed=1)


def _run(command: str, pytester: pytest.Pytester) -> str:
    program, *args = shlex.split(command)
    if program == "shardscope":
        return CliRunner().invoke(main, args).output
    if program == "pytest":
        pytester.runpytest_inprocess(*LOADED, *args).assert_outcomes(passed=3)
        return ""
    subprocess.run([program, *args], check=True, cwd=pytester.path)
    return ""
