"""Options that several verbs share."""

from __future__ import annotations

from typing import get_args

import click

from shardscope.report.text import View

__all__ = ["by_option", "force_option", "strict_option"]

by_option = click.option(
    "--by",
    type=click.Choice(list(get_args(View))),
    default="module",
    show_default=True,
    help="What to sort collectives by.",
)
strict_option = click.option(
    "--strict", is_flag=True, help="Exit with 1 if the recording has gaps."
)
force_option = click.option("--force", is_flag=True, help="Overwrite OUT.")
