"""`show(result)`: what an instrument found, printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType

from shardscope.record import TensorLayout
from shardscope.report.compare.changes import Changes
from shardscope.report.compare.text import render_changes
from shardscope.report.result import read_recording
from shardscope.report.slices import render_layout
from shardscope.report.text import View, render_summary

__all__ = ["show"]


def show(result: Any, *, by: View = "module", is_folded: bool = True) -> None:
    """Print a recording, a trace, an audit, a tensor's layout, a parallel program or a diff.

    As `shardscope show` would.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_render(result, by=by, is_folded=is_folded))


def _render(result: Any, *, by: View, is_folded: bool) -> RenderableType:
    if isinstance(result, TensorLayout):
        return Group(*render_layout(result, is_complete=not is_folded))
    if isinstance(result, Changes):
        return render_changes(result, is_complete=not is_folded)
    recording = read_recording(result, asked_by="show")
    return render_summary(recording, by=by, is_folded=is_folded)
