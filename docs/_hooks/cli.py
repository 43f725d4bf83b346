"""Generates the page of the command line from the --help texts of all commands."""

from __future__ import annotations

import inspect

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from shardscope.cli import main
from shardscope.cli.destination import FILES_HELP
from shardscope.cli.verb import EXIT_CODES

_INTRODUCTION = """\
# Command line

`shardscope VERB --help` prints the same. A TARGET is a file that defines `model()` and
`batch(model)`: see [the tutorial](../tutorial.md#your-own-model). `shardscope --debug VERB …`
shows the traceback of an error.

## Saved files

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, "reference/cli.md", content=render_page()))
    return files


def render_page() -> str:
    """All commands in the order of --help."""
    context = click.Context(main, info_name="shardscope")
    commands = [main.get_command(context, name) for name in main.list_commands(context)]
    verbs = [
        part for command in commands if command for part in _render_verb(command, context, depth=2)
    ]
    codes = [f"- {code}: {text}" for code, text in EXIT_CODES.items()]
    rules = [_INTRODUCTION + FILES_HELP, "## Exit codes", "\n".join(codes)]
    return "\n\n".join([*rules, *verbs]) + "\n"


def _render_verb(command: click.Command, parent: click.Context, *, depth: int) -> list[str]:
    context = click.Context(command, info_name=command.name, parent=parent)
    heading = f"{'#' * depth} {command.name}"
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        heading,
        f"```text\n{context.command_path} {usage}\n```",
        inspect.cleandoc(command.help or "").replace("\b\n", ""),
        _render_options(command, context),
        _render_examples(command),
    ]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found:
                parts += _render_verb(found, context, depth=depth + 1)
    return [part for part in parts if part]


def _render_options(command: click.Command, context: click.Context) -> str:
    records = [param.get_help_record(context) for param in command.get_params(context)]
    rows = [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in filter(None, records)]
    return "\n".join(["| option | |", "|---|---|", *rows]) if rows else ""


def _render_examples(command: click.Command) -> str:
    examples = getattr(command, "examples", ())
    return "\n".join(["```sh", *examples, "```"]) if examples else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
