"""What ran: the first lines of a summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardscope.record import Axis, Recording, RunInfo, count_ranks, format_ranks
from shardscope.report.layout import make_text, plural
from shardscope.report.traffic import RankClass, Tally, add_up, tally
from shardscope.report.units import Spread, format_bytes, format_spread

__all__ = [
    "describe_reality",
    "describe_traffic",
    "describe_world",
    "format_per_rank",
    "list_run_facts",
    "name_mesh",
    "name_ranks",
    "render_heading",
]


def render_heading(recording: Recording, classes: tuple[RankClass, ...]) -> RenderableType:
    """World, mesh, ranks, versions, and how much was said in all."""
    lines = [describe_world(recording)]
    if recording.run.command:
        lines.append(make_text(recording.run.command, "dim", width=160))
    if recording.collectives:
        lines.append(describe_traffic(classes))
    return Group(*lines)


def list_run_facts(recording: Recording) -> list[str]:
    """The mesh, which ranks are here, whether they are real, and torch's version."""
    run = recording.run
    facts = [
        name_mesh(run.axes),
        name_ranks(run),
        describe_reality(recording),
        f"torch {run.torch_version}",
    ]
    return list(filter(None, facts))


def describe_world(recording: Recording) -> Text:
    """The same in one line."""
    line = Text("shardscope", "bold cyan")
    for fact in list_run_facts(recording):
        line.append(" · ", "dim").append_text(make_text(fact, width=120))
    return line


def name_mesh(axes: Sequence[Axis]) -> str:
    """`dp=128 × tp=8`."""
    return " × ".join(f"{axis.name}={axis.size:,}" for axis in axes)


def name_ranks(run: RunInfo) -> str:
    """`all 1,024 ranks`, or which of how many."""
    num_ranks = count_ranks(run.ranks)
    if num_ranks == run.world_size:
        return f"all {plural(num_ranks, 'rank')}" if num_ranks > 1 else "1 rank"
    word = "rank" if num_ranks == 1 else "ranks"
    return f"{word} {format_ranks(run.ranks) or 'none'} of {run.world_size:,}"


def describe_reality(recording: Recording) -> str:
    """Whether there were such ranks."""
    if recording.run.is_simulated:
        return "simulated"
    # A world of one may have no process group at all; one that spoke has one.
    is_alone = recording.run.world_size == 1 and not recording.groups
    return "one process" if is_alone else "real process group"


def describe_traffic(classes: tuple[RankClass, ...]) -> Text:
    """How much a rank said."""
    sums = [add_up(tally(call) for call in one.calls) for one in classes]
    line = Text()
    noun = "collective" if max(one.count for one in sums) == 1 else "collectives"
    line.append(format_per_rank(sums, "count", "{:,}".format), "bold").append(f" {noun} per rank, ")
    line.append(format_per_rank(sums, "input_bytes", format_bytes), "bold").append(" put in, ")
    line.append(format_per_rank(sums, "wire_bytes", format_bytes), "bold").append(
        " on the wire (rings)"
    )
    if len(classes) > 1:
        line.append("; ranks differ (≤: the busiest)", "dim")
    elif count_ranks(classes[0].ranks) > 1:
        line.append("; all ranks alike", "dim")
    return line


def format_per_rank(sums: Sequence[Tally], field: str, form: Callable[[int], str]) -> str:
    """A figure over all ranks, also those that said nothing: `per rank` would not be true of them.

    `sums` has one for each class of ranks.
    """
    values = [getattr(one, field) for one in sums] or [0]
    return format_spread(Spread(min(values), max(values)), form)
