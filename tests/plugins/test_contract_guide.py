"""The guide's blocks, in order: files are written, commands run, output is as shown."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner

from nested_pytest import run_pytest
from shardscope.cli import main

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "contracts.md"
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def test_the_guide_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    printed = ""
    for kind, text in BLOCK.findall(GUIDE.read_text()):
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
        elif kind == "toml":
            assert (tmp_path / "shardscope.toml").read_text() == text
        elif kind == "sh":
            printed = "".join(_run(command) for command in text.splitlines())
            assert "failed" not in printed
            assert "error" not in printed
        elif kind == "":
            squeezed = " ".join(printed.split())
            assert all(" ".join(part.split()) in squeezed for part in text.split("…"))


def _run(command: str) -> str:
    program, *args = shlex.split(command)
    if program == "shardscope":
        return CliRunner().invoke(main, args).output
    if program == "pytest":
        return run_pytest(Path.cwd(), *args).printed
    if program == "python":
        return _run_file(Path(args[0]))
    subprocess.run([program, *args], check=True)
    return ""


def _run_file(path: Path) -> str:
    printed = StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(path))
    return printed.getvalue()
