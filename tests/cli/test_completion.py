"""completion: real shells complete with the script, and nothing imports torch for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from click.shell_completion import get_completion_class
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
complete_words shardscope show my
"""
ZSH = """
PS1='ready> '
fpath+=~
autoload -Uz compinit
compinit -u
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
        ("zsh", "shardscope run -- tr"),
        ("zsh", "shardscope memory -- train.py --config no"),
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
        ["file", "tr", "_"],
        ["file", "no", "_"],
    ]
    assert has_torch == "False\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_the_printed_script(here: Path) -> None:
    Path("my run.json").touch()
    Path("run.json.gz").touch()
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH],
        env=make_environment(here),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    completed = ["github gitlab", "run.json.gz", "my\\ run.json"]
    assert done.stdout.splitlines() == completed, done.stderr


def make_environment(here: Path) -> dict[str, str]:
    """An environment in which `shardscope` is these sources, and `here` is the home folder."""
    program = here / ".bin" / "shardscope"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m shardscope "$@"\n')
    program.chmod(0o755)
    return {
        "HOME": str(here),
        "PATH": f"{program.parent}:/usr/bin:/bin",
        "PYTHONPATH": str(SOURCE),
        "TERM": "dumb",
        "ZDOTDIR": str(here),
    }


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_what_is_typed(here: Path) -> None:
    Path("my run.json").touch()
    Path("train.py").touch()
    Path(".zshrc").write_text(ZSH)
    Path("_shardscope").write_text(CliRunner().invoke(main, ["completion", "zsh"]).output)
    environment = make_environment(here)
    typed = {
        "shardscope contract ch": "eck ",
        "shardscope show m": "y\\ run.json ",
        "shardscope run -- tr": "ain.py ",
    }
    for line, completed in typed.items():
        shell = pexpect.spawn("zsh", ["-i"], env=environment, encoding="utf-8", timeout=60)
        shell.expect_exact("ready> ")
        shell.send(f"{line}\t")
        shell.expect_exact(line + completed)
        shell.close(force=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_with_descriptions_that_have_commas(here: Path) -> None:
    Path("my run.json").touch()
    Path("train.py").touch()
    folder = here / ".config" / "fish" / "completions"
    folder.mkdir(parents=True)
    script = CliRunner().invoke(main, ["completion", "fish"]).output
    (folder / "shardscope.fish").write_text(script)
    typed = {
        "shardscope ci": "ci\tRecord programs, check their contract, and...",
        "shardscope show m": "my run.json",
        "shardscope run -- tr": "train.py",
    }
    environment = make_environment(here)
    for line, completed in typed.items():
        done = subprocess.run(
            ["fish", "-c", f"complete -C '{line}'"],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.splitlines() == [completed], done.stderr


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_clicks_scripts_still_have_what_is_corrected_in_them(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell]).output
    template = get_completion_class(shell).source_template
    for part, replacement in completion._CORRECTIONS[shell].items():
        assert part in template
        assert replacement in script


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
