"""Linked selection in a real browser: what is selected filters every view and its totals."""

from __future__ import annotations

import re
import runpy
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec.structs import replace

from shardscope.record import load
from shardscope.record.units import format_bytes
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Page as PageRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Locator, Page

expect = pytest.importorskip("playwright.sync_api").expect

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = (
    "tests/golden/recording_v2.json",
    *(f"examples/recordings/{name}.json.gz" for name in ("llama", "moe", "vision")),
)


def region(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name)


def chips(page: Page) -> Locator:
    return region(page, "selection").get_by_role("listitem")


def rows_of(page: Page, name: str) -> Locator:
    return region(page, name).locator(".table-foot")


def params_of(page: Page) -> dict[str, str]:
    """The parameters of the address."""
    query = urlsplit(urlsplit(page.url).fragment).query
    return {name: values[0] for name, values in parse_qs(query).items()}


def sum_rows(record: PageRecord, is_selected: Callable[[Any, int], bool]) -> tuple[int, int]:
    """Count and bytes of the selected rows, of the rank that sends most."""
    traffic = record.communication.traffic
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for row, rank_set in enumerate(traffic.rank_set):
        if is_selected(traffic, row):
            sums[rank_set][0] += traffic.count[row]
            sums[rank_set][1] += traffic.wire_bytes[row]
    count, num_bytes = max(sums.values(), key=lambda pair: pair[::-1])
    return count, num_bytes


def describe(count: int, num_bytes: int) -> str:
    return f"{count:,} collectives, {format_bytes(num_bytes)} sent"


def test_totals_without_a_selection_are_those_of_the_recording(open_page) -> None:
    sum_up = runpy.run_path(str(ROOT / "web" / "traffic_cases.py"))["sum_up"]
    for name in RECORDINGS:
        recording = load(ROOT / name)
        expected = sum_up(recording)
        page = open_page(build_page(recording), "#/communication")
        cells: dict[tuple[str, str], int] = defaultdict(int)
        for axis, kind, _, _, _, num_bytes in expected["facets"]:
            cells[kind, axis] += num_bytes
        labels = page.locator(".totals button.figure:not(.figure-sum)").evaluate_all(
            "buttons => buttons.map(button => button.ariaLabel.replace('≤ ', ''))"
        )
        assert sorted(labels) == sorted(
            f"{kind} on {axis}: {format_bytes(num_bytes) if num_bytes else '·'}"
            for (kind, axis), num_bytes in cells.items()
        )
        causes = (
            region(page, "Causes")
            .locator(".table-body .table-row")
            .evaluate_all(
                "rows => rows.map(row => [...row.children].slice(1, 4).map(cell => cell.innerText))"
            )
        )
        assert causes[:20] == [
            [label, f"{count:,}", format_bytes(num_bytes)]
            for _, label, count, _, num_bytes in expected["causes"][:20]
        ]
        total = max(figures[2] for figures in expected["ranks"])
        page.goto(re.sub("communication", "modules?by=wire", page.url))
        roots = page.get_by_role("treegrid").locator("[aria-level='1'] .bar").all_inner_texts()
        assert roots[0].strip("≤ ") == format_bytes(
            expected["modules"].get("", {"total": (0, 0, total)})["total"][2]
        )


def test_a_selection_filters_every_view_and_the_back_button_undoes_it(open_page, large) -> None:
    page = open_page(large, "#/communication")
    communication = large.communication
    causes = region(page, "Causes")
    causes.get_by_role("link", name="required by aten.mm").click()
    cause = page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('cause')")
    at = communication.causes.index(cause)
    figures = sum_rows(large, lambda traffic, row: traffic.cause[row] == at)
    status = page.locator(".selection-share")
    expect(status).to_contain_text(describe(*figures))
    expect(rows_of(page, "Causes")).to_have_text("1 of 4 rows")
    sum_of_all = region(page, "By mesh axis and kind").get_by_role(
        "button", name="all kinds on all axes"
    )
    expect(sum_of_all).to_contain_text(format_bytes(figures[1]))

    region(page, "Identical ranks").get_by_role("link", name="16-31").click()
    expect(chips(page)).to_have_text([f"cause{cause}×", "rank16, the same as 16-31×"])
    stage = next(i for i, row in enumerate(communication.ranks) if row.ranks == "16-31")
    figures = sum_rows(
        large,
        lambda traffic, row: (traffic.cause[row], traffic.rank_set[row]) == (at, stage),
    )
    expect(status).to_contain_text(describe(*figures))
    expect(rows_of(page, "Identical ranks")).to_have_text("1 of 4 rows")
    expect(region(page, "Traffic between ranks")).to_contain_text("Of what is selected.")

    page.keyboard.press("1")
    tiles = region(page, "figures").locator(".fact-value")
    expect(tiles.first).to_have_text(f"{figures[0]:,}")
    expect(tiles.nth(1)).to_have_text(format_bytes(figures[1]))
    page.go_back()
    page.keyboard.press("2")
    root = page.get_by_role("treegrid").locator("[aria-level='1'] .bar").first
    expect(root).to_have_text(format_bytes(figures[1]))
    expect(chips(page)).to_have_count(2)
    page.reload()
    expect(status).to_contain_text(describe(*figures))
    page.keyboard.press("4")
    held = page.locator(".rank-bytes-line", has_text="on one rank").first.inner_text()
    amount = re.search(r"[\d.]+ \w+iB", held)
    expect(page.locator(".rank-bytes-line", has_text="selected")).to_contain_text(amount[0])
    page.go_back()
    page.go_back()
    expect(page.locator(".view-communication")).to_be_visible()
    page.go_back()
    expect(chips(page)).to_have_count(1)
    page.go_forward()
    region(page, "selection").get_by_role("button", name="Clear rank").click()
    expect(chips(page)).to_have_count(1)
    page.keyboard.press("Escape")
    expect(region(page, "selection")).to_have_count(0)
    page.go_back()
    expect(chips(page)).to_have_count(1)


def test_a_range_of_collectives_selects_from_the_listed_calls(open_page, large) -> None:
    page = open_page(large, "#/communication?range=10-29&axis=tp")
    calls = large.communication.calls
    tp = large.communication.axes.index("tp")
    listed = [
        row for row, order in enumerate(calls.order) if 10 <= order <= 29 and calls.axis[row] == tp
    ]
    of_rank = [calls.wire_bytes[row] for row in listed if calls.rank[row] == 0]
    status = page.locator(".selection-share")
    expect(status).to_contain_text(describe(len(of_rank), sum(of_rank)))
    expect(status).not_to_contain_text("only calls that are listed")
    expect(rows_of(page, "All collectives")).to_have_text(f"{len(listed):,} of 20,000 rows")
    expect(chips(page).nth(1)).to_have_text("rangecollectives 10 – 29 of each rank×")
    cut = {name: getattr(calls, name)[:25] for name in calls.__struct_fields__}
    shortened = replace(
        large.communication, calls=replace(calls, **cut), left_out="The first 25 are listed."
    )
    page = open_page(replace(large, communication=shortened), "#/modules?range=10-29")
    expect(page.locator(".selection-share")).to_contain_text(
        "The range covers only calls that are listed: The first 25 are listed."
    )


def test_a_rank_that_was_not_recorded_has_no_figures(open_page) -> None:
    llama = build_page(load(ROOT / "examples/recordings/llama.json.gz"))
    page = open_page(llama, "#/communication?rank=5")
    expect(region(page, "selection").get_by_role("status")).to_have_text("Rank 5 was not recorded")
    sentence = page.locator(".comm-sentence")
    expect(sentence).to_contain_text("rank 0 was recorded: it sends 887 MiB to rank 4")
    expect(sentence).to_contain_text("Of all collectives, whatever is selected.")
    page.keyboard.press("Escape")
    expect(sentence).not_to_contain_text("whatever is selected")


def test_everything_can_be_selected_sorted_and_searched_with_keys(open_page, large) -> None:
    page = open_page(large, "#/communication")
    grid = page.get_by_role("grid", name="causes")
    grid.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    expect(chips(page)).to_have_count(1)
    page.keyboard.press("Escape")  # leaves the row
    page.keyboard.press("Escape")
    expect(chips(page)).to_have_count(0)
    grid.get_by_role("button", name="Count").focus()
    page.keyboard.press("Enter")
    assert params_of(page)["sort.causes"] == "-count"
    page.keyboard.press("Enter")
    assert params_of(page)["sort.causes"] == "count"
    page.go_back()
    expect(grid.get_by_role("columnheader", name="Count")).to_have_attribute(
        "aria-sort", "descending"
    )

    page.keyboard.press("/")
    page.keyboard.type("/(/")
    box = page.get_by_role("searchbox")
    expect(box).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_text("/(/ is not a regular expression: unterminated group")).to_be_visible()
    expect(rows_of(page, "All collectives")).to_have_text("20,000 rows")
    box.fill("/attention$|feed_forward.w2$/")
    expect(rows_of(page, "All collectives")).not_to_have_text("20,000 rows")
    box.fill("layers.*.attention")
    page.keyboard.press("Enter")
    expect(chips(page)).to_have_text(["modulelayers.*.attention×"])
    expect(box).to_have_value("")
    inside = sum_rows(
        large, lambda traffic, row: ".attention" in large.modules.path[traffic.owner[row]]
    )
    expect(page.locator(".selection-share")).to_contain_text(describe(*inside))
    box.blur()
    page.keyboard.press("?")
    help_text = page.get_by_role("dialog", name="keys").inner_text()
    assert all(
        word in help_text for word in ("search", "go to a view", "Esc", "regular expression")
    )
    page.keyboard.press("Escape")
    outline = page.get_by_role("tab", name="Communication")
    outline.focus()
    page.keyboard.press("ArrowLeft")
    focused = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert focused != "none"
