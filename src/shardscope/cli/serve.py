"""`shardscope serve`: the page of a recording over a local server."""

from __future__ import annotations

import webbrowser

import click

from shardscope.cli.console import print_line, show_progress
from shardscope.cli.loading import load_reviewed
from shardscope.cli.verb import Verb
from shardscope.errors import OutputError
from shardscope.report.serve.served_page import make_served_page
from shardscope.report.serve.server import PageServer

_MAX_PORT = 65_535


@click.command(
    "serve",
    cls=Verb,
    examples=["shardscope serve run.parquet", "shardscope serve run.json.gz --no-open --port 8000"],
    instead_of_json="It serves a page; shardscope show --json prints the recording.",
)
@click.argument("file", metavar="FILE")
@click.option(
    "--port",
    type=click.IntRange(0, _MAX_PORT),
    default=0,
    show_default="a free one",
    help="Port to listen on, at 127.0.0.1.",
)
@click.option("--no-open", "is_quiet", is_flag=True, help="Do not open a browser.")
def command(file: str, port: int, is_quiet: bool) -> None:
    """Show the page of the recording FILE over a local server, until Ctrl-C.

    For runs that are too large for `shardscope report`: a Parquet FILE with a million collectives
    opens in seconds, because they stay with the server. Only this machine can reach it, and only
    with the token in its address.
    """
    with show_progress("serving") as report:
        report(f"reading {file}")
        page = make_served_page(file, lambda: load_reviewed([file], report))
        try:
            server = PageServer(page.document, page.calls and page.calls.answer, port=port)
        except OSError as error:
            raise OutputError(
                f"port {port} of 127.0.0.1 cannot be used: {error.strerror}. Choose another port, "
                "or leave out --port."
            ) from error
    with server:
        print_line(f"serving {file} at {server.url}")
        print_line("Ctrl-C ends it.")
        if not is_quiet:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_line("ended")
