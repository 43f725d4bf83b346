"""`shardscope export`: convert a recording to the format of another tool."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import click

from shardscope.cli.ci_formats import render_annotations
from shardscope.cli.console import print_note, show_progress, write_out
from shardscope.cli.destination import check_distinct, name_after, print_saved, save_file
from shardscope.cli.json_result import add_recording, check_stdout_is_free, current_json
from shardscope.cli.loading import load_reviewed
from shardscope.cli.shared_options import force_option, strict_option
from shardscope.cli.verb import Verb
from shardscope.comm.findings import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.errors import OutputError
from shardscope.record import Recording, check_output, encode_pieces, load, write_file
from shardscope.record.files import name_for_rank
from shardscope.record.parquet import encode_parquet
from shardscope.record.units import plural
from shardscope.report.export.annotations import annotate_findings
from shardscope.report.export.chakra import list_chakra_ranks, render_chakra, render_chakra_groups
from shardscope.report.export.csv import TABLES, count_rows, render_table
from shardscope.report.export.markdown import render_markdown
from shardscope.report.export.memory_snapshot import (
    list_snapshot_ranks,
    render_memory_snapshots,
)
from shardscope.report.export.perfetto import render_perfetto_chunks
from shardscope.report.export.spmd_types import render_spmd_types
from shardscope.report.export.tensorboard import render_tensorboard


def check_chakra(target: str) -> None:
    """Raise OutputError for standard output: Chakra traces are several files."""
    if target == "-":
        raise OutputError(
            "Chakra traces are several files and cannot go to standard output. "
            "Name them with -o, as in -o run.{rank}.et."
        )


def write_chakra(recording: Recording, target: str, *, force: bool) -> None:
    """Write a file for each rank, `{rank}` in the target's name, and the groups beside them."""
    ranks = list_chakra_ranks(recording)
    _check_names_ranks(ranks, target, what="trace", example="run.{rank}.et")
    groups = {_name_groups(target): render_chakra_groups(recording)}
    _write_each_rank(ranks, render_chakra(recording), target, force=force, beside=groups)


def write_snapshots(recording: Recording, file: str, target: str, *, force: bool) -> None:
    """Write a memory snapshot for each rank, `{rank}` in the target's name."""
    ranks = list_snapshot_ranks(recording)
    if not ranks:
        raise OutputError(
            f"'{file}' has no allocations to export. Export a recording of `shardscope memory`, or "
            "record again if an earlier version of shardscope made it."
        )
    _check_names_ranks(ranks, target, what="memory snapshot", example="run.{rank}.snapshot.pickle")
    snapshots = render_memory_snapshots(recording)
    if target == "-":
        write_out(snapshot for _, snapshot in snapshots)
    else:
        _write_each_rank(ranks, snapshots, target, force=force)


def _check_names_ranks(ranks: Sequence[int], target: str, *, what: str, example: str) -> None:
    if len(ranks) > 1 and "{rank}" not in target:
        raise OutputError(
            f"{len(ranks)} ranks have a {what} each, and '{target}' is one file. "
            f"Put {{rank}} into its name, as in -o {example}."
        )


def _write_each_rank(
    ranks: Sequence[int],
    contents: Iterator[tuple[int, bytes]],
    target: str,
    *,
    force: bool,
    beside: Mapping[Path, bytes] = MappingProxyType({}),
) -> None:
    """Write the content of each rank to its file, and further files beside them."""
    for path in (*(name_for_rank(target, rank) for rank in ranks), *beside):
        check_output(path, force=force)  # all of them before the first is written
    with show_progress(f"writing {target}"):
        for rank, content in contents:
            write_file(content, name_for_rank(target, rank), force=force)
        for path, content in beside.items():
            write_file(content, path, force=force)
    first, *further = (str(name_for_rank(target, rank)) for rank in ranks)
    if further and current_json() is None:
        print_saved(f"{first} … {further[-1]}", plural(len(ranks), "rank"))
    else:
        for file in (first, *further):
            print_saved(file)
    for path in beside:
        print_saved(path)


def _name_groups(target: str) -> Path:
    """`run.{rank}.et` is accompanied by `run.groups.json`."""
    path = Path(target)
    stem = path.name.removesuffix(".gz").removesuffix(".et").replace("{rank}", "").rstrip(".-_")
    return path.with_name(f"{stem or 'chakra'}.groups.json")


_ENDINGS = {
    "perfetto": ".perfetto.json",
    "chrome": ".chrome.json",
    "tensorboard": ".tfevents",
    "chakra": ".{rank}.et",
    "parquet": ".parquet",
    "memory-snapshot": ".{rank}.snapshot.pickle",
    "csv": ".csv",
    "json": ".json",
    "markdown": ".md",
    "sarif": ".sarif",
    "gitlab": ".codequality.json",
    "spmd-types": ".spmd_types.py",
}
_MAX_STEP = 2**63 - 1


@click.command(
    "export",
    cls=Verb,
    examples=[
        "shardscope export run.json.gz --to perfetto",
        "shardscope export run.json.gz --to csv --table findings -o -",
        "shardscope export run.json.gz --to markdown --against before.json.gz",
        "shardscope export memory.json.gz --to memory-snapshot",
    ],
    fails_if="With --strict: the recording has gaps.",
)
@click.argument("file", metavar="FILE")
@click.option(
    "--to",
    "form",
    type=click.Choice(list(_ENDINGS)),
    metavar="FORMAT",
    required=True,
    help=f"Output format: {', '.join(_ENDINGS)}.",
)
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    show_default="FILE with another ending",
    help="File to save (compressed if .gz); - is standard output.",
)
@click.option(
    "--table",
    type=click.Choice(TABLES),
    metavar="TABLE",
    show_default="collectives",
    help=f"For csv: the table to export, one of {', '.join(TABLES)}.",
)
@click.option(
    "--step",
    type=click.IntRange(0, _MAX_STEP),
    help="For tensorboard: the training step of the figures.",
)
@click.option(
    "--against", metavar="BEFORE", help="For markdown: an earlier recording to compare with."
)
@force_option
@strict_option
@click.pass_context
def command(
    ctx: click.Context,
    file: str,
    form: str,
    output: str | None,
    table: str | None,
    step: int | None,
    against: str | None,
    force: bool,
    strict: bool,
) -> None:
    """Convert the recording FILE to another format.

    The formats perfetto and chrome are the same trace, which opens in https://ui.perfetto.dev and
    in chrome://tracing. The format tensorboard is an event file of scalars; chakra is an execution
    trace for each rank ({rank} in OUT becomes the rank) and a file with their process groups. The
    formats sarif and gitlab (a code quality report) are the findings, for code scanning in CI. The
    format memory-snapshot is, for each rank, what torch.cuda.memory._dump_snapshot writes: all
    allocations of the step, for https://pytorch.org/memory_viz. The formats parquet and json are
    recordings again, which every command reads. The format spmd-types is a Python module that
    asserts the types which `shardscope types` inferred, with the package spmd_types.
    """
    _check_options(form, table=table, step=step, against=against)
    target = output or _name_output(file, form, table)
    _check_target(target, form, file, against, force=force)
    with show_progress(f"reading {file}"):
        recording = load(file)
    add_recording(recording, [file])
    _warn_of_gaps(recording)
    _warn_if_empty(recording, form, table or "collectives")
    if form == "spmd-types" and not recording.types:
        raise OutputError(
            f"'{file}' has no inferred types to export. Export a recording of `shardscope types`."
        )
    if form == "chakra":
        write_chakra(recording, target, force=force)
    elif form in ("sarif", "gitlab"):
        _write(_render_findings(recording, file, form), target, force=force)
    elif form == "memory-snapshot":
        write_snapshots(recording, file, target, force=force)
    elif form == "markdown":
        _write(_render_markdown(recording, file, against), target, force=force)
    else:
        _write(_choose_renderer(form, table=table, step=step)(recording), target, force=force)
    ctx.exit(int(strict and bool(recording.gaps)))


def _choose_renderer(
    form: str, *, table: str | None, step: int | None
) -> Callable[[Recording], Iterator[bytes]]:
    renderers: dict[str, Callable[[Recording], Iterator[bytes]]] = {
        "perfetto": render_perfetto_chunks,
        "chrome": render_perfetto_chunks,
        "tensorboard": partial(render_tensorboard, step=step or 0),
        "csv": partial(render_table, name=table or "collectives"),
        "json": encode_pieces,
        "parquet": lambda recording: iter([encode_parquet(recording)]),
        "spmd-types": render_spmd_types,
    }
    return renderers[form]


def _render_markdown(recording: Recording, file: str, against: str | None) -> Iterator[bytes]:
    """The report of a recording whose findings are computed again, as `show` does."""
    recording = review_explanations(review(recording))
    if against is None:
        yield render_markdown(recording).encode()
        return
    with show_progress(f"reading {against}") as report:
        before = load_reviewed([against], report)
    yield render_markdown(recording, against=before, titles=(against, file)).encode()


def _render_findings(recording: Recording, file: str, form: str) -> Iterator[bytes]:
    """The findings of a recording, computed again, in a format of CI."""
    recording = review_explanations(review(recording))
    annotations = list(annotate_findings(recording, fallback=file))
    return render_annotations(annotations, form, category="findings")


def _write(chunks: Iterator[bytes], target: str, *, force: bool) -> None:
    if target == "-":
        # On a terminal the output itself shows the progress.
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        with show_progress("writing", is_shown=not is_terminal):
            write_out(chunks)
        return
    save_file(chunks, target, force=force)


def _check_options(form: str, *, table: str | None, step: int | None, against: str | None) -> None:
    if table is not None and form != "csv":
        raise click.UsageError(f"--table is for --to csv; --to {form} has all of the recording.")
    if against is not None and form != "markdown":
        raise click.UsageError(f"--against is for --to markdown; --to {form} has one recording.")
    if step is not None and form != "tensorboard":
        raise click.UsageError(f"--step is for --to tensorboard; --to {form} has no steps.")


def _check_target(target: str, form: str, file: str, against: str | None, *, force: bool) -> None:
    if form == "chakra":
        check_chakra(target)
    elif target == "-":
        check_stdout_is_free("-o -", "Name a file with -o.")
    else:
        if form == "tensorboard":
            _check_event_file(target)
        check_distinct(target, [file, *filter(None, [against])])
        check_output(target, force=force)


def _check_event_file(target: str) -> None:
    name = Path(target).name
    if "tfevents" not in name or name.lower().endswith(".gz"):
        raise OutputError(
            f"TensorBoard would not find '{target}': it reads files that have 'tfevents' in their "
            "name and are not compressed. Choose such a name, as in -o logs/run.tfevents."
        )


def _warn_if_empty(recording: Recording, form: str, table: str) -> None:
    """Say what the recording lacks if the output has nothing in it."""
    if form in ("perfetto", "chrome", "chakra"):
        _warn_if_untraced(recording, has_more=form != "chakra")
        return
    if form != "csv" or count_rows(recording, table):
        return
    filled = [name for name in TABLES if count_rows(recording, name)]
    remedy = "All other tables are empty too."
    if filled:
        remedy = f"These tables have rows: {', '.join(filled)}."
    fact = f"the recording has no {table}, so the table is empty"
    print_note(f"{fact}. {remedy}")


def _warn_if_untraced(recording: Recording, *, has_more: bool) -> None:
    """An empty trace of what was not recorded looks like a run without communication."""
    if recording.collectives or (has_more and (recording.spans or recording.memory)):
        return
    if "trace" in recording.run.instruments:
        fact = "no collectives were issued, so the trace is empty."
    else:
        fact = "collectives were not recorded, so the trace is empty. Export a recording of "
        fact += "shardscope trace."
    print_note(fact)


def _warn_of_gaps(recording: Recording) -> None:
    if recording.gaps:
        gaps = plural(len(recording.gaps), "gap")
        print_note(f"the recording has {gaps}; `shardscope show` lists them.")


def _name_output(file: str, form: str, table: str | None) -> str:
    target = name_after(file, f".{table}{_ENDINGS[form]}" if table else _ENDINGS[form])
    if target == str(Path(file)):
        raise OutputError(
            f"'{file}' has that format already and would be overwritten. Name another file with -o."
        )
    return target
