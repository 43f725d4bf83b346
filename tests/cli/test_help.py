"""Help: every command has an example, complete sentences and exit codes; wrong names get hints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.cli.mesh_option import parse_mesh
from shardscope.cli.verb import Verb, VerbGroup
from shardscope.errors import TargetError

DISPLAYING = ("show", "report", "tui", "export", "diff", "visualize", "demo")


def list_commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from list_commands(found, (*path, name))


COMMANDS = dict(list_commands(main))


def read_help(path: tuple[str, ...], *, width: int = 80) -> str:
    result = CliRunner().invoke(main, [*path, "--help"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_an_example_exit_codes_and_complete_sentences(path: tuple[str, ...]) -> None:
    command, text = COMMANDS[path], read_help(path)
    assert re.search(r"^Examples?:$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
    if not isinstance(command, click.Group) or not path:
        assert re.search(r"^Exit codes:$", text, re.MULTILINE)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            words = parameter.help or ""
            assert re.match(r"[A-Z]", words), parameter.name
            assert words.endswith("."), parameter.name
    for paragraph in (command.help or "").split("\n\n"):
        assert paragraph.strip()[0].isupper()
        assert paragraph.strip().endswith(".")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_group_lists_its_commands_with_complete_sentences(path: tuple[str, ...]) -> None:
    if isinstance(COMMANDS[path], click.Group):
        listed = read_help(path).partition("Commands:")[2].partition("\n\n")[0]
        assert "..." not in listed
        assert listed.rstrip().endswith(".")


def test_a_group_without_a_command_prints_its_help() -> None:
    result = CliRunner().invoke(main, ["contract"])
    assert result.exit_code == 2
    assert result.output.splitlines()[0] == "Usage: main contract [OPTIONS] COMMAND [ARGS]..."
    assert "\\n" not in result.output


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_examples_are_commands_that_parse(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    if not isinstance(command, Verb | VerbGroup):
        return
    for example in command.examples:
        words = shlex.split(example)
        words = words[words.index("shardscope") + 1 :]
        named = next(tuple(words[:size]) for size in (2, 1) if tuple(words[:size]) in COMMANDS)
        assert named[: len(path)] == path
        target = COMMANDS[named]
        with target.make_context(named[-1], words[len(named) :]):
            pass


def test_the_rule_about_saved_files_and_exit_codes_is_in_the_help() -> None:
    text = " ".join(read_help(()).split())
    for path, command in COMMANDS.items():
        has_output = any(parameter.name == "output" for parameter in command.params)
        if has_output:
            assert " ".join(path) in text.partition("Files:")[2]
    assert 'Each file is printed as "saved FILE"' in text
    assert all(verb in text.partition("Exit codes:")[2] for verb in DISPLAYING)


@pytest.mark.parametrize("path", [path for path in COMMANDS if path], ids=" ".join)
def test_only_checking_commands_exit_with_1(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    if not isinstance(command, Verb):
        return
    if path[0] in DISPLAYING and command.fails_if is not None:
        assert "--strict" in command.fails_if or "--fail-on" in command.fails_if


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("tarce",), "No such command 'tarce'. Did you mean 'trace'?"),
        (("paralelize",), "Did you mean 'parallelize'?"),
        (("contract", "chek"), "Did you mean 'check'?"),
        (("show", "--veiw", "all", "x"), "Did you mean '--view'?"),
        (("trace", "--mehs", "dp=2", "x"), "Did you mean '--mesh'?"),
        (("zzz",), "No such command 'zzz'."),
    ],
)
def test_misspelt_names_get_a_suggestion(args: tuple[str, ...], hint: str) -> None:
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == 2
    assert hint in result.stderr
    assert ("Did you mean" in result.stderr) == ("Did you mean" in hint)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ("0", "0"),
        ("00", "00"),
        ("-1", "-1"),
        ("1.5", "1.5"),
        ("", "no number"),
        ("many", "many"),
        ("٣x", "٣x"),
    ],
)
def test_sizes_out_of_range_name_the_axis_and_the_range(size: str, shown: str) -> None:
    for mesh in (f"dp={size}", f"tp=2,dp={size}"):
        with pytest.raises(TargetError) as caught:
            parse_mesh(mesh)
        assert str(caught.value) == (
            f"axis dp has size {shown} in --mesh; sizes must be whole numbers from 1 to 1,048,576, "
            "such as --mesh dp=8,tp=4."
        )
    result = CliRunner().invoke(main, ["trace", "train.py", "--mesh", f"dp={size}"])
    assert result.exit_code == 2
    assert result.stderr.startswith("shardscope: axis dp has size")


@pytest.mark.parametrize("mesh", ["dp=1048577", "dp=1024,tp=1025", "dp=" + "9" * 5000])
def test_too_many_ranks_are_refused_with_the_limit(mesh: str) -> None:
    with pytest.raises(TargetError, match="has more than 1,048,576 ranks"):
        parse_mesh(mesh)
