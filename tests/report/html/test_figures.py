"""The figures by which pages are compared are those that their views show."""

from __future__ import annotations

from compared_recordings import make_pair
from large_recording import make_hostile
from shardscope.report.html.html import build_page


def _read(figures, view):
    return {(item.group, item.label): item.value for item in figures if item.view == view}


def test_figures_are_of_each_view_and_of_the_busiest_rank() -> None:
    before, after = make_pair()
    page = build_page(after, against=before)
    sent = "bytes sent per rank (ring estimate)"
    figures, earlier = (
        _read(figures, "communication") for figures in (page.figures, page.earlier_figures)
    )
    ranks = {call.rank for call in after.collectives}
    totals = [
        sum(call.wire_bytes for call in after.collectives if call.rank == rank) for rank in ranks
    ]
    assert figures[sent, "all"] == max(totals)
    kinds = [value for (group, label), value in figures.items() if group == sent and label != "all"]
    assert len(ranks) == 1
    assert sum(kinds) == figures[sent, "all"]
    assert figures["collectives per rank", "all"] == len(after.collectives)
    assert earlier["collectives per rank", "all"] == len(before.collectives)
    assert earlier == _read(build_page(before).figures, "communication")
    assert _read(page.figures, "overview")["findings", "warning"] == 1
    assert page.earlier_figures
    assert not build_page(after).earlier_figures


def test_memory_and_compiler_have_figures_and_names_are_sanitized() -> None:
    page = build_page(make_hostile())
    memory = _read(page.figures, "memory")
    assert memory["most on a rank", "peak of a step"] == page.memory[0].peak_bytes
    at_peak = [value for (group, _), value in memory.items() if group == "in use at the peak"]
    assert sum(at_peak) == sum(row.num_bytes for row in page.memory[0].at_peak)
    assert {item.view for item in page.figures} >= {"compiler", "coverage", "sharding", "proof"}
    assert not any("\x1b" in item.label + item.group for item in page.figures)
