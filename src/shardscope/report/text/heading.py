"""The first lines of a summary: what ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardscope.record import Axis, Recording, RunInfo, count_ranks, format_ranks
from shardscope.record.text import sanitize_text
from shardscope.record.traffic import (
    TrafficTotals,
    count_traffic,
    sum_traffic,
)
from shardscope.record.units import format_bytes, plural
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    Spread,
    format_spread,
)
from shardscope.report.text.style import make_text


def render_heading(recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> RenderableType:
    """Render world, mesh, ranks, versions and the total traffic."""
    lines = [describe_world(recording)]
    if recording.run.command:
        lines.append(make_text(recording.run.command, "dim", width=160))
    if recording.collectives:
        lines.append(describe_traffic(recording, rank_sets))
    return Group(*lines)


def list_run_facts(recording: Recording) -> list[str]:
    """List the mesh, the recorded ranks, whether they are simulated, and torch's version."""
    run = recording.run
    facts = [
        name_mesh(run.axes),
        name_ranks(run),
        describe_reality(recording),
        f"torch {run.torch_version}" if run.torch_version else "",
    ]
    return list(filter(None, facts))


def describe_world(recording: Recording) -> Text:
    """Join the facts of the run on one line."""
    line = Text("shardscope", "bold cyan")
    for fact in list_run_facts(recording):
        line.append(" · ", "dim").append_text(make_text(fact, width=120))
    return line


def name_mesh(axes: Sequence[Axis]) -> str:
    """`dp=128 × tp=8`."""
    return " × ".join(f"{axis.name}={axis.size:,}" for axis in axes)


def name_ranks(run: RunInfo) -> str:
    """Name the recorded ranks: `all 1,024 ranks`, or which of how many."""
    num_ranks = count_ranks(run.ranks)
    if num_ranks == run.world_size:
        return f"all {plural(num_ranks, 'rank')}" if num_ranks > 1 else "1 rank"
    word = "rank" if num_ranks == 1 else "ranks"
    return f"{word} {format_ranks(run.ranks) or 'none'} of {run.world_size:,}"


def name_holder(run: RunInfo) -> str:
    """Name the rank of per-rank values: `rank 0` if only that was recorded, else `a rank`."""
    is_alone = count_ranks(run.ranks) == 1 and run.world_size > 1
    return f"rank {run.ranks[0].first:,}" if is_alone else "a rank"


def describe_reality(recording: Recording) -> str:
    """Whether the ranks were simulated, and for which device: `simulated (cuda)`."""
    if recording.run.is_simulated:
        device = recording.run.device_type
        return f"simulated ({sanitize_text(device)})" if device else "simulated"
    # A single rank may have no process group, unless it issued collectives.
    is_alone = recording.run.world_size == 1 and not recording.groups
    return "one process" if is_alone else "real process group"


def describe_passes(recording: Recording) -> str:
    """Return `over 2 forward passes`; empty for one pass, or if passes were not counted."""
    num_forwards = recording.run.num_forwards
    return "" if num_forwards in (None, 1) else f"over {num_forwards:,} forward passes"


def describe_scope(recording: Recording) -> str:
    """Describe the scope of all values on collectives: ranks, passes, simulation."""
    run = recording.run
    facts = [
        name_ranks(run) if count_ranks(run.ranks) < run.world_size else "",
        "simulated" if run.is_simulated else "",
        *_list_extent(recording),
    ]
    return ", ".join(filter(None, facts))


def _list_extent(recording: Recording) -> list[str]:
    """List the parts of the scope that the line on the world does not contain."""
    is_lossy = any(gap.is_loss for gap in recording.gaps)
    return [describe_passes(recording), "incomplete: records were lost" if is_lossy else ""]


def describe_traffic(recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> Text:
    """`428 collectives per rank · 12.9 GiB input · 21.4 GiB sent (ring estimate)`."""
    sums = [sum_traffic(count_traffic(call) for call in rank_set.calls) for rank_set in rank_sets]
    noun = "collective" if max(totals.count for totals in sums) == 1 else "collectives"
    metrics = [
        (format_per_rank(sums, "count", "{:,}".format), f" {noun} per rank"),
        (format_per_rank(sums, "input_bytes", format_bytes), " input"),
        (format_per_rank(sums, "wire_bytes", format_bytes), " sent (ring estimate)"),
    ]
    line = Text(" · ").join(Text.assemble((value, "bold"), words) for value, words in metrics)
    if len(rank_sets) > 1:
        line.append(" · ranks differ (≤: the busiest)", "dim")
    elif count_ranks(rank_sets[0].ranks) > 1:
        line.append(" · all ranks identical", "dim")
    for fact in filter(None, _list_extent(recording)):
        line.append(f" · {fact}", "dim")
    return line


def format_per_rank(sums: Sequence[TrafficTotals], field: str, form: Callable[[int], str]) -> str:
    """Format a value over all ranks, including those that issued no collectives.

    `sums` has the totals of each set of identical ranks.
    """
    values = [getattr(totals, field) for totals in sums] or [0]
    return format_spread(Spread(min(values), max(values)), form)
