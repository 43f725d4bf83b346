"""Runs the blocks of a page in order, as a reader who pastes them into guide.py would.

For a process of its own: what a page leaves behind (a compiler's caches, ranks that were played)
must not be found by the next. Verbs are called, not started: torch takes seconds to import.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import linecache
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import traceback
import types
import webbrowser
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

import shardscope
from home_workers import stay_at_home
from page_blocks import ROOT, Block, read_blocks
from rank_processes import run_ranks, start_ranks
from shardscope.cli import main
from shardscope.launch import api
from shardscope.record import load
from warm_python import fork_launch_server

__all__ = ["PageError", "Reader", "is_run", "run_page"]

WIDTH = 100  # columns of the terminal
WIDTHS = {"README.md": 80}  # of pages that are read in one with fewer
_ROUNDED = re.compile(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+")
_BUILD = re.compile(r"(?<=torch \d\.\d\d\.\d)\+\w+")  # for which devices it was built
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that are imported here
_HARMLESS = ("ls", "sed")
_EXIT_CODE = re.compile(r"#.*\bexits with (\d+)")
_HEREDOC = re.compile(r"cat > ([\w.-]+) <<'EOF'")


def _parse_yaml(text: str) -> object:
    import yaml  # comes with mkdocs, and not with torch

    return yaml.safe_load(text)


_PARSERS: dict[str, Callable[[str], object]] = {
    "toml": tomllib.loads,
    "yaml": _parse_yaml,
    "json": json.loads,
}
_KINDS = ("python", "sh", "text", *_PARSERS)


class PageError(Exception):
    """What a page says, and what is not so."""


def is_run(block: Block) -> bool:
    """Whether the page does not say otherwise, and the package that it needs is there."""
    needed = block.directives.get("needs", "")
    return "not run" not in block.directives and (not needed or find_spec(needed) is not None)


def run_page(page: str, folder: str, answer: Connection) -> None:
    """Run a page in an empty folder; what is sent is what went wrong, or empty."""
    path = Path(folder)
    _settle(path, WIDTHS.get(page, WIDTH))
    try:
        Reader(path).read(read_blocks(ROOT / page))
    except PageError as error:
        answer.send(f"{page}:{error}")
    except BaseException:  # noqa: BLE001 - whatever happens to a page is told
        answer.send(f"{page}: {traceback.format_exc()}")
    else:
        answer.send("")


def _settle(folder: Path, width: int) -> None:
    """Surroundings that do not depend on where tests run."""
    os.chdir(folder)
    Path("examples").symlink_to(ROOT / "examples")
    sys.argv = ["guide.py"]
    sys.path.insert(0, str(folder))
    os.environ.update(COLUMNS=str(width), NO_COLOR="1", OMP_NUM_THREADS="1")
    # Also where the path to the package is a relative one.
    os.environ["PYTHONPATH"] = str(Path(shardscope.__file__).parents[1])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORCE_COLOR"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stay_at_home(pytest.MonkeyPatch())
    api._started = fork_launch_server  # type: ignore[assignment]
    webbrowser.open = lambda *_, **__: True  # type: ignore[assignment]


class Reader:
    """Someone who follows a page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._printed = ""  # by the last block that ran
        self._has_run = False
        self._is_ranks = False
        self._lines_at_kill = 0
        self._start_program()

    def _start_program(self) -> None:
        self._program = self._folder / "guide.py"
        self._program.write_text("")
        self._module = types.ModuleType("guide")
        self._module.__file__ = str(self._program)
        sys.modules["guide"] = self._module

    def read(self, blocks: list[Block]) -> None:
        """Follow all blocks."""
        for block in blocks:
            try:
                self._follow(block)
            except PageError as error:
                raise PageError(f"{block.line}: {error}") from None
            except BaseException as error:
                raise PageError(f"{block.line}: {traceback.format_exc()}") from error

    def _follow(self, block: Block) -> None:
        if block.kind not in _KINDS:
            raise PageError(f"a block is one of {', '.join(_KINDS)}, not {block.kind!r}.")
        if block.kind == "text":
            self._compare(block)
            self._has_run = False
        elif not is_run(block):
            self._has_run = False
        elif "same as" in block.directives:
            _check_same(self._folder / block.directives["same as"], block.text)
        elif block.file:
            (self._folder / block.file).write_text(block.text)
        else:
            self._is_ranks = False
            self._printed = self._run(block)
            self._has_run = True

    def _run(self, block: Block) -> str:
        if block.kind == "sh":
            return self._run_commands(block)
        if block.kind in _PARSERS:
            _PARSERS[block.kind](block.text)
            return ""
        return self._run_python(block)

    def _run_python(self, block: Block) -> str:
        printed = io.StringIO()
        before = self._program.read_text()
        self._program.write_text(before + block.text)
        linecache.checkcache()
        code = compile("\n" * before.count("\n") + block.text, str(self._program), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, self._module.__dict__)
        return printed.getvalue()

    def _run_commands(self, block: Block) -> str:
        self._lines_at_kill = int(block.directives.get("killed at", "0").split()[0])
        printed = ""
        for line, text in _split_commands(block.text):
            name, *args = shlex.split(line, comments=True)
            heredoc = _HEREDOC.fullmatch(line)
            if heredoc:
                Path(heredoc[1]).write_text(text)
                continue
            expected = _EXIT_CODE.search(line)
            code, output = _run_shell(line) if name in _HARMLESS else self._command(name, args)
            printed += output
            if code != int(expected[1] if expected else 0):
                raise PageError(f"{line} ends with {code}:\n{output}")
        return printed

    def _command(self, name: str, args: list[str]) -> tuple[int, str]:
        if name == "shardscope":
            return _call_verb(_expand(args))
        if name == "python":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                runpy.run_path(args[0], run_name="__main__")
            return 0, said.getvalue()
        if name == "torchrun":
            return self._run_ranks(args)
        if name == "pytest":
            return _run_pytest(args)
        if name == "make":
            return int(f"\n{args[0]}:" not in (ROOT / "Makefile").read_text()), ""
        if name == "source":
            return int(args != [".venv/bin/activate"]), ""
        if name == "mkdir":
            return self._change_folder(args)
        if name == "timeout":
            return self._run_hanging_ranks(args)
        raise PageError(f"the tests cannot run {name}; say why it is not run.")

    def _change_folder(self, args: list[str]) -> tuple[int, str]:
        option, folder, *rest = args
        if option != "-p" or rest != ["&&", "cd", folder]:
            raise PageError("folders are made and entered by mkdir -p FOLDER && cd FOLDER alone.")
        self._folder /= folder
        self._folder.mkdir()
        os.chdir(self._folder)
        self._start_program()
        return 0, ""

    def _run_ranks(self, args: list[str]) -> tuple[int, str]:
        self._is_ranks = True
        printed = run_ranks(*_read_launch(args))
        # Not how they end: torch's gloo now and then aborts a process then, without us too.
        return 0, "".join(text for _, text in printed)

    def _run_hanging_ranks(self, args: list[str]) -> tuple[int, str]:
        """Run `timeout -s KILL SECONDS torchrun …`, and kill the ranks when they have got stuck."""
        if args[:2] != ["-s", "KILL"] or args[3] != "torchrun":
            raise PageError("ranks that hang are run by timeout -s KILL SECONDS torchrun … alone.")
        for file in Path().glob("run-*.jsonl"):
            file.unlink()  # of a run before, which the program replaces
        with start_ranks(*_read_launch(args[4:])) as ranks:
            while sum(map(_count_lines, Path().glob("run-*.jsonl"))) < self._lines_at_kill:
                time.sleep(0.02)
            for signum in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees another one end
                for rank in ranks:
                    os.kill(rank.pid, signum)
        return 137, ""

    def _compare(self, block: Block) -> None:
        if not is_run(block):
            return
        if not self._has_run:
            raise PageError("this is no block's output; say why it is not run.")
        if not torch.__version__.startswith(_shown_version()):
            return
        varies = "figures vary" in block.directives
        shown = [_words(line, varies) for line in block.text.splitlines()]
        printed = [_words(line, varies) for line in self._printed.splitlines()]
        if self._is_ranks:
            printed = [line for line in printed if line in shown]
        if not _agree(shown, printed):
            raise PageError(f"this is shown:\n{block.text}\nand this printed:\n{self._printed}")


@cache
def _shown_version() -> str:
    """The torch whose outputs pages show."""
    found = re.search(r"(?m)^torch==(.*)$", (ROOT / "constraints.txt").read_text())
    assert found is not None
    return found[1]


def _call_verb(args: list[str]) -> tuple[int, str]:
    if ">" in args:
        *args, _, file = args
        code, said = _call_verb(args)
        Path(file).write_text(said)
        return code, ""
    if args[0] == "tui":  # takes over a terminal: that there is such a verb, and a file, will do
        load(args[1])
        args = ["tui", "--help"]
    with mock.patch.object(sys, "argv", ["shardscope", *args]):
        done = CliRunner().invoke(main, args, catch_exceptions=False)
    return done.exit_code, done.output


def _run_shell(line: str) -> tuple[int, str]:
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _run_pytest(args: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["-p", "no:cacheprovider", "--rootdir=.", *_QUIET, *args])
    return int(code), said.getvalue()


def _read_launch(args: list[str]) -> tuple[int | str, ...]:
    """The number of ranks and what `python` is given on each, of torchrun's arguments."""
    option, num_ranks, *program = args
    if option != "--nproc-per-node":
        raise PageError("ranks are run by torchrun --nproc-per-node N … alone.")
    if program[:2] == ["--no-python", "shardscope"]:
        program[:2] = ["-m", "shardscope"]
    return (int(num_ranks), *program)


def _count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def _check_same(file: Path, text: str) -> None:
    if file.read_text() != text:
        raise PageError(f"{file.name} is not this, but:\n{file.read_text()}")


def _split_commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a block, and the text of a file that it writes."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        if _HEREDOC.fullmatch(line):
            yield line, "".join(f"{one}\n" for one in iter(lambda: next(lines), "EOF"))
        elif shlex.split(line, comments=True):
            yield line, ""


def _expand(args: list[str]) -> list[str]:
    """Names with a star become the files that they match."""
    return [name for arg in args for name in (sorted(glob.glob(arg)) or [arg])]


def _words(line: str, varies: bool) -> str:
    words = _BUILD.sub("", " ".join(line.split()))
    return _ROUNDED.sub("#", words) if varies else words


def _agree(shown: list[str], printed: list[str]) -> bool:
    """Whether lines are the same, where a line `…` stands for any number of them."""
    if not shown:
        return not any(printed)
    if shown[0] == "…":
        return any(_agree(shown[1:], printed[at:]) for at in range(len(printed) + 1))
    if not shown[0]:  # empty lines are neither here nor there
        return _agree(shown[1:], printed)
    rest = printed[next((at for at, line in enumerate(printed) if line), 0) :]
    return bool(rest) and shown[0] == rest[0] and _agree(shown[1:], rest[1:])
