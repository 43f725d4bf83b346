"""What ran: the first lines of a summary."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from shardscope.record import Recording, count_ranks, format_ranks
from shardscope.report.layout import make_text, plural
from shardscope.report.traffic import RankClass, Tally, add_up, tally
from shardscope.report.units import Spread, format_bytes, format_spread

__all__ = ["describe_world", "render_heading"]


def render_heading(recording: Recording, classes: tuple[RankClass, ...]) -> RenderableType:
    """World, mesh, ranks, versions, and how much was said in all."""
    lines = [describe_world(recording)]
    if recording.run.command:
        lines.append(make_text(recording.run.command, "dim", width=160))
    if recording.collectives:
        lines.append(_describe_traffic(classes))
    return Group(*lines)


def describe_world(recording: Recording) -> Text:
    """Mesh, ranks and versions in one line."""
    run = recording.run
    mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in run.axes)
    num_ranks = count_ranks(run.ranks)
    if num_ranks == run.world_size:
        ranks = f"all {plural(num_ranks, 'rank')}" if num_ranks > 1 else "1 rank"
    else:
        word = "rank" if num_ranks == 1 else "ranks"
        ranks = f"{word} {format_ranks(run.ranks) or 'none'} of {run.world_size:,}"
    facts = [
        mesh,
        ranks,
        _describe_reality(recording),
        f"torch {run.torch_version}",
    ]
    line = Text("shardscope", "bold cyan")
    for fact in filter(None, facts):
        line.append(" · ", "dim").append_text(make_text(fact, width=120))
    return line


def _describe_reality(recording: Recording) -> str:
    if recording.run.is_simulated:
        return "simulated"
    # A world of one may have no process group at all; one that spoke has one.
    is_alone = recording.run.world_size == 1 and not recording.groups
    return "one process" if is_alone else "real process group"


def _describe_traffic(classes: tuple[RankClass, ...]) -> Text:
    sums = [add_up(tally(call) for call in one.calls) for one in classes]
    line = Text()
    noun = "collective" if max(one.count for one in sums) == 1 else "collectives"
    line.append(_spread(sums, "count", "{:,}".format), "bold").append(f" {noun} per rank, ")
    line.append(_spread(sums, "input_bytes", format_bytes), "bold").append(" put in, ")
    line.append(_spread(sums, "wire_bytes", format_bytes), "bold").append(" on the wire (rings)")
    if len(classes) > 1:
        line.append("; ranks differ (≤: the busiest)", "dim")
    elif count_ranks(classes[0].ranks) > 1:
        line.append("; all ranks alike", "dim")
    return line


def _spread(sums: list[Tally], field: str, form: Callable[[int], str]) -> str:
    # Over all ranks, also those that said nothing: `per rank` would not be true of them.
    values = [getattr(one, field) for one in sums]
    return format_spread(Spread(min(values), max(values)), form)
