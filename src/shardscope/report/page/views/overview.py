"""What ran, and the figures that a reader wants first."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.record import (
    MemoryProfile,
    Recording,
    count_ranks,
)
from shardscope.report.coverage import summarize_level
from shardscope.report.diagnosis import name_condition
from shardscope.report.explain import fold_explanations, summarize_explanation
from shardscope.report.heading import describe_reality, format_per_rank, name_mesh, name_ranks
from shardscope.report.holdings import sum_holdings
from shardscope.report.layout import plural
from shardscope.report.memory import describe_room, most_bytes
from shardscope.report.page.records import Fact, RunFacts
from shardscope.report.parallel import summarize_parallel, summarize_proof
from shardscope.report.parity import summarize_parity
from shardscope.report.phases import gather_phases
from shardscope.report.traffic import RankClass, add_up, tally
from shardscope.report.units import format_bytes, format_duration

__all__ = ["make_facts", "make_run"]

_MAX_TITLE = 120


def make_run(recording: Recording) -> RunFacts:
    """What ran."""
    run = recording.run
    return RunFacts(
        title=_name_page(recording),
        mesh=run.axes,
        world_size=run.world_size,
        ranks=name_ranks(run),
        reality=describe_reality(recording),
        torch_version=run.torch_version,
        shardscope_version=run.shardscope_version,
        command=run.command,
        instruments=run.instruments,
    )


def _name_page(recording: Recording) -> str:
    """`Llama on dp=128 × tp=8`."""
    what = next(filter(None, _name_subjects(recording)), "A recording")
    mesh = name_mesh(recording.run.axes)
    if not mesh and recording.run.world_size > 1:
        mesh = plural(recording.run.world_size, "rank")
    return (f"{what} on {mesh}" if mesh else what)[:_MAX_TITLE]


def _name_subjects(recording: Recording) -> Iterator[str]:
    yield from (module.type for module in recording.modules if not module.name)
    yield from (one.program for one in recording.parallel)
    yield from (one.target for one in recording.explanations)
    yield from (one.target for one in recording.diagnoses)
    yield from (layout.name for layout in recording.layouts)


def make_facts(recording: Recording, classes: tuple[RankClass, ...]) -> tuple[Fact, ...]:
    """Figures that the recording has, each with the view that has more of it."""
    return (
        *_tell_traffic(recording, classes),
        *_tell_memory(recording),
        *_tell_parameters(recording),
        *_tell_proof(recording),
        *_tell_coverage(recording),
        *_tell_compiler(recording),
        *_tell_time(recording),
    )


def _tell_traffic(recording: Recording, classes: tuple[RankClass, ...]) -> Iterator[Fact]:
    if not recording.collectives:
        if "trace" in recording.run.instruments:
            yield Fact(label="collectives per rank", value="0", note="none were issued")
        return
    sums = [add_up(map(tally, one.calls)) for one in classes]
    is_alike = len(classes) == 1
    note = "all ranks alike" if is_alike else "ranks differ; that of the busiest"
    if count_ranks(recording.run.ranks) == 1:
        note = f"of rank {recording.run.ranks[0].first}"
    yield Fact(
        label="collectives per rank",
        value=format_per_rank(sums, "count", "{:,}".format),
        note=note,
        view="communication",
    )
    yield Fact(
        label="on the wire per rank",
        value=format_per_rank(sums, "wire_bytes", format_bytes),
        note=f"if groups run rings; {format_per_rank(sums, 'input_bytes', format_bytes)} put in",
        view="communication",
    )


def _tell_memory(recording: Recording) -> Iterator[Fact]:
    if recording.memory:
        worst = max(recording.memory, key=most_bytes)
        yield Fact(
            label="peak memory of a rank",
            value=format_bytes(most_bytes(worst)),
            note=_describe_peak(worst),
            view="memory",
        )
    for found in recording.parallel:
        if found.rank_memory:
            peak = max(one.peak_bytes for one in found.rank_memory)
            note = "tensors of one step of the parallel program"
            yield Fact(label="peak of its tensors", value=format_bytes(peak), note=note)


def _describe_peak(worst: MemoryProfile) -> str:
    if worst.device_bytes is not None:
        return describe_room(worst.device_bytes, worst.needed_bytes).plain
    if worst.first_peak_bytes > worst.peak_bytes:
        return f"in the first step; {format_bytes(worst.peak_bytes)} in later ones"
    return f"in {worst.peak_phase}"


def _tell_parameters(recording: Recording) -> Iterator[Fact]:
    held = sum_holdings(recording)
    if not held.global_bytes:
        return
    copies = f", {format_bytes(held.replicated_bytes)} of it on other ranks too"
    here = f"{format_bytes(held.local_bytes)} on a rank"
    yield Fact(
        label="parameters",
        value=format_bytes(held.global_bytes),
        note=here + (copies if held.replicated_bytes else ""),
        view="sharding",
    )


def _tell_proof(recording: Recording) -> Iterator[Fact]:
    for compared in recording.parity:
        words = summarize_parity(compared).plain
        yield Fact(label="parity", value=words, note=f"on {name_mesh(compared.axes)}", view="proof")
    for found in recording.parallel:
        yield Fact(
            label="parallel program",
            value=summarize_proof(found).plain,
            note=f"on {name_mesh(found.axes)}: {summarize_parallel(found).plain}",
            view="proof",
        )


def _tell_coverage(recording: Recording) -> Iterator[Fact]:
    for covered in recording.coverage[:1]:
        summary = summarize_level(covered).plain
        value, _, rest = summary.partition(" of ")
        yield Fact(
            label=f"op calls that shard ({covered.level})",
            value=value,
            note=f"of {rest}",
            view="coverage",
        )


def _tell_compiler(recording: Recording) -> Iterator[Fact]:
    for one, _ in fold_explanations(recording.explanations):
        yield Fact(
            label=f"graphs of {one.target or 'it'}",
            value=plural(one.num_graphs, "graph"),
            note=summarize_explanation(one).plain,
            view="compiler",
        )
    for diagnosis in recording.diagnoses:
        yield Fact(
            label=f"{diagnosis.target} under {diagnosis.backend}",
            value=name_condition(diagnosis.condition),
            note=diagnosis.fact,
            view="compiler",
        )


def _tell_time(recording: Recording) -> Iterator[Fact]:
    for line in gather_phases(recording)[:1]:
        yield Fact(
            label=f"time in {line.name}",
            value=format_duration(line.slowest.total_ns),
            note=f"rank {line.slowest.rank:,}, {plural(line.slowest.count, 'time')}",
            view="communication",
        )
