"""What was found out, in figures: one line for each view that has something to show."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from rich.console import RenderableType

from shardscope.record import FINE, Recording, Verdict
from shardscope.report.grid import Column, Grid, Look, Row, leave_out
from shardscope.report.layout import format_share, make_text, make_title, plural
from shardscope.report.memory import find_worst
from shardscope.report.traffic import RankClass, add_up, tally
from shardscope.report.units import format_bytes

__all__ = ["Figure", "list_figures", "render_figures"]

_COVERED = (Verdict.SHARDED, Verdict.DECOMPOSED, Verdict.REDISTRIBUTED)
_COLUMNS = {
    "view": Column("view", Look.NAME, 13),
    "figure": Column("figure", Look.PROSE, 20),
}


class Figure(Struct, frozen=True):
    """The most important thing that a view shows, and its name."""

    view: str
    words: str


def render_figures(
    recording: Recording, classes: tuple[RankClass, ...]
) -> Iterator[RenderableType]:
    """A row for each figure; nothing if there is none."""
    figures = list(list_figures(recording, classes))
    if not figures:
        return
    yield make_title("Figures", "--view NAME shows more")
    rows: list[Row] = [{"view": one.view, "figure": make_text(one.words)} for one in figures]
    yield Grid(_COLUMNS, rows, leave_out(list(_COLUMNS)))


def list_figures(recording: Recording, classes: tuple[RankClass, ...]) -> Iterator[Figure]:
    """In the order of the views."""
    if recording.modules:
        yield Figure("modules", plural(len({one.name for one in recording.modules}), "module"))
    if recording.collectives:
        yield Figure("communication", _describe_traffic(classes))
    yield from _describe_sharding(recording)
    yield from _describe_coverage(recording)
    yield from _describe_compiler(recording)
    yield from _describe_memory(recording)
    yield from _describe_proof(recording)


def _describe_traffic(classes: tuple[RankClass, ...]) -> str:
    sums = [add_up(tally(call) for call in one.calls) for one in classes]
    most = max(sums, key=lambda one: (one.wire_bytes, one.count))
    who = "each rank" if len(classes) == 1 else "the busiest rank"
    sent = format_bytes(most.wire_bytes)
    return f"{who} issues {plural(most.count, 'collective')}, {sent} on the wire"


def _describe_sharding(recording: Recording) -> Iterator[Figure]:
    """Tied tensors are counted once."""
    held: dict[str, tuple[int, int]] = {}
    for module in recording.modules:
        for one in module.parameters:
            if not one.is_buffer:
                name = one.alias_group or f"{module.name}.{one.name}"
                held.setdefault(name, (one.global_bytes, one.local_bytes))
    if held:
        whole, here = (format_bytes(sum(sizes)) for sizes in zip(*held.values(), strict=True))
        words = f"{plural(len(held), 'parameter')}, {whole} in all, {here} a rank"
        yield Figure("sharding", words)


def _describe_coverage(recording: Recording) -> Iterator[Figure]:
    for level in recording.coverage[:1]:
        covered = sum(one.verdict in _COVERED for one in level.ops)
        share = format_share(covered, len(level.ops))
        yield Figure("coverage", f"{covered:,} of {plural(len(level.ops), 'op')} shard ({share})")


def _describe_compiler(recording: Recording) -> Iterator[Figure]:
    for one in recording.explanations[:1]:
        breaks = plural(one.num_break_sites, "break site")
        words = f"{plural(one.num_graphs, 'graph')}, {breaks}"
        yield Figure("compiler", f"{words}, {plural(one.num_recompiles, 'recompilation')}")
    if recording.diagnoses:
        bad = sum(one.condition.is_bad for one in recording.diagnoses)
        checked = plural(len(recording.diagnoses), "compiled function")
        yield Figure("compiler", f"{bad:,} of {checked} wrong" if bad else f"{checked} right")


def _describe_memory(recording: Recording) -> Iterator[Figure]:
    if recording.memory:
        worst = find_worst(recording.memory)
        words = f"{format_bytes(worst.peak_bytes)} at the peak, in {worst.peak_phase}"
        yield Figure("memory", f"{words}, on rank {worst.rank:,}")


def _describe_proof(recording: Recording) -> Iterator[Figure]:
    for parity in recording.parity[:1]:
        fine = sum(one.agreement in FINE for one in parity.tensors)
        yield Figure("proof", f"{fine:,} of {plural(len(parity.tensors), 'tensor')} agree")
    for found in recording.parallel[:1]:
        words = f"{plural(len(found.inserted), 'collective')} put in"
        yield Figure("proof", f"{words}, {plural(len(found.fallbacks), 'fallback')}")
