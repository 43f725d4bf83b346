"""`shardscope init`: writes a target, a contract and files for CI for the user's model."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

import click
import tomlkit

from shardscope.cli.ci_files import CI_FILES, render_ci_file
from shardscope.cli.ci_runs import record
from shardscope.cli.ci_settings import RecordCommand, parse_command, read_settings
from shardscope.cli.console import print_line, show_progress
from shardscope.cli.destination import print_saved
from shardscope.cli.loading import load_recordings
from shardscope.cli.source_scan import SourceFile, read_source
from shardscope.cli.target_writer import render_target
from shardscope.cli.verb import PROGRAM, Verb, suggest
from shardscope.contract import record_contract, render_contract
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
    Nothing is overwritten.
    """
    program: tuple[str, ...] | None = ctx.meta.get(PROGRAM)
    if source is None and program is None and not services:
        raise TargetError(
            "there is nothing to write for. Give the file with your model (shardscope init "
            "model.py), or a training program after -- (shardscope init -- train.py)."
        )
    if source is not None and program is not None:
        raise TargetError(f"init got {source} before -- and a program after it. Give one of them.")
    files: dict[Path, str] = {}
    command_line = None
    if source is not None:
        command_line = _prepare_target(Path(source), name, mesh, Path(output), files)
    elif program is not None:
        command_line = f"run -- {shlex.join(program)}"
    is_settings_new = command_line is not None and (has_contract or program or services)
    if is_settings_new:
        _check_absent(Path(_CONTRACT))
    elif services:
        read_settings(_CONTRACT)  # raises if it does not say what to record
    for service in services:
        path, text = render_ci_file(service, install)
        files[path] = text
    _write(files)
    if command_line is not None:
        recordings = _run(command_line) if is_run or has_contract else []
        if is_settings_new:
            _write({Path(_CONTRACT): _render_settings(command_line, recordings, has_contract)})
        print_line(f"next: shardscope {'ci' if is_settings_new else command_line}")


def _prepare_target(
    path: Path, name: str | None, mesh: str, output: Path, files: dict[Path, str]
) -> str:
    """Add the target to `files` unless the source is one; returns the command that records it."""
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
    files[output] = render_target(source, _choose_model(source, name), output)
    return f"trace {shlex.quote(str(output))} --mesh {mesh}"


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


def _run(command_line: str) -> list[Recording]:
    with (
        tempfile.TemporaryDirectory(prefix="shardscope-init-") as folder,
        show_progress("running") as report,
    ):
        command = parse_command(command_line)
        (run,) = record([command], Path(folder), report)
        if not run.is_recorded:
            click.echo("\n".join(map(sanitize_text, run.failure.splitlines())), err=True)
            raise ShardscopeError(
                f"`shardscope {command_line}` does not run yet; what it printed is above. "
                f"{_suggest_edit(command)}"
            )
        recordings = load_recordings([run.path], report)
    print_line(f"`shardscope {command_line}` runs")
    return recordings


def _suggest_edit(command: RecordCommand) -> str:
    if command.verb == "run":
        return "Make it run first, then init again."
    return f"Correct {command.words[1]}, first where it says guessed, and run the command."


def _render_settings(command_line: str, recordings: list[Recording], has_contract: bool) -> str:
    """shardscope.toml: limits, if they are wanted, and what `shardscope ci` records."""
    limits = render_contract(record_contract(*recordings)) + "\n" if has_contract else ""
    table = tomlkit.table()
    table.add(tomlkit.comment("What `shardscope ci` records; without limits it only compares."))
    commands = tomlkit.array()
    commands.append(command_line)
    table.add("record", commands)
    return limits + tomlkit.dumps({"ci": table})
