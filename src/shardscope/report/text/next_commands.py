"""Commands for the next step, with the recording's file, the user's target and its mesh."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from msgspec import Struct

from shardscope.record import Recording
from shardscope.report.text.verdict import RunVerdict, list_checks

FILE = "FILE"  # stands for a recording whose file is not known
TARGET = "TARGET"
_MAX_FILES = 4  # that are named

# Options of the commands that run a program, by those that have a value and are kept.
_KEPT_OPTIONS = ("--nnodes", "--nproc-per-node")
_FLAGS = {
    "--data",
    "--no-data",
    "--variations",
    "--no-variations",
    "--force",
    "--json",
    "--strict",
    "--no-fold",
    "--no-step",
    "--processes",
    "--guards",
}
_VERBS = ("trace", "audit", "memory", "coverage", "parity", "explain", "diagnose", "check", "run")
_SMALL_MESH = ("parity", "coverage")  # commands that run all ranks of a mesh in one process
_SMALL_SIZE = 2
VIEW_INSTRUMENTS = {
    "modules": "trace",
    "communication": "trace",
    "sharding": "audit",
    "coverage": "coverage",
    "compiler": "explain",
    "memory": "memory",
    "proof": "parity",
}
"""The instrument that records what a view of the page shows."""


class NextCommand(Struct, frozen=True):
    """A command, and the question that it answers."""

    command: str
    purpose: str


def suggest_commands(
    verdict: RunVerdict, recording: Recording, files: Sequence[str] = (), against: str = ""
) -> tuple[NextCommand, ...]:
    """Suggest what to run next: more on what the verdict is about, what was not checked, diff.

    `files` are those of the recording, `against` is that of an earlier one; empty if not known.
    """
    return tuple(_list_commands(verdict, recording, quote_files(files), against))


def _list_commands(
    verdict: RunVerdict, recording: Recording, file: str, against: str
) -> Iterator[NextCommand]:
    concern = verdict.concerns[0]
    if concern.view == "communication":
        chosen = f" --module {shlex.quote(concern.module)}" if concern.module else ""
        yield NextCommand(f"shardscope show {file}{chosen} --by cause", "Every cause and its line")
    elif concern.view and concern.view != "compare":
        view = "correctness" if concern.view == "proof" else concern.view
        yield NextCommand(f"shardscope show {file} --view {view}", "All of it in the terminal")
    checks = list_checks(recording)
    for check in [item for item in checks if not item.has_run and not item.is_needless][:1]:
        yield NextCommand(make_record_command(check.instrument, recording), check.question)
    if against:
        command = f"shardscope diff {shlex.quote(against)} {file}"
        yield NextCommand(f"{command} --fail-on worse", "Fail in CI if anything gets worse")
    else:
        command = f"shardscope diff {file} AFTER.json.gz"
        yield NextCommand(command, "What does a change of yours change?")


def quote_files(files: Sequence[str]) -> str:
    """Return the names of files as they are typed in a shell, or FILE if they are not known."""
    return shlex.join(files) if 0 < len(files) <= _MAX_FILES else FILE


def make_record_command(instrument: str, recording: Recording) -> str:
    """Return the command that records with an instrument what this recording is about.

    Target, mesh and nodes are those of the recording's own command where it was one of ours;
    `parity` and `coverage` get a mesh of two ranks along each axis, as they run all ranks here.
    """
    options, target, program = _read_command(recording.run.command)
    words = ["shardscope", instrument]
    if program and instrument != "diagnose":  # which takes no programs
        return shlex.join([*words, *options, "--", *program])
    words.append(target or TARGET)
    axes = recording.run.axes
    if axes and instrument != "diagnose":
        is_small = instrument in _SMALL_MESH
        sizes = [min(axis.size, _SMALL_SIZE) if is_small else axis.size for axis in axes]
        mesh = (f"{axis.name}={size}" for axis, size in zip(axes, sizes, strict=True))
        words += ["--mesh", ",".join(mesh)]
    if instrument == "memory":
        words += ["--gpu-memory", "80GiB"]
    return shlex.join(words)


def _read_command(command: str) -> tuple[list[str], str, list[str]]:
    """Return the options to keep, the target and the program of a command of ours."""
    try:
        words = shlex.split(command)
    except ValueError:
        return [], "", []
    if len(words) < 2 or words[0] != "shardscope" or words[1] not in _VERBS:
        return [], "", []
    own, program = words[2:], []
    if "--" in own:
        at = own.index("--")
        own, program = own[:at], own[at + 1 :]
    options, target, position = [], "", 0
    while position < len(own):
        word = own[position]
        has_value = word.startswith("-") and word not in _FLAGS and "=" not in word
        if word in _KEPT_OPTIONS:
            options += own[position : position + 2]
        elif not word.startswith("-"):
            target = target or word
        position += 2 if has_value else 1
    return options, target, program
