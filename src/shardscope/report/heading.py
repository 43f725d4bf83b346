"""What ran: the first lines of a summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardscope.record import Axis, Recording, RunInfo, count_ranks, format_ranks
from shardscope.report.layout import make_text, plural
from shardscope.report.names import make_inert
from shardscope.report.traffic import RankClass, Tally, add_up, tally
from shardscope.report.units import Spread, format_bytes, format_spread

__all__ = [
    "describe_passes",
    "describe_reality",
    "describe_scope",
    "describe_traffic",
    "describe_world",
    "format_per_rank",
    "list_run_facts",
    "name_holder",
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
        lines.append(describe_traffic(recording, classes))
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


def name_holder(run: RunInfo) -> str:
    """Whose a figure of one rank is: `rank 0` where only that was recorded, else `a rank`."""
    is_alone = count_ranks(run.ranks) == 1 and run.world_size > 1
    return f"rank {run.ranks[0].first:,}" if is_alone else "a rank"


def describe_reality(recording: Recording) -> str:
    """Whether the ranks were simulated, and for which device: `simulated (cuda)`."""
    if recording.run.is_simulated:
        device = recording.run.device_type
        return f"simulated ({make_inert(device)})" if device else "simulated"
    # A world of one may have no process group at all; one that spoke has one.
    is_alone = recording.run.world_size == 1 and not recording.groups
    return "one process" if is_alone else "real process group"


def describe_passes(recording: Recording) -> str:
    """`over 2 forward passes`; nothing of one, or where they were not counted."""
    num_forwards = recording.run.num_forwards
    return "" if num_forwards in (None, 1) else f"over {num_forwards:,} forward passes"


def describe_scope(recording: Recording) -> str:
    """What to know of every figure of collectives: what it is of, and what it leaves out."""
    run = recording.run
    facts = [
        name_ranks(run) if count_ranks(run.ranks) < run.world_size else "",
        "simulated" if run.is_simulated else "",
        *_list_extent(recording),
    ]
    return ", ".join(filter(None, facts))


def _list_extent(recording: Recording) -> list[str]:
    """The part of the scope that the line about the world does not have."""
    is_lossy = any(gap.is_loss for gap in recording.gaps)
    return [describe_passes(recording), "incomplete: records were lost" if is_lossy else ""]


def describe_traffic(recording: Recording, classes: tuple[RankClass, ...]) -> Text:
    """`428 collectives per rank · 12.9 GiB input · 21.4 GiB sent (ring estimate)`."""
    sums = [add_up(tally(call) for call in one.calls) for one in classes]
    noun = "collective" if max(one.count for one in sums) == 1 else "collectives"
    figures = [
        (format_per_rank(sums, "count", "{:,}".format), f" {noun} per rank"),
        (format_per_rank(sums, "input_bytes", format_bytes), " input"),
        (format_per_rank(sums, "wire_bytes", format_bytes), " sent (ring estimate)"),
    ]
    line = Text(" · ").join(Text.assemble((figure, "bold"), words) for figure, words in figures)
    if len(classes) > 1:
        line.append(" · ranks differ (≤: the busiest)", "dim")
    elif count_ranks(classes[0].ranks) > 1:
        line.append(" · all ranks identical", "dim")
    for fact in filter(None, _list_extent(recording)):
        line.append(f" · {fact}", "dim")
    return line


def format_per_rank(sums: Sequence[Tally], field: str, form: Callable[[int], str]) -> str:
    """A figure over all ranks, also those that said nothing: `per rank` would not be true of them.

    `sums` has one for each class of ranks.
    """
    values = [getattr(one, field) for one in sums] or [0]
    return format_spread(Spread(min(values), max(values)), form)
