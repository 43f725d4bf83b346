"""`--json`: collects what a command does and prints it as one JSON document to standard output.

While a command runs with `--json`, everything else that would go to standard output, also from the
user's program and from processes that it starts, goes to standard error. Commands call
`add_recording` and `add_figures` with what they have; without `--json` these do nothing. How the
command ended is read from the exception that ends it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

import click
from msgspec.structs import replace

from shardscope.record import Recording
from shardscope.record.text import sanitize_text
from shardscope.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardscope.report.result.figures import Figures
    from shardscope.report.result.result import CommandStatus

_KEY = "shardscope.json_result"
_FLAG = "--json"
_FAILED = 2  # exit code
_VIEWS = {
    "findings": "overview",
    "gaps": "overview",
    "communication": "communication",
    "memory": "memory",
    "sharding": "sharding",
    "layouts": "sharding",
    "parity": "correctness",
    "runs": "correctness",
    "checks": "correctness",
    "hangs": "communication",
    "types": "correctness",
    "parallel": "correctness",
    "coverage": "coverage",
    "compiler": "compiler",
    "diagnoses": "compiler",
}
"""The view of `show` that has a list of a result in full."""

json_option = click.option(
    _FLAG,
    "has_json",
    is_flag=True,
    expose_value=False,
    help="Print one JSON document with verdict, findings and figures instead of text.",
)


@final
class ResultBuilder:
    """What a command has done so far; `write` prints it when the command has ended."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._recording: Recording | None = None
        self._figures: Figures | None = None
        self._summary = ""
        self._has_problems = False
        self._printed: list[RenderableType] = []
        self._errors: list[str] = []
        self._messages: list[str] = []
        self._next: list[str] = []
        self._files: list[tuple[str, str]] = []
        self._more: list[str] = []
        self._sources: tuple[str, ...] = ()
        self._stdout = _DivertedStdout()

    def add_recording(self, recording: Recording, files: Sequence[str | Path] = ()) -> None:
        """Add the recording whose figures are reported; `files` have it, for further commands."""
        self._recording = recording
        self._sources = tuple(map(str, files))

    def add_figures(
        self, figures: Figures, summary: str, *, has_problems: bool, more: Sequence[str] = ()
    ) -> None:
        """Add figures that are not of a recording; `more` are commands that print all of them."""
        self._figures, self._summary, self._has_problems = figures, summary, has_problems
        self._more.extend(more)

    def add_printed(self, *things: RenderableType) -> None:
        """Add what would be printed as text; it is used if the command has no figures."""
        self._printed.extend(things)

    def add_file(self, path: str | Path, note: str = "") -> None:
        """Add a file that was written."""
        self._files.append((str(path), note))

    def add_next(self, command: str) -> None:
        """Add a command that is useful now."""
        self._next.append(command)

    def add_message(self, sentence: str, *, is_error: bool) -> None:
        """Add a sentence that was printed to standard error."""
        (self._errors if is_error else self._messages).append(sentence)

    def write(self, exit_code: int) -> None:
        """Print the document."""
        from shardscope.cli.console import is_first, write_out
        from shardscope.report.result.result import (
            CommandResult,
            ErrorEntry,
            FileEntry,
            NextEntry,
            encode_result,
        )

        self._stdout.restore()
        if not is_first():
            return
        parts = self._read_parts()
        is_failed = exit_code >= _FAILED
        if is_failed and self._recording is not None:
            parts["summary"] = f"failed: see error. Recorded before: {parts['summary']}"
        messages = self._messages if is_failed else [*self._errors, *self._messages]
        result = CommandResult(
            shardscope_version=__version__,
            command=self._command,
            exit_code=exit_code,
            verdict=self._judge(exit_code, parts.pop("has_problems")),
            error=ErrorEntry(message=" ".join(self._errors)) if is_failed else None,
            files=tuple(FileEntry(path=path, note=note) for path, note in self._files),
            next=(
                *(NextEntry(command=command) for command in self._next),
                *parts.pop("next", ()),
            ),
            messages=tuple(messages),
            **parts,
        )
        write_out([encode_result(result, self._list_more(parts.get("figures")))])

    def _judge(self, exit_code: int, has_problems: bool) -> CommandStatus:
        from shardscope.report.result.result import CommandStatus

        if exit_code >= _FAILED:
            return CommandStatus.FAILED
        return CommandStatus.PROBLEMS if has_problems or exit_code else CommandStatus.OK

    def cancel(self) -> None:
        """Let the command print text after all."""
        self._stdout.restore()

    def _read_parts(self) -> dict[str, Any]:
        from shardscope.report.result.result import summarize_recording

        if self._recording is not None:
            parts = summarize_recording(self._name_command(self._recording), self._sources)
            is_same = parts.run.command == self._command
            return {
                "summary": parts.summary,
                "findings": parts.findings,
                "gaps": parts.gaps,
                "figures": parts.figures,
                "run": replace(parts.run, command="") if is_same else parts.run,
                "has_problems": parts.has_problems,
                "next": parts.next,
            }
        if self._figures is not None:
            return {
                "summary": self._summary,
                "figures": self._figures,
                "has_problems": self._has_problems,
            }
        saved = (f"saved {path}{f' ({note})' if note else ''}" for path, note in self._files)
        summary = self._render_printed() or next(iter(self._errors), "") or "; ".join(saved)
        return {"summary": summary, "has_problems": False}

    def _name_command(self, recording: Recording) -> Recording:
        """The recording of a program names the program; further commands need ours."""
        from shardscope.cli.verb import PROGRAM_VERBS

        is_ours = self._command.split(" ")[1] in PROGRAM_VERBS
        if not is_ours or recording.run.command.startswith("shardscope "):
            return recording
        return replace(recording, run=replace(recording.run, command=self._command))

    def _render_printed(self) -> str:
        from rich.console import Group

        from shardscope.report.text.summary import render_plain

        return render_plain(Group(*self._printed), width=100).strip() if self._printed else ""

    def _list_more(self, figures: Figures | None) -> tuple[str, ...]:
        """Commands that print what a bounded document leaves out."""
        if not self._sources:
            return tuple(self._more)
        files = shlex.join(self._sources)
        names = [name for name in _VIEWS if getattr(figures, name, None)]
        views = dict.fromkeys(["overview", *(_VIEWS[name] for name in names)])
        shown = " ".join(f"--view {view}" for view in views)
        return (
            f"shardscope show {files} {shown} --no-fold",
            f"shardscope show {files} --module PATTERN --json",
            *self._more,
        )


@final
class _DivertedStdout:
    """Sends what is written to standard output to standard error, until it is restored."""

    def __init__(self) -> None:
        self._stdout: TextIO | None = sys.stdout
        self._copy: int | None = None
        self._descriptor = -1
        if sys.stdout is None:
            return
        sys.stdout.flush()
        with suppress(OSError, ValueError):  # not a file, as in tests and notebooks
            self._descriptor, target = sys.stdout.fileno(), sys.stderr.fileno()
            self._copy = os.dup(self._descriptor)
            os.dup2(target, self._descriptor)
        if self._copy is None:
            sys.stdout = sys.stderr

    def restore(self) -> None:
        """Let standard output be what it was."""
        if self._stdout is None:
            return
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        if self._copy is not None:
            os.dup2(self._copy, self._descriptor)
            os.close(self._copy)
            self._copy = None
        sys.stdout = self._stdout


def start_json(ctx: click.Context, words: Sequence[str]) -> None:
    """Collect a result if the words of a command line ask for it."""
    options = list(words)
    if "--" in options:
        options = options[: options.index("--")]
    if _FLAG in options and not {"-h", "--help"}.intersection(options):
        ctx.meta[_KEY] = ResultBuilder(shlex.join(["shardscope", *words]))


def cancel_json(ctx: click.Context) -> None:
    """Print text after all: `--json` was an argument of the user's program."""
    builder = ctx.meta.pop(_KEY, None)
    if builder is not None:
        builder.cancel()


@contextmanager
def writing_json(ctx: click.Context) -> Iterator[None]:
    """Print the result when the command ends, however it ends, if `--json` was given."""
    exit_code = 0
    try:
        yield
    except click.exceptions.Exit as end:
        exit_code = end.exit_code
        raise
    except click.ClickException as error:
        exit_code = error.exit_code
        add_message(error.format_message(), is_error=True, ctx=ctx)
        raise
    except BaseException:
        exit_code = 2
        raise
    finally:
        builder = ctx.meta.pop(_KEY, None)
        if builder is not None:
            builder.write(exit_code)


def current_json(ctx: click.Context | None = None) -> ResultBuilder | None:
    """The result that is being collected; None without `--json`."""
    ctx = ctx or click.get_current_context(silent=True)
    return None if ctx is None else ctx.meta.get(_KEY)


def add_recording(recording: Recording, files: Sequence[str | Path] = ()) -> None:
    """Report a recording's figures with `--json`; `files` have it, for further commands."""
    if builder := current_json():
        builder.add_recording(recording, files)


def add_message(sentence: str, *, is_error: bool = False, ctx: click.Context | None = None) -> None:
    """Report a sentence with `--json`; one that is an error says why the command failed."""
    if builder := current_json(ctx):
        builder.add_message(sanitize_text(sentence), is_error=is_error)


def check_stdout_is_free(option: str, remedy: str) -> None:
    """Fail if both `--json` and this option would write to standard output."""
    if current_json() is not None:
        raise click.UsageError(f"{option} and --json both write to standard output. {remedy}")
