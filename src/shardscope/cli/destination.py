"""Which file a command saves, and under which name: one rule for all commands.

A command that runs a program saves a recording, and so does `merge`; `report`, `export` and
`contract record` save files derived from recordings. `-o OUT` names the file, and an existing OUT
is an error. Without `-o` a recording is named after its target, with a number if that name is
taken; a derived file is named after its recording. `--force` overwrites either. Each saved file is
printed as "saved FILE".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import final

from rich.console import RenderableType

from shardscope.cli.console import (
    is_first,
    is_launched,
    launched_rank,
    num_launched,
    print_line,
    print_out,
    show_progress,
)
from shardscope.cli.json_result import add_recording, current_json
from shardscope.errors import OutputError
from shardscope.record import Recording, check_output, save, write_file
from shardscope.record.files import name_for_rank
from shardscope.record.parquet import check_format

FILES_HELP = """\
A command that runs a program (demo, run, trace, audit, visualize, memory, coverage, parallelize,
parity, check, types, explain, diagnose) saves a recording: NAME.shardscope.json.gz in the current
folder, where NAME is the target's. merge saves merged.shardscope.json.gz. If the name is taken, a
number is added (NAME-2). report and export save a file next to the recording, contract record saves
shardscope.toml, init a target or files for CI. ci, query, compare and hang save files only with -o.
show, tui, diff, contract check, doctor, completion and mcp save nothing.

-o OUT names another file; {rank} in it becomes the rank. A recording is saved as Parquet if OUT
ends in .parquet. An existing file is overwritten only with --force. Each file is printed as "saved
FILE".
"""

_ENDING = ".shardscope.json.gz"
_RECORDING_ENDINGS = (".gz", ".jsonl", ".json", ".parquet")


@final
class Destination:
    """The file for a command's recording, checked to be writable before any work is spent.

    `output` is what the user gave as `-o`; without it the file is called after `stem`.
    """

    def __init__(self, stem: str, output: str | None, *, force: bool, rank: int = 0) -> None:
        self._force = force
        self._rank = launched_rank() if is_launched() else rank
        self._stem = stem + (f"-{launched_rank()}" if is_launched() else "")
        if output is not None:
            check_is_file(output)
            check_rank_in_name(output, example="-o run-{rank}.json.gz")
        elif force:
            output = self._stem + _ENDING
        self._path = None if output is None else name_for_rank(output, self._rank)
        if self._path is not None:
            check_format(self._path)
        check_output(self._path or next(_unused_names(self._stem)), force=force)

    def finish(self, recording: Recording, *summary: RenderableType) -> None:
        """Print the summary, save the recording and name its file.

        Of several launched processes each saves, and the first one prints.
        """
        try:
            if is_first():
                print_out(*summary)
        finally:  # a recording is saved even if it cannot be printed, and the reverse
            with show_progress("saving the recording", is_shown=is_first()):
                self._path = self._save(recording)
        add_recording(recording, [self._path])
        if is_first():
            print_line()
            print_saved(self._path)

    @property
    def path(self) -> Path:
        """Where the recording was saved."""
        assert self._path is not None, "nothing was saved yet"
        return self._path

    def _save(self, recording: Recording) -> Path:
        if self._path is not None:
            return save(recording, self._path, force=self._force)
        for name in _unused_names(self._stem):
            try:
                return save(recording, name)
            except OutputError:
                # Another process may have taken the name since we looked.
                if not os.path.lexists(name):
                    raise
        raise AssertionError("there is always another name")


def check_is_file(output: str) -> None:
    """Raise OutputError if a file that cannot be printed is to be written to standard output."""
    if output == "-":
        raise OutputError(
            "-o - would write to standard output, which has the summary. Name a file with -o."
        )


def save_file(chunks: bytes | Iterable[bytes], path: str, *, force: bool) -> None:
    """Write a file other than a recording and name it."""
    with show_progress(f"writing {path}"):
        write_file(chunks, path, force=force)
    print_saved(path)


def print_saved(path: str | Path, note: str = "") -> None:
    """Print `saved FILE`, on a line of its own however long it is."""
    if result := current_json():
        result.add_file(path, note)
        return
    print_line(f"saved {path} ({note})" if note else f"saved {path}")


def name_after(recording_file: str, ending: str) -> str:
    """`runs/step.html` for runs/step.json.gz and the ending .html."""
    path = Path(recording_file)
    stem = path.name
    for recording_ending in _RECORDING_ENDINGS:
        stem = stem.removesuffix(recording_ending)
    return str(path.parent / (stem + ending))  # a folder's name too, which is refused when read


def check_distinct(output: str, files: Iterable[str]) -> None:
    """Raise OutputError if the output would overwrite one of the files that are read."""
    # Symbolic links count: the file behind them would be overwritten.
    target = os.path.realpath(output)
    for file in files:
        if os.path.realpath(file) == target:
            raise OutputError(
                f"'{output}' is one of the recordings to read and would be overwritten. "
                "Name another file with -o."
            )


def check_rank_in_name(output: str, *, example: str) -> None:
    """Raise OutputError if several processes would write the same file."""
    if is_launched() and num_launched() > 1 and "{rank}" not in output:
        raise OutputError(
            f"all {num_launched()} processes would write '{output}'. Put {{rank}} into the "
            f"name, as in {example}, so that each writes its own file."
        )


def _unused_names(stem: str) -> Iterator[str]:
    stems = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return (name for name in (stem + _ENDING for stem in stems) if not os.path.lexists(name))
