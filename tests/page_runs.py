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
import subprocess
import sys
import tomllib
import traceback
import types
import webbrowser
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

import shardscope
from home_workers import stay_at_home
from page_blocks import ROOT, Block, read_blocks
from rank_processes import run_ranks
from shardscope.cli import main
from shardscope.record import load

__all__ = ["PageError", "Reader", "is_run", "run_page"]

WIDTH = 100
_ROUNDED = re.compile(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+")
_BUILD = re.compile(r"(?<=torch \d\.\d\d\.\d)\+\w+")  # for which devices it was built
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that are imported here
_HARMLESS = ("ls", "sed")


def _parse_yaml(text: str) -> object:
    import yaml  # comes with mkdocs, and not with torch

    return yaml.safe_load(text)


_PARSERS: dict[str, Callable[[str], object]] = {
    "toml": tomllib.loads,
    "yaml": _parse_yaml,
    "json": json.loads,
}
_KINDS = ("python", "sh", "first", "file", "text", *_PARSERS)


class PageError(Exception):
    """What a page says, and what is not so."""


def is_run(block: Block) -> bool:
    """Whether the page does not say otherwise, and the package that it needs is there."""
    needed = block.said.get("needs", "")
    return "not run" not in block.said and (not needed or find_spec(needed) is not None)


def run_page(page: str, folder: str, answer: Callable[[str], None]) -> None:
    """Run a page in an empty folder; the answer is what went wrong, or empty."""
    path = Path(folder)
    _settle(path)
    try:
        Reader(path).read(read_blocks(ROOT / page))
    except PageError as error:
        answer(f"{page}:{error}")
    except BaseException:  # noqa: BLE001 - whatever happens to a page is told
        answer(f"{page}: {traceback.format_exc()}")
    else:
        answer("")


def _settle(folder: Path) -> None:
    """Surroundings that do not depend on where tests run."""
    os.chdir(folder)
    Path("examples").symlink_to(ROOT / "examples")
    sys.argv = ["guide.py"]
    sys.path.insert(0, str(folder))
    os.environ.update(COLUMNS=str(WIDTH), NO_COLOR="1", OMP_NUM_THREADS="1")
    # Also where the path to the package is a relative one.
    os.environ["PYTHONPATH"] = str(Path(shardscope.__file__).parents[1])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORCE_COLOR"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stay_at_home(pytest.MonkeyPatch())
    webbrowser.open = lambda *_, **__: True  # type: ignore[assignment]


class Reader:
    """Someone who follows a page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._printed = ""  # by the last block that ran
        self._has_run = False
        self._is_ranks = False
        self._program = folder / "guide.py"
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
        elif "same as" in block.said:
            _check_same(self._folder / block.said["same as"], block.text)
        elif block.file:
            (self._folder / block.file).write_text(block.text)
        else:
            self._is_ranks = False
            self._printed = self._run(block)
            self._has_run = block.kind != "first"

    def _run(self, block: Block) -> str:
        if block.kind == "sh":
            return self._run_commands(block)
        if block.kind in _PARSERS:
            _PARSERS[block.kind](block.text)
            return ""
        return self._run_python(block)

    def _run_python(self, block: Block) -> str:
        said = io.StringIO()
        before = "" if block.kind == "first" else self._program.read_text()
        name = "first.py" if block.kind == "first" else self._program.name
        (self._folder / name).write_text(before + block.text)
        linecache.checkcache()
        code = compile("\n" * before.count("\n") + block.text, str(self._folder / name), "exec")
        with contextlib.redirect_stdout(said):
            exec(code, self._module.__dict__)
        return said.getvalue()

    def _run_commands(self, block: Block) -> str:
        lines = [line for line in _join_lines(block.text) if shlex.split(line, comments=True)]
        ends = [int(code) for code in block.said.get("exit", "0").split()]
        codes = dict(zip(lines, [0] * (len(lines) - len(ends)) + ends, strict=True))
        printed = ""
        for line in lines:
            name, *args = shlex.split(line, comments=True)
            code, said = _run_shell(line) if name in _HARMLESS else self._command(name, args)
            printed += said
            if code != codes[line]:
                raise PageError(f"{line} ends with {code}:\n{said}")
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
        if name == "pip":
            return _check_package(args), ""
        if name == "make":
            return int(f"\n{args[0]}:" not in (ROOT / "Makefile").read_text()), ""
        raise PageError(f"nobody here knows how to run {name}; say why it is not run.")

    def _run_ranks(self, args: list[str]) -> tuple[int, str]:
        if len(args) != 3 or args[0] != "--nproc-per-node":
            raise PageError("ranks are run by torchrun --nproc-per-node N script.py alone.")
        self._is_ranks = True
        printed = run_ranks(int(args[1]), self._folder / args[2])
        # Not how they end: torch's gloo now and then aborts a process then, without us too.
        return 0, "".join(text for _, text in printed)

    def _compare(self, block: Block) -> None:
        if not is_run(block):
            return
        if not self._has_run:
            raise PageError("this is no block's output; say why it is not run.")
        if not torch.__version__.startswith(_shown_version()):
            return
        varies = "figures vary" in block.said
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


def _check_package(args: list[str]) -> int:
    """Whether what is installed is ours, with extras that exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?", args[-1])
    extras = set(found[2].split(",")) if found and found[2] else set()
    is_ours = found is not None and found[1] == project["name"]
    is_known = extras <= {*project["optional-dependencies"]}
    return int(not (args[0] == "install" and is_ours and is_known))


def _check_same(file: Path, text: str) -> None:
    if file.read_text() != text:
        raise PageError(f"{file.name} is not this, but:\n{file.read_text()}")


def _join_lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


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
