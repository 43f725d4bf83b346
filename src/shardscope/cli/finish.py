"""How a verb that makes a recording ends: it prints, saves, and says where."""

from __future__ import annotations

from rich.console import RenderableType

from shardscope.cli.console import print_line, print_out
from shardscope.cli.destination import Destination
from shardscope.cli.launch import is_first
from shardscope.record import Recording

__all__ = ["finish"]


def finish(recording: Recording, destination: Destination, summary: RenderableType) -> None:
    """Print the summary and save the recording; of several processes the first speaks."""
    try:
        if is_first():
            print_out(summary)
    finally:  # what cannot be printed can still be saved, and the other way round
        saved = destination.save(recording)
    if is_first():
        print_line()
        print_line(f"recording saved to {saved}")
