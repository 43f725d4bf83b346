"""`show(result)`: what an instrument found, printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType

from shardscope.record import Recording, TensorLayout
from shardscope.report.slices import render_layout
from shardscope.report.text import View, render_summary

__all__ = ["show"]


def show(result: Any, *, by: View = "module", is_folded: bool = True) -> None:
    """Print a recording, a trace, an audit, a tensor's layout or a parallel program.

    As `shardscope show` would.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_render(result, by=by, is_folded=is_folded))


def _render(result: Any, *, by: View, is_folded: bool) -> RenderableType:
    if isinstance(result, TensorLayout):
        return Group(*render_layout(result, is_complete=not is_folded))
    recording = result if isinstance(result, Recording) else getattr(result, "recording", None)
    if callable(recording):
        recording = recording()
    if not isinstance(recording, Recording):
        raise TypeError(
            f"show() got {type(result).__name__}. Give it a recording, or what trace(), audit(), "
            "visualize_sharding() or parallelize() gives."
        )
    return render_summary(recording, by=by, is_folded=is_folded)
