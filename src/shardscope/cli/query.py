"""`shardscope query`: SQL over recordings."""

from __future__ import annotations

from collections.abc import Iterable

import click

from shardscope.cli.console import print_line, print_out, show_progress, write_out
from shardscope.cli.destination import check_distinct, save_file
from shardscope.cli.shared_options import force_option
from shardscope.cli.verb import Verb
from shardscope.record import check_output
from shardscope.record.units import plural
from shardscope.report.query.database import Database, open_recording
from shardscope.report.query.results import (
    MAX_ROWS,
    list_tables,
    render_arrow,
    render_csv_rows,
    render_json_rows,
    render_markdown_rows,
    render_text,
)

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
    if is_listed:
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
    print_out(render_text(names, rows))
    if len(rows) > MAX_ROWS:
        print_line(
            f"{plural(len(rows) - MAX_ROWS, 'more row')} not shown; --format csv writes all."
        )


def _write(chunks: Iterable[bytes], output: str | None, *, force: bool) -> None:
    if output is None or output == "-":
        write_out(chunks)
    else:
        save_file(chunks, output, force=force)
