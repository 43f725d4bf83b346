"""Commands whose help has examples and exit codes, and groups that suggest similar names."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, final

import click
from click.core import ParameterSource

from shardscope.cli.json_result import cancel_json, json_option

FINDINGS_FAIL = "A finding is a warning or an error, or, with --strict, there is a gap."

PROGRAM = "shardscope.program"
"""The key, in the `meta` of a click context, of the words after `--`: a program and arguments."""

PROGRAM_VERBS = (
    "run",
    "trace",
    "audit",
    "visualize",
    "memory",
    "coverage",
    "parallelize",
    "parity",
    "check",
    "explain",
    "diagnose",
    "demo",
)
"""The commands that run a program and save a recording as `-o` says."""

EXIT_CODES = {
    0: "Success. Commands that only display (show, report, tui, export, diff, visualize, demo) "
    "have no other code unless an option such as --strict or --fail-on asks for a check.",
    1: "A check failed: a finding is a warning or an error, numbers differ, or a limit is "
    "exceeded. The help of each command says which.",
    2: "Wrong usage, a file that cannot be read or written, or a TARGET or a program that cannot "
    "run.",
}
"""What the exit codes of all commands mean."""

_EXAMPLE_WIDTH = 78  # of 80 columns, for the " \\" at the end of a line that continues
_UNUSABLE_FILE = "Wrong usage, or a file that cannot be read or written."


@final
class Verb(click.Command):
    """A command whose help has examples and exit codes.

    Args:
        examples: Command lines.
        fails_if: When the command exits with 1; None if it never does.
        takes_program: Whether a program may follow `--`. It is then in the context's `meta`, under
            the key `PROGRAM`, and `@program_options` reads it.
        instead_of_program: What a command that takes only a TARGET says when a program follows.
        instead_of_json: Why a command has no `--json`, and what to use; empty if it has.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str],
        fails_if: str | None = None,
        takes_program: bool = False,
        instead_of_program: str = "Write the TARGET without --; shardscope run takes programs.",
        instead_of_json: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not instead_of_json:
            json_option(self)
        self.examples = tuple(examples)
        self.fails_if = fails_if
        self.takes_program = takes_program
        self.instead_of_program = instead_of_program
        self.instead_of_json = instead_of_json

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the words after `--` to the context; fail if the command takes a TARGET only."""
        if "--" in args and (self.takes_program or self._has_target):
            index = args.index("--")
            if not self.takes_program:
                ctx.fail(
                    f"{self.name} takes a TARGET that defines model(), not a program after --. "
                    f"{self.instead_of_program}"
                )
            ctx.meta[PROGRAM] = tuple(args[index + 1 :])
            args = args[:index]
        if self.instead_of_json and "--json" in args:
            ctx.fail(f"{self.name} has no --json. {self.instead_of_json}")
        rest = super().parse_args(ctx, args)
        if ctx.get_parameter_source("has_json") is not ParameterSource.COMMANDLINE:
            cancel_json(ctx)
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line, with the program as an alternative."""
        pieces = super().collect_usage_pieces(ctx)
        return [*pieces, "[-- PROGRAM [ARGS]...]"] if self.takes_program else pieces

    @property
    def _has_target(self) -> bool:
        return any(parameter.name == "target" for parameter in self.params)

    @property
    def _runs_code(self) -> bool:
        """Whether the command runs a TARGET or a program."""
        return self.takes_program or any(
            parameter.name in ("target", "program") for parameter in self.params
        )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the examples and the exit codes below the options."""
        write_examples(formatter, self.examples)
        codes = [("0", "Success."), ("1", self.fails_if)]
        codes.append(("2", EXIT_CODES[2] if self._runs_code else _UNUSABLE_FILE))
        with formatter.section("Exit codes"):
            formatter.write_dl([(code, text) for code, text in codes if text])


@final
class VerbGroup(click.Group):
    """A group of commands with examples."""

    def __init__(self, *args: Any, examples: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names."""
        check_command(self, ctx, args[0])
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the examples below the commands."""
        write_examples(formatter, self.examples)


def check_command(group: click.Group, ctx: click.Context, name: str) -> None:
    """Fail if the group has no such command, and suggest the nearest that it has."""
    names = group.list_commands(ctx)
    if not name.startswith("-") and name not in names and not ctx.resilient_parsing:
        ctx.fail(f"No such command {name!r}.{suggest(name, names)}")


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    """Print command lines as they are typed, one below the other; long ones continue with a \\."""
    with formatter.section("Examples" if len(examples) > 1 else "Example"):
        for example in examples:
            indent = " " * formatter.current_indent
            lines = textwrap.wrap(
                example,
                _EXAMPLE_WIDTH,
                initial_indent=indent,
                subsequent_indent=indent * 2,
                break_long_words=False,
                break_on_hyphens=False,
            )
            formatter.write(" \\\n".join(lines) + "\n")


def suggest(name: str, known: Sequence[str]) -> str:
    """` Did you mean 'trace'?` for the known names nearest to `name`; else nothing."""
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
