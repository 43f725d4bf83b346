"""The figures by which pages are compared are those that their views show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from compared_recordings import make_coverage, make_pair
from large_recording import make_hostile
from sample_recordings import make_parallel, make_recording
from shardscope.record import OpVerdict, Recording
from shardscope.report.html import figure_rows
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Page


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


def _sum_parts(page: Page, **selected: str) -> dict[tuple[str, str], int]:
    """Figures of the parts in a module's subtree, of an axis, or of a phase."""
    parts, sums = page.figure_parts, Counter[tuple[str, str]]()
    inside = {
        position
        for position, path in enumerate(page.modules.path)
        if f"{path}.".startswith(f"{selected.get('module', '')}.") or "module" not in selected
    }
    for row, at in enumerate(parts.figure):
        is_selected = (
            ("module" not in selected or inside.intersection(parts.modules[row]))
            and selected.get("axis", parts.axis[row]) == parts.axis[row]
            and ("phase" not in selected or selected["phase"] in parts.phases[row].split())
        )
        figure = page.figures[at]
        sums[figure.group, figure.label] += parts.value[row] * bool(is_selected)
    return sums


@pytest.mark.parametrize("make", [lambda: make_pair()[1], make_hostile, make_parallel])
def test_figures_are_the_sums_of_their_parts(make: Callable[[], Recording]) -> None:
    page = build_page(make())
    sums = _sum_parts(page)
    followed = [figure for figure in page.figures if figure.follows and figure.value]
    assert followed
    for figure in followed:
        assert sums[figure.group, figure.label] == figure.value, figure


def test_parts_of_figures_are_selected_by_module_axis_and_phase() -> None:
    after = make_pair()[1]
    page = build_page(after)
    of_layer = _sum_parts(page, module="layers.0.attention")
    assert of_layer["findings by rule", "mixed-meshes"] == 1
    assert _sum_parts(page, module="layers.1")["findings by rule", "mixed-meshes"] == 0
    inside = [
        module for module in after.modules if f"{module.name}.".startswith("layers.0.attention.")
    ]
    assert of_layer["modules", "all"] == len(inside)
    placed = [value for (group, _), value in of_layer.items() if group == "tensors by placement"]
    assert sum(placed) == sum(len(module.parameters) for module in inside)

    coverage = make_coverage({"aten.mm": OpVerdict.SHARDED, "aten.sort": OpVerdict.WRONG})
    ops = (replace(coverage.ops[0], num_forward=1), replace(coverage.ops[1], num_backward=1))
    page = build_page(make_recording(coverage=(replace(coverage, ops=ops),)))
    by_verdict = _sum_parts(page, phase="backward")
    assert (by_verdict["ops, exported", "wrong"], by_verdict["ops, exported", "sharded"]) == (1, 0)


def test_too_many_modules_of_parts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_rows, "_MAX_MODULES", 3)
    page = build_page(make_pair()[1])
    assert page.figure_parts.modules == ()
    assert {facet for figure in page.figures for facet in figure.follows} == {"rank"}


def test_memory_and_compiler_have_figures_and_names_are_sanitized() -> None:
    page = build_page(make_hostile())
    memory = _read(page.figures, "memory")
    assert memory["most on a rank", "peak of a step"] == page.memory[0].peak_bytes
    at_peak = [value for (group, _), value in memory.items() if group == "in use at the peak"]
    assert sum(at_peak) == sum(row.num_bytes for row in page.memory[0].at_peak)
    assert {item.view for item in page.figures} >= {"compiler", "coverage", "sharding", "proof"}
    assert not any("\x1b" in item.label + item.group for item in page.figures)
