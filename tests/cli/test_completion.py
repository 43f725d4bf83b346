"""completion: a real bash completes with the script, and nothing imports torch for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardscope.cli import completion, main

SOURCE = Path(completion.__file__).parents[2]
ASK = """
import os, sys
from shardscope.cli import main
for shell, words in {queries!r}:
    os.environ["_SHARDSCOPE_COMPLETE"] = f"{{shell}}_complete"
    os.environ["COMP_WORDS"] = words
    os.environ["COMP_CWORD"] = words.split()[-1] if shell == "fish" else str(words.count(" "))
    try:
        main(prog_name="shardscope")
    except SystemExit:
        print("--", flush=True)
print("torch" in sys.modules)
"""
BASH = """
eval "$(shardscope completion bash)"
complete_words() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _shardscope_completion shardscope "${@: -1}"
  echo "${COMPREPLY[@]}"
}
complete_words shardscope contract check --format gi
complete_words shardscope show r
"""


def test_the_index_of_commands_is_that_of_the_commands() -> None:
    index = Path(completion.__file__).with_name("completion.json")
    assert completion.render_index(main) == index.read_bytes(), "run `make completion`"


def test_commands_options_choices_and_recordings_are_completed_without_torch(here: Path) -> None:
    Path("runs").mkdir()
    for name in ("run.json.gz", "notes.txt", "runs/a.json", "train.py"):
        Path(name).touch()
    queries = [
        ("bash", "shardscope tra"),
        ("bash", "shardscope contract r"),
        ("bash", "shardscope show --view over"),
        ("bash", "shardscope show "),
        ("bash", "shardscope show runs/"),
        ("bash", "shardscope show runs"),
        ("bash", "shardscope audit t"),
        ("bash", "shardscope nonsense --x"),
        ("zsh", "shardscope diff --fo"),
        ("fish", "shardscope export run.json.gz --to sa"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(queries=queries)],
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    *answers, has_torch = done.stdout.split("--\n")
    assert [answer.splitlines() for answer in answers] == [
        ["plain,trace"],
        ["plain,record"],
        ["plain,overview"],
        ["plain,run.json.gz", "plain,runs/"],
        ["plain,runs/a.json"],
        ["dir,runs"],
        ["plain,train.py"],
        [""],
        ["plain", "--format", "Output format; github, sarif and gitlab have only what got worse."],
        ["plain,sarif"],
    ]
    assert has_torch == "False\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_the_printed_script(here: Path) -> None:
    Path("run.json.gz").touch()
    program = here / "bin" / "shardscope"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m shardscope "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH],
        env={"PYTHONPATH": str(SOURCE), "PATH": f"{program.parent}:/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["github gitlab", "run.json.gz"], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_says_where_to_install_it(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert "_SHARDSCOPE_COMPLETE" in result.output
    assert f"\n# To install it:\n#   shardscope completion {shell} > ~/" in result.output
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    assert CliRunner().invoke(main, ["completion"]).output == result.output


def test_an_unknown_shell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/csh")
    result = CliRunner().invoke(main, ["completion"])
    assert result.exit_code == 2
    assert (
        "there is no completion for the shell 'csh'. Name one of bash, zsh, fish." in result.stderr
    )
