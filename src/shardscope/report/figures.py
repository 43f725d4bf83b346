"""The figures that a reader wants first, for the terminal in a sentence and for a page in parts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from shardscope.record import SIMULATION_TIME, MemoryProfile, Recording, count_ranks
from shardscope.report.coverage import summarize_level
from shardscope.report.diagnosis import name_condition
from shardscope.report.explain import fold_explanations, summarize_explanation
from shardscope.report.heading import describe_scope, format_per_rank, name_holder, name_mesh
from shardscope.report.holdings import sum_holdings
from shardscope.report.layout import plural
from shardscope.report.memory import ESTIMATE, describe_room, find_worst, most_bytes
from shardscope.report.parallel import summarize_parallel, summarize_proof
from shardscope.report.parity import summarize_parity
from shardscope.report.phases import gather_phases
from shardscope.report.traffic import RankClass, add_up, tally
from shardscope.report.units import format_bytes, format_duration

__all__ = ["Card", "Figure", "list_figures"]


class Card(Struct, frozen=True, kw_only=True):
    """A figure in parts, where there is room to set one off from the other."""

    label: str
    value: str
    note: str = ""


class Figure(Struct, frozen=True):
    """The most important thing that a view shows, in a sentence and on cards.

    `view` is where it leads, and empty where none has more of it.
    """

    view: str
    words: str
    cards: tuple[Card, ...] = ()


def list_figures(recording: Recording, classes: tuple[RankClass, ...]) -> tuple[Figure, ...]:
    """Those that the recording has."""
    return (
        *_tell_traffic(recording, classes),
        *_tell_memory(recording),
        *_tell_modules(recording),
        *_tell_parameters(recording),
        *_tell_proof(recording),
        *_tell_coverage(recording),
        *_tell_compiler(recording),
        *_tell_time(recording),
    )


def _tell_traffic(recording: Recording, classes: tuple[RankClass, ...]) -> Iterator[Figure]:
    if not recording.collectives:
        is_lossy = any(gap.is_loss for gap in recording.gaps)
        if "trace" in recording.run.instruments and not is_lossy:
            scope = describe_scope(recording)
            card = Card(label="collectives per rank", value="0", note=_join("none issued", scope))
            yield Figure("", "no collectives were issued", (card,))
        return
    sums = [add_up(map(tally, one.calls)) for one in classes]
    count = format_per_rank(sums, "count", "{:,}".format)
    sent = format_per_rank(sums, "wire_bytes", format_bytes)
    inputs = format_per_rank(sums, "input_bytes", format_bytes)
    noun = "collective" if max(one.count for one in sums) == 1 else "collectives"
    scope = describe_scope(recording)
    notes = (_note_ranks(recording, classes), f"ring estimate; {inputs} input")
    cards = (
        Card(label="collectives per rank", value=count, note=_join(notes[0], scope)),
        Card(label="sent per rank", value=sent, note=_join(notes[1], scope)),
    )
    words = f"{count} {noun} per rank, {sent} sent (ring estimate)"
    yield Figure("communication", f"{words}; {scope}" if scope else words, cards)


def _note_ranks(recording: Recording, classes: tuple[RankClass, ...]) -> str:
    if count_ranks(recording.run.ranks) == 1:
        return ""
    return "all ranks identical" if len(classes) == 1 else "ranks differ; that of the busiest"


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _tell_memory(recording: Recording) -> Iterator[Figure]:
    if recording.memory:
        worst = find_worst(recording.memory)
        most = format_bytes(most_bytes(worst))
        where = "the first step" if _is_first_worst(worst) else str(worst.peak_phase)
        note = _join(_describe_peak(worst), f"rank {worst.rank:,}", ESTIMATE)
        card = Card(label="peak memory of a rank", value=most, note=note)
        words = f"{most} at the peak, in {where}, on rank {worst.rank:,} ({ESTIMATE})"
        yield Figure("memory", words, (card,))
    for found in recording.parallel:
        if found.rank_memory:
            peak = format_bytes(max(one.peak_bytes for one in found.rank_memory))
            note = "tensors of one step of the parallel program, counted without running it"
            card = Card(label="peak of its tensors", value=peak, note=note)
            yield Figure("", f"{peak} at the peak, {note}", (card,))


def _is_first_worst(worst: MemoryProfile) -> bool:
    return (worst.first_peak_bytes or 0) > worst.peak_bytes


def _describe_peak(worst: MemoryProfile) -> str:
    if worst.device_bytes is not None:
        return describe_room(worst.device_bytes, worst.needed_bytes).plain
    if _is_first_worst(worst):
        return f"in the first step; {format_bytes(worst.peak_bytes)} in later ones"
    return f"in {worst.peak_phase}"


def _tell_modules(recording: Recording) -> Iterator[Figure]:
    """No card: a page has modules that others only mention as well, and counts them itself."""
    if recording.modules:
        yield Figure("modules", plural(len({one.name for one in recording.modules}), "module"))


def _tell_parameters(recording: Recording) -> Iterator[Figure]:
    held = sum_holdings(recording)
    if held is None or held.global_bytes is None or held.local_bytes is None:
        return
    if not held.num_parameters:
        return
    whole = format_bytes(held.global_bytes)
    here = f"{format_bytes(held.local_bytes)} on {name_holder(recording.run)}"
    if held.replicated_bytes:
        here += f", {format_bytes(held.replicated_bytes)} of it replicated"
    words = f"{plural(held.num_parameters, 'parameter')}, {whole} in all, {here}"
    yield Figure("sharding", words, (Card(label="parameters", value=whole, note=here),))


def _tell_proof(recording: Recording) -> Iterator[Figure]:
    for compared in recording.parity:
        place = f"on {name_mesh(compared.axes)}"
        verdict = summarize_parity(compared, recording.findings).plain
        yield Figure("proof", f"{place}: {verdict}", (_set_off("parity", verdict, place),))
    for found in recording.parallel:
        proof = summarize_proof(found).plain
        made = f"on {name_mesh(found.axes)}: {summarize_parallel(found).plain}"
        card = _set_off("parallel program", proof, made)
        yield Figure("proof", f"{made}. {proof}", (card,))


def _set_off(label: str, verdict: str, where: str) -> Card:
    """A verdict without what it says in brackets, or after a colon: that is for the note."""
    value = re.split(r" \(|: ", verdict, maxsplit=1)[0].rstrip(".")
    return Card(label=label, value=value, note=where + verdict.removeprefix(value).rstrip("."))


def _tell_coverage(recording: Recording) -> Iterator[Figure]:
    for covered in recording.coverage[:1]:
        summary = summarize_level(covered).plain
        value, _, rest = summary.partition(" of ")
        label = f"op calls that shard ({covered.level})"
        is_share = value.endswith("%")
        card = Card(
            label=label,
            value=value if is_share else "no ops to test",
            note=f"of {rest}" if is_share else summary,
        )
        yield Figure("coverage", f"{covered.level}: {summary}", (card,))


def _tell_compiler(recording: Recording) -> Iterator[Figure]:
    for one, _ in fold_explanations(recording.explanations):
        name, summary = one.target or "it", summarize_explanation(one).plain
        value = plural(one.num_graphs, "graph")
        card = Card(label=f"graphs of {name}", value=value, note=summary)
        yield Figure("compiler", f"{name}: {summary}", (card,))
    for diagnosis in recording.diagnoses:
        name = f"{diagnosis.target} under {diagnosis.backend}"
        condition = name_condition(diagnosis.condition)
        card = Card(label=name, value=condition, note=diagnosis.fact)
        yield Figure("compiler", f"{name}: {condition}", (card,))


def _tell_time(recording: Recording) -> Iterator[Figure]:
    for line in gather_phases(recording)[:1]:
        slowest = line.slowest
        took = format_duration(slowest.total_ns)
        note = f"rank {slowest.rank:,}, {plural(slowest.count, 'time')}"
        if recording.run.is_simulated:
            note += f"; {SIMULATION_TIME}"
        card = Card(label=f"time in {line.name}", value=took, note=note)
        yield Figure("communication", f"{took} in {line.name}, {note}", (card,))
