"""How a verb that makes a recording ends: it prints, saves, and says where."""

from __future__ import annotations

from rich.console import RenderableType

from shardscope.cli.console import print_line, print_out, show_progress
from shardscope.cli.destination import Destination
from shardscope.cli.launch import is_first
from shardscope.record import Recording, save

__all__ = ["finish", "save_if_asked"]


def finish(recording: Recording, destination: Destination, summary: RenderableType) -> None:
    """Print the summary and save the recording; of several processes the first speaks."""
    try:
        if is_first():
            print_out(summary)
    finally:  # what cannot be printed can still be saved, and the other way round
        with show_progress("saving the recording", is_shown=is_first()):
            saved = destination.save(recording)
    if is_first():
        print_line()
        print_line(f"recording saved to {saved}")


def save_if_asked(recording: Recording, output: str | None, *, force: bool) -> None:
    """Save the recording where the user said, if anywhere, and say so."""
    if output is None:
        return
    with show_progress(f"writing {output}"):
        saved = save(recording, output, force=force)
    print_line()
    print_line(f"recording saved to {saved}")
