"""`shardscope show`: print a recording, or several ranks' recordings as one."""

from __future__ import annotations

import click
from rich.console import RenderableType

from shardscope.cli.console import exit_code, print_out, show_progress
from shardscope.cli.json_result import add_recording, current_json
from shardscope.cli.loading import choose_modules, load_reviewed
from shardscope.cli.shared_options import by_option, no_fold_option
from shardscope.cli.verb import Verb
from shardscope.cli.verdict_options import add_expectations, verdict_options
from shardscope.record import Recording
from shardscope.report.text.summary import View, render_summary
from shardscope.report.text.views import VIEW_NAMES, render_views

_ALL = "all"
_OLD_NAMES = ("proof",)  # of correctness


@click.command(
    "show",
    cls=Verb,
    examples=[
        "shardscope show run.json.gz",
        "shardscope show run-*.json.gz --view communication --view memory",
        "shardscope show run.json.gz --module 'layers.*.attention' --by cause",
        "shardscope show run.json.gz --contract shardscope.toml",
    ],
    fails_if="With --strict: a finding is a warning or an error, or there is a gap.",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--view",
    "views",
    type=click.Choice([*VIEW_NAMES, _ALL, *_OLD_NAMES]),
    metavar="VIEW",
    multiple=True,
    show_default="a summary of all",
    help=f"View to show; may be repeated: {', '.join(VIEW_NAMES)} or {_ALL}.",
)
@click.option(
    "--module",
    "pattern",
    metavar="PATTERN",
    help="Show only modules that match, such as 'layers.*.attention' or '**.attention', and their "
    "children.",
)
@by_option
@verdict_options
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 if a finding is a warning or an error, or if there is a gap.",
)
@no_fold_option
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    views: tuple[str, ...],
    pattern: str | None,
    by: View,
    contract_path: str | None,
    ranks_per_node: int | None,
    strict: bool,
    no_fold: bool,
) -> None:
    """Print a recording; several FILEs are shown as one run."""
    with show_progress("showing") as report:
        recording = load_reviewed(files, report)
        recording = add_expectations(recording, contract_path, ranks_per_node)
        shown = recording if pattern is None else choose_modules(recording, pattern)
        report("adding up")
        add_recording(shown, files)
        if current_json() is None:
            print_out(_render(shown, recording, views, by=by, is_folded=not no_fold))
    ctx.exit(exit_code(recording, is_strict=True) if strict else 0)


def _render(
    recording: Recording,
    full_recording: Recording,
    views: tuple[str, ...],
    *,
    by: View,
    is_folded: bool,
) -> RenderableType:
    if not views:
        return render_summary(recording, by=by, is_folded=is_folded, full_recording=full_recording)
    view_names = [
        view_name
        for name, view_name in VIEW_NAMES.items()
        if _ALL in views or name in views or view_name in views
    ]
    return render_views(
        recording, view_names, by=by, is_folded=is_folded, full_recording=full_recording
    )
