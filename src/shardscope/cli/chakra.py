"""Chakra traces as files: one for each rank, and one with the ranks of each group."""

from __future__ import annotations

from pathlib import Path

from shardscope.cli.console import show_progress
from shardscope.cli.destination import print_saved
from shardscope.comm.rank_stream import name_for_rank
from shardscope.errors import OutputError
from shardscope.record import Recording, check_output, write_file
from shardscope.report.chakra import list_chakra_ranks, render_chakra, render_chakra_groups
from shardscope.report.layout import plural

__all__ = ["check_chakra", "write_chakra"]


def check_chakra(target: str) -> None:
    """Raise OutputError for a name that cannot be several files'."""
    if target == "-":
        raise OutputError(
            "Chakra traces are several files and cannot go to standard output. "
            "Name them with -o, as in -o run.{rank}.et."
        )


def write_chakra(recording: Recording, target: str, *, force: bool) -> None:
    """Write a file for each rank, `{rank}` in the target's name, and the groups beside them."""
    ranks = list_chakra_ranks(recording)
    if len(ranks) > 1 and "{rank}" not in target:
        raise OutputError(
            f"{len(ranks)} ranks have a trace each, and '{target}' is one file. "
            "Put {rank} into its name, as in -o run.{rank}.et."
        )
    groups = _name_groups(target)
    for path in (*(name_for_rank(target, rank) for rank in ranks), groups):
        check_output(path, force=force)  # all of them before the first is written
    with show_progress(f"writing {target}"):
        for rank, trace in render_chakra(recording):
            write_file(trace, name_for_rank(target, rank), force=force)
        write_file(render_chakra_groups(recording), groups, force=force)
    first, *others = (str(name_for_rank(target, rank)) for rank in ranks)
    if others:
        print_saved(f"{first} … {others[-1]}", plural(len(ranks), "rank"))
    else:
        print_saved(first)
    print_saved(groups)


def _name_groups(target: str) -> Path:
    """`run.{rank}.et` is accompanied by `run.groups.json`."""
    path = Path(target)
    stem = path.name.removesuffix(".gz").removesuffix(".et").replace("{rank}", "").rstrip(".-_")
    return path.with_name(f"{stem or 'chakra'}.groups.json")
