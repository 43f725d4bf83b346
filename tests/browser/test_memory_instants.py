"""What is in use at any instant of a step, in a real browser."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from msgspec.structs import replace

from shardscope.record import MemoryKind, Recording
from shardscope.record.units import format_bytes
from shardscope.report.html.html import build_page
from small_recordings import make_memory_recording

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def recording() -> Recording:
    return make_memory_recording()


def _sum_by(recording: Recording, column: str, order: int) -> Counter:
    table = recording.memory[0].allocations
    sums: Counter = Counter()
    for key, start, end, num_bytes in zip(
        getattr(table, column), table.start, table.end, table.num_bytes, strict=True
    ):
        if start <= order < end:
            sums[key] += num_bytes
    return sums


def _change(change: int) -> str:
    return f"{'+' if change > 0 else '−'}{format_bytes(abs(change))}" if change else "·"


def test_the_tooltip_has_what_is_in_use_where_the_curve_has_the_highest_of_an_interval(
    open_page, recording
) -> None:
    page_record = build_page(recording)
    (curve,) = page_record.memory
    kept = [0, curve.peak, len(curve.order) - 1]  # as if the step were much longer
    coarse = replace(
        curve,
        order=tuple(curve.order[at] for at in kept),
        num_bytes=tuple(tuple(column[at] for at in kept) for column in curve.num_bytes),
        module=tuple(curve.module[at] for at in kept),
        phases=(),
        peak=1,
    )
    page = open_page(replace(page_record, memory=(coarse,)), "#/memory")
    box = page.get_by_role("slider", name="memory over the step").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + 100)
    order = int(re.search(r"[?&]at=(\d+)", page.url)[1])
    total = sum(_sum_by(recording, "kind", order).values())
    assert total not in (sum(column[at] for column in coarse.num_bytes) for at in range(3))
    expect(page.get_by_role("tooltip")).to_contain_text(format_bytes(total))


def test_any_instant_shows_what_is_in_use_and_two_show_what_changed(open_page, recording) -> None:
    profile = recording.memory[0]
    table = profile.allocations
    page = open_page(build_page(recording), "#/memory")
    panel = page.get_by_role("region", name=re.compile("^In use at"))
    assert panel.get_by_role("heading").inner_text() == "In use at the peak"
    expect(panel.locator(".panel-note")).to_contain_text(format_bytes(profile.peak_bytes))
    modules = _sum_by(recording, "module", profile.peak_order)
    rows = panel.get_by_role("grid").get_by_role("row")
    expect(rows).to_have_count(len(modules) + 1)
    module, num_bytes = modules.most_common(1)[0]
    name = "no module" if module < 0 else table.modules[module]
    expect(rows.nth(1)).to_contain_text(name)
    expect(rows.nth(1)).to_contain_text(format_bytes(num_bytes))

    chart = page.get_by_role("slider", name="memory over the step")
    box = chart.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.3, box["y"] + 100)
    order = int(re.search(r"[?&]at=(\d+)", page.url)[1])
    assert table.first_order <= order <= table.last_order
    expect(panel.get_by_role("heading")).to_have_text(f"In use at event {order:,}")
    kinds = _sum_by(recording, "kind", order)
    expect(page.get_by_role("tooltip")).to_contain_text(format_bytes(sum(kinds.values())))
    for kind, num_bytes in kinds.items():
        entry = panel.get_by_role("listitem").filter(
            has_text=list(MemoryKind)[kind].replace("_", " ")
        )
        expect(entry).to_contain_text(format_bytes(num_bytes))

    chart.focus()
    page.keyboard.press("Shift+ArrowRight")  # by one allocation or release
    expect(page).to_have_url(re.compile(f"at={order + 1}(&|$)"))
    page.keyboard.press("Home")
    expect(page.get_by_role("heading", name="In use at the start of the step")).to_be_visible()
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    change = page.get_by_role(
        "region", name="Change from the start of the step to the end of the step"
    )
    first, last = table.first_order - 1, table.last_order
    before, after = _sum_by(recording, "kind", first), _sum_by(recording, "kind", last)
    total = sum(after.values()) - sum(before.values())
    expect(change.locator(".panel-note")).to_contain_text(
        f"{format_bytes(sum(before.values()))} → {format_bytes(sum(after.values()))}"
    )
    change.get_by_role("button", name="Line").click()
    grid = change.get_by_role("grid")
    expect(grid).to_contain_text("memory_models.py")
    expect(grid).to_contain_text("model(rows()).sum().backward()")
    cells = [row.get_by_role("gridcell").all_inner_texts() for row in grid.get_by_role("row").all()]
    lines = _sum_by(recording, "source", last)
    lines.subtract(_sum_by(recording, "source", first))
    assert sorted(row[1] for row in cells if row) == sorted(
        _change(lines[line]) for line in range(-1, len(table.sources))
    )
    assert sum(lines.values()) == total

    chart.focus()
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="In use at the peak")).to_be_visible()
    panel.get_by_role("button", name="Layers folded").click()
    expect(panel.get_by_role("grid")).to_contain_text("×6")
    kind = list(MemoryKind)[profile.allocations.kind[0]]
    panel.get_by_role("button", name=kind.replace("_", " ")).click()
    panel.get_by_role("button", name="Allocation", exact=True).click()
    num_rows = sum(
        start <= profile.peak_order < end and list(MemoryKind)[at] is kind
        for start, end, at in zip(table.start, table.end, table.kind, strict=True)
    )
    expect(panel.locator(".table-foot")).to_have_text(f"{num_rows} rows")
    expect(panel.get_by_role("grid")).to_contain_text("before – after")

    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 100, steps=4)
    page.mouse.up()
    expect(page.get_by_role("heading", name=re.compile("^Change from event"))).to_be_visible()
