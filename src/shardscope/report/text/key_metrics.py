"""Key metrics of a recording: as a sentence for the terminal, and in parts for the HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from shardscope.record import SIMULATION_TIME, MemoryProfile, Recording, count_ranks
from shardscope.record.traffic import (
    count_traffic,
    sum_traffic,
)
from shardscope.record.units import format_bytes, format_duration, plural
from shardscope.report.model.holdings import sum_holdings
from shardscope.report.model.memory_peaks import (
    find_worst,
    most_bytes,
)
from shardscope.report.model.traffic_totals import IdenticalRanks
from shardscope.report.text.checked_ranks import describe_ranks, summarize_check
from shardscope.report.text.compiler import fold_explanations, name_condition, summarize_explanation
from shardscope.report.text.correctness import summarize_parallel, summarize_parity, summarize_proof
from shardscope.report.text.heading import describe_scope, format_per_rank, name_holder, name_mesh
from shardscope.report.text.memory_profile import (
    describe_basis,
    describe_room,
)
from shardscope.report.text.op_coverage import summarize_level
from shardscope.report.text.phase_times import gather_phases


class MetricCard(Struct, frozen=True, kw_only=True):
    """A metric with label, value and note as separate texts."""

    label: str
    value: str
    note: str = ""
    measure: str = ""  # the sum of collectives that it is, if it is one: count or wire_bytes


class KeyMetric(Struct, frozen=True):
    """The most important metric of a view, as a sentence and as cards.

    `view` is the view with details, empty if there is none.
    """

    view: str
    words: str
    cards: tuple[MetricCard, ...] = ()


def list_key_metrics(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> tuple[KeyMetric, ...]:
    """List the metrics that the recording has."""
    return (
        *_list_traffic_metrics(recording, rank_sets),
        *_list_memory_metrics(recording),
        *_list_module_metrics(recording),
        *_list_parameter_metrics(recording),
        *_list_proof_metrics(recording),
        *_list_coverage_metrics(recording),
        *_list_compiler_metrics(recording),
        *_list_time_metrics(recording),
    )


def _list_traffic_metrics(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> Iterator[KeyMetric]:
    if not recording.collectives:
        is_lossy = any(gap.is_loss for gap in recording.gaps)
        if "trace" in recording.run.instruments and not is_lossy:
            scope = describe_scope(recording)
            card = MetricCard(
                label="collectives per rank", value="0", note=_join("none issued", scope)
            )
            yield KeyMetric("", "no collectives were issued", (card,))
        return
    sums = [sum_traffic(map(count_traffic, rank_set.calls)) for rank_set in rank_sets]
    count = format_per_rank(sums, "count", "{:,}".format)
    sent = format_per_rank(sums, "wire_bytes", format_bytes)
    inputs = format_per_rank(sums, "input_bytes", format_bytes)
    noun = "collective" if max(totals.count for totals in sums) == 1 else "collectives"
    scope = describe_scope(recording)
    notes = (_note_ranks(recording, rank_sets), f"ring estimate; {inputs} input")
    cards = (
        MetricCard(
            label="collectives per rank",
            value=count,
            note=_join(notes[0], scope),
            measure="count",
        ),
        MetricCard(
            label="sent per rank",
            value=sent,
            note=_join(notes[1], scope),
            measure="wire_bytes",
        ),
    )
    words = f"{count} {noun} per rank, {sent} sent (ring estimate)"
    yield KeyMetric("communication", f"{words}; {scope}" if scope else words, cards)


def _note_ranks(recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> str:
    if count_ranks(recording.run.ranks) == 1:
        return ""
    return "all ranks identical" if len(rank_sets) == 1 else "ranks differ; that of the busiest"


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _list_memory_metrics(recording: Recording) -> Iterator[KeyMetric]:
    if recording.memory:
        worst = find_worst(recording.memory)
        most = format_bytes(most_bytes(worst))
        moment = "the first step" if _is_first_worst(worst) else str(worst.peak_phase)
        note = _join(_describe_peak(worst), f"rank {worst.rank:,}", describe_basis(worst))
        card = MetricCard(label="peak memory of a rank", value=most, note=note)
        words = f"{most} at the peak, in {moment}, on rank {worst.rank:,} ({describe_basis(worst)})"
        yield KeyMetric("memory", words, (card,))
    for program in recording.parallel:
        if program.rank_memory:
            peak = format_bytes(max(memory.peak_bytes for memory in program.rank_memory))
            note = "tensors of one step of the parallel program, counted without running it"
            card = MetricCard(label="peak of its tensors", value=peak, note=note)
            yield KeyMetric("", f"{peak} at the peak, {note}", (card,))


def _is_first_worst(worst: MemoryProfile) -> bool:
    return (worst.first_peak_bytes or 0) > worst.peak_bytes


def _describe_peak(worst: MemoryProfile) -> str:
    if worst.device_bytes is not None:
        return describe_room(worst.device_bytes, worst.needed_bytes).plain
    if _is_first_worst(worst):
        return f"in the first step; {format_bytes(worst.peak_bytes)} in later ones"
    return f"in {worst.peak_phase}"


def _list_module_metrics(recording: Recording) -> Iterator[KeyMetric]:
    """Yield the number of modules, without a card: the page infers modules and counts its own."""
    if recording.modules:
        yield KeyMetric(
            "modules", plural(len({module.name for module in recording.modules}), "module")
        )


def _list_parameter_metrics(recording: Recording) -> Iterator[KeyMetric]:
    holdings = sum_holdings(recording)
    if holdings is None or holdings.global_bytes is None or holdings.local_bytes is None:
        return
    if not holdings.num_parameters:
        return
    global_bytes = format_bytes(holdings.global_bytes)
    here = f"{format_bytes(holdings.local_bytes)} on {name_holder(recording.run)}"
    if holdings.replicated_bytes:
        here += f", {format_bytes(holdings.replicated_bytes)} of it replicated"
    words = f"{plural(holdings.num_parameters, 'parameter')}, {global_bytes} in all, {here}"
    yield KeyMetric(
        "sharding", words, (MetricCard(label="parameters", value=global_bytes, note=here),)
    )


def _list_proof_metrics(recording: Recording) -> Iterator[KeyMetric]:
    for compared in recording.parity:
        mesh_name = f"on {name_mesh(compared.axes)}"
        verdict = summarize_parity(compared, recording.findings).plain
        yield KeyMetric(
            "proof", f"{mesh_name}: {verdict}", (_make_verdict_card("parity", verdict, mesh_name),)
        )
    for program in recording.parallel:
        proof = summarize_proof(program).plain
        summary = f"on {name_mesh(program.axes)}: {summarize_parallel(program).plain}"
        card = _make_verdict_card("parallel program", proof, summary)
        yield KeyMetric("proof", f"{summary}. {proof}", (card,))
    for check in recording.checks:
        summary, ranks = summarize_check(check).rstrip("."), describe_ranks(check)
        card = MetricCard(label="ranks before launch", value=summary, note=ranks)
        yield KeyMetric("proof", f"{ranks}. {summary}", (card,))


def _make_verdict_card(label: str, verdict: str, detail: str) -> MetricCard:
    """Make a card; what the verdict has in parentheses or after a colon moves to the note."""
    value = re.split(r" \(|: ", verdict, maxsplit=1)[0].rstrip(".")
    return MetricCard(
        label=label, value=value, note=detail + verdict.removeprefix(value).rstrip(".")
    )


def _list_coverage_metrics(recording: Recording) -> Iterator[KeyMetric]:
    for covered in recording.coverage[:1]:
        summary = summarize_level(covered).plain
        value, _, rest = summary.partition(" of ")
        label = f"op calls that shard ({covered.level})"
        is_share = value.endswith("%")
        card = MetricCard(
            label=label,
            value=value if is_share else "no ops to test",
            note=f"of {rest}" if is_share else summary,
        )
        yield KeyMetric("coverage", f"{covered.level}: {summary}", (card,))


def _list_compiler_metrics(recording: Recording) -> Iterator[KeyMetric]:
    for explanation, _ in fold_explanations(recording.explanations):
        name, summary = explanation.target or "it", summarize_explanation(explanation).plain
        value = plural(explanation.num_graphs, "graph")
        card = MetricCard(label=f"graphs of {name}", value=value, note=summary)
        yield KeyMetric("compiler", f"{name}: {summary}", (card,))
    for diagnosis in recording.diagnoses:
        name = f"{diagnosis.target} under {diagnosis.backend}"
        condition = name_condition(diagnosis.condition)
        card = MetricCard(label=name, value=condition, note=diagnosis.fact)
        yield KeyMetric("compiler", f"{name}: {condition}", (card,))


def _list_time_metrics(recording: Recording) -> Iterator[KeyMetric]:
    for line in gather_phases(recording)[:1]:
        slowest = line.slowest
        took = format_duration(slowest.total_ns)
        note = f"rank {slowest.rank:,}, {plural(slowest.count, 'time')}"
        if recording.run.is_simulated:
            note += f"; {SIMULATION_TIME}"
        card = MetricCard(label=f"time in {line.name}", value=took, note=note)
        yield KeyMetric("communication", f"{took} in {line.name}, {note}", (card,))
