"""`shardscope mcp`: a server that offers the commands to coding agents as tools."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardscope.cli.console import write_out
from shardscope.cli.verb import Verb
from shardscope.errors import ShardscopeError


@click.command(
    "mcp",
    cls=Verb,
    examples=[
        "shardscope mcp",
        "shardscope mcp --root my-project",
        "shardscope mcp --skill",
    ],
    instead_of_json="Its tools return the document that --json prints.",
)
@click.option(
    "--root",
    metavar="DIR",
    show_default="the client's root, or the current folder",
    help="Folder in which commands run.",
)
@click.option(
    "--skill",
    "is_skill",
    is_flag=True,
    help="Print the skill file, which teaches an agent when to use which command, and exit.",
)
def command(root: str | None, is_skill: bool) -> None:
    """Serve the commands to a coding agent as tools of the Model Context Protocol.

    The agent starts this command itself, and talks to it over standard input and output. Tools are
    run, trace, memory, audit, coverage, parity, explain, diagnose, diff, query, show and doctor.
    Those that take a target or a program execute it. Needs the package mcp: pip install
    'mcp>=2'.
    """
    folder = None if root is None else Path(root).resolve()
    if folder is not None and not folder.is_dir():
        raise ShardscopeError(f"there is no folder '{root}' for --root. Check the path.")
    if is_skill:
        from shardscope.cli.mcp_catalog import read_skill

        write_out([read_skill().encode()])
        return
    _serve(folder)


def _serve(folder: Path | None) -> None:
    try:
        import anyio

        from shardscope.cli.mcp_server import serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("anyio", "mcp", "mcp_types"):
            raise
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "mcp"
        fact = "which is not installed" if is_missing else "version 2 or newer"
        raise ShardscopeError(
            f"shardscope mcp needs the package mcp, {fact}. Install it with: pip install 'mcp>=2'."
        ) from error
    if sys.stdin is not None and sys.stdin.isatty():
        click.echo("shardscope: waiting for an agent on standard input; Ctrl-C ends.", err=True)
    anyio.run(serve, folder)
