"""`shardscope init`: writes a target, a contract and files for CI for the user's model."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import tomlkit
from msgspec import Struct

from shardscope.cli.ci_files import CI_FILES, render_ci_file
from shardscope.cli.ci_runs import record
from shardscope.cli.ci_settings import (
    RecordCommand,
    list_imports,
    parse_command,
    read_settings,
)
from shardscope.cli.console import print_line, print_next, show_progress
from shardscope.cli.destination import check_is_file, print_saved
from shardscope.cli.loading import load_recordings
from shardscope.cli.source_scan import SourceFile, find_package, read_source
from shardscope.cli.target_writer import render_target
from shardscope.cli.verb import PROGRAM, Verb, suggest
from shardscope.contract import record_contract, render_contract
from shardscope.contract.toml_reader import parse_toml, read_text
from shardscope.errors import OutputError, ShardscopeError, TargetError
from shardscope.record import Recording, write_file
from shardscope.record.text import sanitize_text

_TARGET = "shardscope_target.py"
_CONTRACT = "shardscope.toml"
_MAX_NAMED = 6


@click.command(
    "init",
    cls=Verb,
    examples=[
        "shardscope init model.py",
        "shardscope init package/model.py --model Transformer --mesh dp=8 --contract",
        "shardscope init --contract -- train.py --lr 3e-4",
        "shardscope init --ci github --install wheels/shardscope.whl",
        "shardscope init --ci pre-commit",
    ],
    takes_program=True,
)
@click.argument("source", metavar="[SOURCE]", required=False)
@click.option("--model", "name", metavar="NAME", help="Class, function or instance in SOURCE.")
@click.option(
    "--mesh", default="dp=8", show_default=True, metavar="AXES", help="Mesh that is simulated."
)
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    default=_TARGET,
    show_default=True,
    help="File for the target.",
)
@click.option("--run", "is_run", is_flag=True, help="Run the target once, to see that it works.")
@click.option(
    "--contract",
    "has_contract",
    is_flag=True,
    help=f"Run it, and save its figures as limits in {_CONTRACT}.",
)
@click.option(
    "--ci",
    "services",
    type=click.Choice(list(CI_FILES)),
    multiple=True,
    help="Also write the file of a CI service; may be given several times.",
)
@click.option(
    "--install",
    metavar="REQUIREMENT",
    help="Which shardscope CI installs with pip, such as a wheel in your repository.",
)
@click.pass_context
def command(
    ctx: click.Context,
    source: str | None,
    name: str | None,
    mesh: str,
    output: str,
    is_run: bool,
    has_contract: bool,
    services: tuple[str, ...],
    install: str | None,
) -> None:
    """Write what shardscope needs for your model: a target, a contract, files for CI.

    SOURCE is a Python file with the model; it is read, and not run. The target is a file that
    trace, memory, audit and other commands take. Training programs need none: put one after --.
    Nothing is overwritten: a target of the same model is used as it is, and a shardscope.toml gets
    what it lacks.
    """
    program: tuple[str, ...] | None = ctx.meta.get(PROGRAM)
    if source is None and program is None and not services:
        raise TargetError(
            "there is nothing to write for. Give the file with your model (shardscope init "
            "model.py), or a training program after -- (shardscope init -- train.py)."
        )
    if source is not None and program is not None:
        raise TargetError(f"init got {source} before -- and a program after it. Give one of them.")
    check_is_file(output)
    files: dict[Path, str] = {}
    command_line = None
    if source is not None:
        is_reused = is_run or has_contract or bool(services)
        command_line = _prepare_target(
            Path(source), name, mesh, Path(output), files, is_reused=is_reused
        )
    elif program is not None:
        command_line = f"run -- {shlex.join(program)}"
    settings = _Settings.read()
    has_settings = command_line is not None and bool(has_contract or program or services)
    if has_settings:
        settings.check_lacks_something(has_contract=has_contract, is_alone=not services)
        if files and settings.commands:
            raise OutputError(
                f"'{_CONTRACT}' records `shardscope {settings.commands[0].text}`, and not a target "
                f'that is new. Add "{command_line}" to record below [ci] by hand, or remove the '
                "file first."
            )
    elif services:
        read_settings(_CONTRACT)  # raises if it does not say what to record
    for service in services:
        path, text = render_ci_file(service, install)
        files[path] = text
    _write(files)
    if command_line is not None:
        commands = (has_settings and settings.commands) or (parse_command(command_line),)
        recordings = _run(commands) if is_run or has_contract else []
        if has_settings:
            settings.save(command_line, recordings if has_contract else [])
        print_next(f"shardscope {'ci' if has_settings else command_line}")


def _prepare_target(
    path: Path,
    name: str | None,
    mesh: str,
    output: Path,
    files: dict[Path, str],
    *,
    is_reused: bool,
) -> str:
    """Add the target to `files` unless the source is one; returns the command that records it.

    `is_reused` means that there is more to do than to write the target: one of an earlier `init`
    of the same model is used as it is.
    """
    if path.is_dir():
        path = path / "__init__.py"
    if not path.is_file():
        raise TargetError(f"{path} does not exist. Give the path of a Python file with a model.")
    source = read_source(path)
    if source.is_target and name is None:
        print_line(f"{path} is a target already: it defines model() and batch().")
        return f"trace {shlex.quote(str(path))} --mesh {mesh}"
    if source.is_program:
        raise TargetError(
            f"{path} is a program: importing it would run it. Put it after --, as in shardscope "
            f"init -- {path}, or name the file that defines its model."
        )
    if is_reused and _is_target_of(output, source, name):
        print_line(f"{output} is a target of {path} already, and is used as it is.")
    else:
        files[output] = render_target(source, _choose_model(source, name), output)
    return f"trace {shlex.quote(str(output))} --mesh {mesh}"


def _is_target_of(path: Path, source: SourceFile, name: str | None) -> bool:
    """Whether a file is a target that imports the source, and `name` from it if that is given."""
    if not path.is_file() or not read_source(path).is_target:
        return False
    _, module = find_package(source.path)
    return (f"{module}.{name}" if name else module) in (list_imports(path) or ())


def _choose_model(source: SourceFile, name: str | None) -> str:
    models = source.find_models()
    known = list(
        dict.fromkeys([*models, *(item.name for item in source.modules), *source.functions])
    )
    if name is not None:
        if name not in (*known, *source.instances):
            raise TargetError(
                f"{source.path} defines no {name!r} at its top level.{suggest(name, known)} It has "
                f"{', '.join(known[:_MAX_NAMED]) or 'no classes or functions'}."
            )
        return name
    if not models:
        raise TargetError(
            f"{source.path} has no subclass of nn.Module, no model and no function such as "
            "build_model(). Name the file that defines the model, or what it is called: --model."
        )
    others = list(dict.fromkeys(models[1:]))[:_MAX_NAMED]
    more = f" It also has {', '.join(others)}: choose with --model." if others else ""
    print_line(f"found {models[0]} in {source.path}.{more}")
    return models[0]


def _write(files: dict[Path, str]) -> None:
    for path in files:
        _check_absent(path)  # all of them before the first is written
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(text.encode(), path)
        print_saved(path)


def _check_absent(path: Path) -> None:
    if os.path.lexists(path):
        raise OutputError(
            f"'{path}' already exists, and init overwrites nothing. Remove it first, or name "
            "another file with -o."
        )


def _run(commands: Sequence[RecordCommand]) -> list[Recording]:
    with (
        tempfile.TemporaryDirectory(prefix="shardscope-init-") as folder,
        show_progress("running") as report,
    ):
        runs = list(record(commands, Path(folder), report))
        for run in runs:
            if not run.is_recorded:
                click.echo("\n".join(map(sanitize_text, run.failure.splitlines())), err=True)
                raise ShardscopeError(
                    f"`shardscope {run.command.text}` does not run yet; what it printed is above. "
                    f"{_suggest_edit(run.command)}"
                )
        recordings = load_recordings([run.path for run in runs], report)
    for command in commands:
        print_line(f"`shardscope {command.text}` runs")
    return recordings


def _suggest_edit(command: RecordCommand) -> str:
    if command.verb == "run":
        return "Make it run first, then init again."
    return f"Correct {command.words[1]}, first where it says guessed, and run the command."


class _Settings(Struct, frozen=True):
    """shardscope.toml: limits, and what `shardscope ci` records; empty if there is none."""

    text: str = ""
    has_limits: bool = False
    commands: tuple[RecordCommand, ...] = ()  # that `shardscope ci` records

    @classmethod
    def read(cls) -> _Settings:
        """Read the file of the current folder."""
        if not os.path.lexists(_CONTRACT):
            return cls()
        text = read_text(_CONTRACT)
        has_commands = "record" in parse_toml(text, _CONTRACT).get("ci", {})
        commands = read_settings(_CONTRACT).commands if has_commands else ()
        return cls(text, "contract" in parse_toml(text, _CONTRACT), commands)

    def check_lacks_something(self, *, has_contract: bool, is_alone: bool) -> None:
        """Raise if the file has what would be added to it; `is_alone`: nothing else is written."""
        if is_alone and self.commands and not has_contract:
            raise OutputError(
                f"'{_CONTRACT}' says what to record already, and init overwrites nothing. Add "
                "--contract for limits, or remove the file first."
            )
        if has_contract and self.has_limits:
            raise OutputError(
                f"'{_CONTRACT}' has limits already, and init overwrites nothing. Update them with "
                "shardscope contract record RECORDING --force, or remove the file first."
            )

    def save(self, command_line: str, recordings: list[Recording]) -> None:
        """Write the file with the limits of the recordings, if there are any, and a command."""
        text = self.text
        if recordings:
            text = render_contract(record_contract(*recordings), before=text)
        if not self.commands:
            text = _add_command(text, command_line)
        if text != self.text:
            write_file(text.encode(), Path(_CONTRACT), force=bool(self.text))
            print_saved(_CONTRACT, "added what it lacked" if self.text else "")


def _add_command(text: str, command_line: str) -> str:
    """Add what `shardscope ci` records to a file without that."""
    commands = tomlkit.array()
    commands.append(command_line)
    document = tomlkit.parse(text)
    if "ci" in document:
        document["ci"]["record"] = commands
        return tomlkit.dumps(document)
    table = tomlkit.table()
    table.add(tomlkit.comment("What `shardscope ci` records; without limits it only compares."))
    table.add("record", commands)
    return (f"{text.rstrip()}\n\n" if text else "") + tomlkit.dumps({"ci": table})
