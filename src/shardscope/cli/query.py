"""`shardscope query`: SQL over recordings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import click

from shardscope.cli.console import print_line, print_out, show_progress, write_out
from shardscope.cli.destination import check_distinct, save_file
from shardscope.cli.json_result import check_stdout_is_free, current_json
from shardscope.cli.shared_options import force_option
from shardscope.cli.verb import Verb
from shardscope.record import check_output
from shardscope.record.units import plural
from shardscope.report.query.database import Database, open_recording
from shardscope.report.query.results import (
    MAX_ROWS,
    list_columns,
    list_tables,
    make_json_value,
    render_arrow,
    render_csv_rows,
    render_json_rows,
    render_markdown_rows,
    render_text,
)
from shardscope.report.result.figures import Figures, TableFigures

_FORMS = {"csv": render_csv_rows, "json": render_json_rows, "markdown": render_markdown_rows}


@click.command(
    "query",
    cls=Verb,
    examples=[
        'shardscope query "SELECT axis, sum(wire_bytes) FROM collectives GROUP BY 1" run.parquet',
        'shardscope query "FROM findings" run-*.json.gz --format json',
        "shardscope query --tables",
    ],
)
@click.argument("sql", required=False)
@click.argument("files", nargs=-1, metavar="FILE...")
@click.option("--tables", "is_listed", is_flag=True, help="List the tables and their columns.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", *_FORMS, "arrow"]),
    default="table",
    show_default=True,
    help="How to write the result; arrow is a file of Arrow's IPC format.",
)
@click.option("-o", "--output", metavar="OUT", show_default="standard output", help="File to save.")
@force_option
def command(
    sql: str | None,
    files: tuple[str, ...],
    is_listed: bool,
    form: str,
    output: str | None,
    force: bool,
) -> None:
    """Run an SQL query on the tables of recordings, with DuckDB.

    Of several FILEs, each table has a column `recording` with the file's name. A query can read the
    recordings and nothing else.
    """
    if form != "table" and output in (None, "-"):
        check_stdout_is_free(f"--format {form}", "Save it with -o, or leave one of them out.")
    if is_listed:
        add_table(["table", "columns"], list_columns())
        print_out(list_tables())
        return
    if sql is None or not files:
        raise click.UsageError("name a query and at least one recording, or --tables.")
    if output is not None:
        check_distinct(output, files)
        check_output(output, force=force)
        form = "csv" if form == "table" else form
    with show_progress("querying") as report:
        recordings = []
        for file in files:
            report(f"reading {file}")
            recordings.append(open_recording(file))
        database = Database(recordings)
        report("running the query")
        if form == "arrow":
            _write([render_arrow(database.run_to_arrow(sql))], output, force=force)
            return
        names, rows = database.run(sql)
    if form in _FORMS:
        _write(_FORMS[form](names, rows), output, force=force)
        return
    again = shlex.join(["shardscope", "query", sql, *files, "--format", "csv", "-o", "rows.csv"])
    add_table(names, rows, more=[again])
    print_out(render_text(names, rows))
    if len(rows) > MAX_ROWS:
        print_line(
            f"{plural(len(rows) - MAX_ROWS, 'more row')} not shown; --format csv writes all."
        )


def add_table(
    names: Sequence[str], rows: Sequence[Sequence[Any]], more: Sequence[str] = ()
) -> None:
    """Report rows with `--json`; the document has as many as fit."""
    if result := current_json():
        cells = tuple(tuple(map(make_json_value, row)) for row in rows[:MAX_ROWS])
        table = TableFigures(columns=tuple(names), num_rows=len(rows), rows=cells)
        summary = f"{plural(len(rows), 'row')}, {plural(len(names), 'column')}"
        result.add_figures(Figures(table=table), summary, has_problems=False, more=more)


def _write(chunks: Iterable[bytes], output: str | None, *, force: bool) -> None:
    if output is None or output == "-":
        write_out(chunks)
    else:
        save_file(chunks, output, force=force)
