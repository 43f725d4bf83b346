"""`shardscope completion`: completion of commands, options and files in bash, zsh and fish.

The shell asks `shardscope` itself, at each press of the Tab key, so that must not import torch.
`completion.json` lists the parameters of all commands; `make completion` writes it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click
import msgspec
from click.shell_completion import CompletionItem, get_completion_class
from msgspec import Struct

from shardscope.cli.console import writing_out
from shardscope.cli.verb import Verb
from shardscope.errors import TargetError

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:  # older versions of click have no parameter for the type
    _TextType = click.ParamType

VARIABLE = "_SHARDSCOPE_COMPLETE"
"""Set by the shell's script while it asks for completions."""
_FILE = "completion.json"
_SHELLS = {
    "bash": "shardscope completion bash > ~/.local/share/bash-completion/completions/shardscope",
    "zsh": "shardscope completion zsh > ~/.zfunc/_shardscope   # with fpath+=~/.zfunc in ~/.zshrc",
    "fish": "shardscope completion fish > ~/.config/fish/completions/shardscope.fish",
}
# Of click's scripts: bash's drops backslashes, fish's cuts descriptions at their first comma.
_CORRECTIONS = {
    "bash": {"read type value": "read -r type value"},
    "fish": {'string split "," $': 'string split --max 1 "," $'},
}
_SPECIAL = re.compile(r"([^\w@%+=:,./~-])")  # characters that bash needs a backslash before
# The files that a parameter takes, by its placeholder in the help.
_ENDINGS = {
    "RECORDING": (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".parquet"),
    "TARGET": (".py",),
    "CONTRACT": (".toml",),
}
_RECORDINGS = ("FILE", "BEFORE", "AFTER", "OTHER", "RECORDING")


class ParameterEntry(Struct, frozen=True, omit_defaults=True):
    """An option (`names` begin with a dash) or an argument of a command."""

    names: tuple[str, ...]
    help: str = ""
    is_flag: bool = False
    is_multiple: bool = False
    values: tuple[str, ...] = ()
    endings: tuple[str, ...] | None = None  # of the files that it takes; () is any file


class CommandEntry(Struct, frozen=True, omit_defaults=True):
    """The parameters of a command, and, of a group, its commands."""

    parameters: tuple[ParameterEntry, ...] = ()
    commands: dict[str, CommandEntry] = {}
    help: str = ""


@click.command(
    "completion",
    cls=Verb,
    examples=["shardscope completion bash", "shardscope completion zsh"],
    instead_of_json="It prints a script for a shell.",
)
@click.argument("shell", type=click.Choice(list(_SHELLS)), required=False)
def command(shell: str | None) -> None:
    """Print the script that completes commands, options and files in SHELL.

    Without SHELL it is that of your login shell. Save the script where your shell looks for
    completions; its last lines say where.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        raise TargetError(
            f"there is no completion for the shell {name!r}. Name one of {', '.join(_SHELLS)}."
        )
    completion = get_completion_class(name)
    assert completion is not None
    script = completion(click.Group("shardscope"), {}, "shardscope", VARIABLE)
    # Not `source()`, which for bash first starts bash to ask for its version.
    text = script.source_template % script.source_vars()
    for part, replacement in _CORRECTIONS.get(name, {}).items():
        text = text.replace(part, replacement)
    with writing_out():
        click.echo(text)
        click.echo(f"# To install it:\n#   {_SHELLS[name]}\n# Then start a new shell.")


def load_command(name: str) -> click.Command | None:
    """A command that can be completed, though not run; None if there is none of that name."""
    text = resources.files(__package__ or "").joinpath(_FILE).read_bytes()
    entry = msgspec.json.decode(text, type=dict[str, CommandEntry]).get(name)
    return None if entry is None else _make_command(name, entry)


def _make_command(name: str, entry: CommandEntry) -> click.Command:
    parameters = [_make_parameter(parameter) for parameter in entry.parameters]
    if not entry.commands:
        return click.Command(name, params=parameters, help=entry.help)
    commands = {inner: _make_command(inner, item) for inner, item in entry.commands.items()}
    return click.Group(name, commands=commands, params=parameters, help=entry.help)


def _make_parameter(entry: ParameterEntry) -> click.Parameter:
    kind: click.ParamType[Any] = click.STRING
    if entry.values:
        kind = click.Choice(entry.values)
    elif entry.endings is not None:
        kind = _FileName(entry.endings)
    if not entry.names[0].startswith("-"):
        return click.Argument(
            entry.names, type=kind, nargs=-1 if entry.is_multiple else 1, required=False
        )
    if entry.is_flag:
        return click.Option(entry.names, is_flag=True, help=entry.help)
    return click.Option(entry.names, type=kind, help=entry.help, multiple=entry.is_multiple)


@final
class _FileName(_TextType):
    """A file with one of some endings; folders lead to it."""

    name = "file"

    def __init__(self, endings: tuple[str, ...]) -> None:
        self._endings = endings

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files and folders whose path begins with `incomplete`.

        Folders alone are left to the shell, which adds a slash and no space.
        """
        if not self._endings:
            return [CompletionItem(incomplete, type="file")]
        start = incomplete.rpartition("/")[2]
        prefix = incomplete.removesuffix(start)
        try:
            with os.scandir(prefix or ".") as entries:
                matching = sorted(
                    (entry.name, entry.is_dir())
                    for entry in entries
                    if entry.name.startswith(start) and (start or entry.name[0] != ".")
                )
        except OSError:
            matching = []
        files = [name for name, _ in matching if name.endswith(self._endings)]
        if not files:
            return [CompletionItem(incomplete, type="dir")]
        folders = [f"{name}/" for name, is_folder in matching if is_folder]
        names = [prefix + name for name in (*files, *folders)]
        if os.environ.get(VARIABLE, "").startswith("bash"):  # other shells add them themselves
            names = [_SPECIAL.sub(r"\\\1", name) for name in names]
        return [CompletionItem(name) for name in names]


def list_commands(group: click.Group) -> Iterator[tuple[str, CommandEntry]]:
    """What a shell completes of a group's commands."""
    context = click.Context(group)
    for name in group.list_commands(context):
        inner = group.get_command(context, name)
        assert inner is not None
        yield (
            name,
            CommandEntry(
                (*map(_describe, inner.params), *_list_program(inner)),
                dict(list_commands(inner)) if isinstance(inner, click.Group) else {},
                inner.get_short_help_str(limit=120),
            ),
        )


def _list_program(command: click.Command) -> Iterator[ParameterEntry]:
    """A program and its arguments, of a command that takes one after `--`."""
    has_files = any(parameter.nargs == -1 for parameter in command.params)
    if isinstance(command, Verb) and command.takes_program and not has_files:
        yield ParameterEntry(names=("program",), is_multiple=True, endings=())


def _describe(parameter: click.Parameter) -> ParameterEntry:
    is_option = isinstance(parameter, click.Option)
    kind = parameter.type
    return ParameterEntry(
        names=(*parameter.opts, *parameter.secondary_opts)
        if is_option
        else (parameter.name or "",),
        help=(parameter.help or "") if isinstance(parameter, click.Option) else "",
        is_flag=isinstance(parameter, click.Option) and parameter.is_flag,
        is_multiple=parameter.multiple or parameter.nargs == -1,
        values=tuple(map(str, kind.choices)) if isinstance(kind, click.Choice) else (),
        endings=_find_endings(parameter),
    )


def _find_endings(parameter: click.Parameter) -> tuple[str, ...] | None:
    word = (parameter.metavar or "").strip("[]").removesuffix("...").strip("[]")
    if "--contract" in parameter.opts and word == "FILE":
        word = "CONTRACT"
    elif word in _RECORDINGS and not (word == "FILE" and isinstance(parameter, click.Option)):
        word = "RECORDING"
    if word in _ENDINGS:
        return _ENDINGS[word]
    if parameter.name == "program":
        return ()
    return () if word in ("FILE", "OUT", "FOLDER", "CHANGED", "PATH", "PLAN") else None


def render_index(group: click.Group) -> bytes:
    """The index of all commands, a line each, so that changes of two commands merge."""
    lines = [
        msgspec.json.encode(name) + b": " + msgspec.json.encode(entry)
        for name, entry in list_commands(group)
    ]
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


if __name__ == "__main__":
    from shardscope.cli import main

    sys.stdout.buffer.write(render_index(main))
