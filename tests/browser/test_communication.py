"""Who said what to whom, in a real browser: totals that filter, lanes, causes, every collective."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.record.units import format_bytes
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Page as PageRecord

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect = pytest.importorskip("playwright.sync_api").expect


def region(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name)


def rows_of(page: Page, name: str) -> Locator:
    """How many rows of how many the table of a region shows."""
    return region(page, name).locator(".table-foot")


def add_up(record: PageRecord, kind: str, axis: str) -> tuple[int, int]:
    """Bytes and count of all phases, each of the rank that sends most in it."""
    communication = record.communication
    traffic = communication.traffic
    sums: dict[int, Counter[int]] = defaultdict(Counter)
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for row, phase in enumerate(traffic.phase):
        names = (communication.kinds[traffic.kind[row]], communication.axes[traffic.axis[row]])
        if names == (kind, axis):
            sums[phase][traffic.rank_set[row]] += traffic.wire_bytes[row]
            counts[phase][traffic.rank_set[row]] += traffic.count[row]
    most = [max(by_rank.values()) for by_rank in sums.values()]
    return sum(most), sum(max(by_rank.values()) for by_rank in counts.values())


def picture_of(page: Page) -> str:
    return page.locator(".timeline canvas").evaluate("canvas => canvas.toDataURL()")


def test_clicking_a_total_selects_its_collectives(open_page, large) -> None:
    page = open_page(large, "#/communication")
    num_bytes, count = add_up(large, "all_reduce", "tp")
    totals = region(page, "By mesh axis and kind")
    figure = totals.get_by_role("button", name="all_reduce on tp")
    expect(figure).to_have_text(f"≤ {format_bytes(num_bytes)}")
    figure.click()
    expect(figure).to_have_attribute("aria-pressed", "true")
    assert "axis=tp&kind=all_reduce" in page.url
    expect(rows_of(page, "All collectives")).to_have_text("4,992 of 20,000 rows")
    expect(rows_of(page, "Causes")).to_have_text("1 of 4 rows")
    chips = page.get_by_role("region", name="selection")
    expect(chips.get_by_role("listitem")).to_have_text(["axistp×", "kindall_reduce×"])
    totals.get_by_role("button", name="forward").click()
    shown = region(page, "All collectives").get_by_role("row").nth(1)
    expect(shown).to_contain_text("forward")
    totals.get_by_role("button", name="all phases").click()
    totals.get_by_role("button", name="Counts").click()
    expect(figure).to_have_text(f"≤ {count}")
    page.keyboard.press("Escape")
    expect(rows_of(page, "All collectives")).to_have_text("20,000 rows")


def test_the_matrix_tooltip_shows_both_ranks_their_coordinates_and_the_bytes(
    open_page, large
) -> None:
    page = open_page(large, "#/communication")
    matrix = large.communication.matrix
    sender, receiver = matrix.sender[0], matrix.receiver[0]
    grid = page.get_by_role("slider", name="bytes from rank to rank")
    grid.focus()
    page.keyboard.press("ArrowDown")
    size = format_bytes(matrix.num_bytes[0])
    expect(grid).to_have_attribute(
        "aria-valuetext", f"rank {matrix.ranks[sender]} to rank {matrix.ranks[receiver]}: {size}"
    )
    tip = page.get_by_role("tooltip")
    expect(tip).to_contain_text("pp 0, dp 0, tp 1")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    pairs = zip(matrix.sender, matrix.receiver, strict=True)
    size = format_bytes(dict(zip(pairs, matrix.num_bytes, strict=True))[0, 4])
    expect(grid).to_have_attribute("aria-valuetext", f"rank 0 to rank {matrix.ranks[4]}: {size}")
    box = grid.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] - 3)
    expect(tip).to_contain_text("rank 63")
    expect(tip).to_contain_text("0 B")
    expect(region(page, "Identical ranks")).to_contain_text("4 different lists")


def test_without_a_matrix_a_sentence_says_why(open_page, large) -> None:
    note = "Not drawn: 1,024 ranks are too many to tell apart."
    said = replace(large.communication, matrix=None, matrix_note=note)
    page = open_page(replace(large, communication=said), "#/communication")
    expect(region(page, "Traffic between ranks")).to_contain_text(note)
    expect(page.get_by_role("slider", name="bytes from rank to rank")).to_have_count(0)


def test_the_timeline_can_be_zoomed_walked_with_keys_and_clicked(open_page, large) -> None:
    page = open_page(large, "#/communication?lanes=ranks")
    lanes = page.get_by_role("slider", name="timeline of collectives")
    whole = picture_of(page)
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 300, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, middle, steps=3)
    page.mouse.up()
    assert picture_of(page) != whole
    page.get_by_role("button", name="Reset zoom").click()
    assert picture_of(page) == whole
    lanes.focus()
    page.keyboard.press("+")
    assert picture_of(page) != whole
    page.keyboard.press("0")
    assert picture_of(page) == whole
    page.keyboard.press("Home")
    expect(lanes).to_have_attribute("aria-valuetext", re.compile(r"all_gather\[dp\] of rank 0"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(lanes).to_have_attribute("aria-valuetext", re.compile(r"all_gather\[tp\] of rank 1"))
    page.keyboard.press("Enter")
    for name in ("Timeline", "All collectives"):
        detail = region(page, name).locator(".table-detail")
        for text in ("implicit", "x = self.attention(x)", "pp 0, dp 0, tp 1", "ranks, 0-3"):
            expect(detail).to_contain_text(text)
    chosen = region(page, "All collectives").locator("[role=row][aria-selected=true]")
    expect(chosen.get_by_role("gridcell").nth(2)).to_have_text("1")
    expect(page.locator(".timeline-selected")).to_have_count(1)
    region(page, "Timeline").get_by_role("button", name="close").click()
    expect(page.locator(".table-detail, .timeline-selected")).to_have_count(0)
    page.get_by_role("button", name="Order").click()
    assert "along=order" in page.url


def test_a_range_of_the_timeline_is_selected_and_the_address_has_the_view(open_page) -> None:
    page = open_page(build_page(samples.make_llama(num_layers=8)), "#/communication")
    timeline = region(page, "Timeline")
    expect(timeline).to_contain_text("Collectives of rank 0 by mesh axis")
    expect(region(page, "Identical ranks")).to_have_count(0)
    expect(region(page, "Traffic between ranks")).to_have_count(0)
    expect(page.locator(".comm-sentence")).to_contain_text("Of 1,024 ranks, rank 0 was recorded")
    lanes = page.get_by_role("slider", name="timeline of collectives")
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    full, linear = box["width"], picture_of(page)
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + full / 2, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + full / 2 + 200, box["y"] + 90, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    expect(page).to_have_url(re.compile(r"range=\d+-\d+"))
    expect(page.locator(".timeline-range")).to_have_count(1)
    expect(page.get_by_role("region", name="selection")).to_contain_text("range")
    page.go_back()
    expect(page.locator(".timeline-range")).to_have_count(0)
    lanes.focus()
    for key in ("Home", "[", "ArrowRight", "ArrowRight", "]"):
        page.keyboard.press(key)
    expect(page).to_have_url(re.compile(r"range=0-\d"))
    page.keyboard.press("Escape")
    timeline.get_by_role("button", name="Log").click()
    assert picture_of(page) != linear
    timeline.get_by_role("button", name="Bytes").click()
    timeline.get_by_role("button", name="zoom in").click()
    expect(page).to_have_url(re.compile(r"view=[\d.]+_[\d.]+"))
    zoomed = picture_of(page)
    page.reload()
    expect(page.locator(".minimap-window")).to_be_visible()
    assert picture_of(page) == zoomed
    page.locator(".minimap").click(position={"x": full - 5, "y": 8})
    assert picture_of(page) != zoomed
    timeline.get_by_role("button", name="Modules").click()
    expect(timeline).to_contain_text("Collectives of rank 0 by module")
    timeline.get_by_role("button", name="all_reduce").click()
    expect(page).to_have_url(re.compile("kind=all_reduce"))


def test_the_pointer_finds_a_collective_on_the_timeline(open_page, large) -> None:
    page = open_page(large, "#/communication?kind=all_reduce&lanes=alike")
    lanes = page.get_by_role("slider", name="timeline of collectives")
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    # The first lane begins below the axis; calls are in its lower part.
    page.mouse.move(box["x"] + 500, box["y"] + 80)
    tip = page.get_by_role("tooltip")
    expect(tip).to_contain_text("all_reduce[tp]")
    named = tip.locator(".mono").last.inner_text()
    page.mouse.down()
    page.mouse.up()
    expect(region(page, "Timeline").locator(".table-detail")).to_contain_text(named)
    expect(region(page, "All collectives").locator(".table-detail")).to_contain_text(named)
    page.mouse.move(box["x"] + 500, box["y"] + 32)
    expect(tip).to_contain_text("900 ms")


def test_causes_are_listed_and_link_to_their_modules(open_page, large) -> None:
    page = open_page(large, "#/communication")
    why = region(page, "Causes")
    expect(why.locator(".badge")).to_have_text(["implicit", "implicit"])
    why.get_by_role("row").filter(has_text="implicit").first.click()
    detail = why.locator(".table-detail")
    expect(detail).to_contain_text("No plan and no call asked for it")
    expect(detail).to_contain_text("x = self.attention(x)")
    link = detail.locator(".module-link").first
    name = link.inner_text()
    link.click()
    expect(rows_of(page, "All collectives")).to_contain_text(f"of 20,000 rows in {name}")
    owners = set(
        region(page, "All collectives").locator(".table-body .module-link").all_inner_texts()
    )
    assert owners == {name}


def test_a_simulated_run_is_drawn_in_order_and_spans_are_drawn_without_collectives(
    open_page,
) -> None:
    page = open_page(build_page(samples.make_llama()), "#/communication?along=time")
    timeline = region(page, "Timeline")
    expect(timeline).to_contain_text("in order of issue: a simulation has no time")
    expect(timeline.get_by_role("button", name="Time", exact=True)).to_have_count(0)
    region(page, "All collectives").get_by_role("row").nth(1).click()
    detail = region(page, "All collectives").locator(".table-detail")
    expect(detail).to_contain_text("its number 0")
    expect(detail).not_to_contain_text("after the recording began")
    page = open_page(build_page(samples.make_phases()), "#/communication")
    expect(region(page, "Phases")).to_contain_text("step")
    region(page, "Phases").get_by_role("link", name="rank 0").first.click()
    expect(region(page, "Phases")).to_contain_text("Of rank 0;")
    expect(region(page, "Phases").locator(".unfollowed")).to_have_count(0)
    expect(region(page, "Timeline").get_by_role("button", name="Order")).to_have_count(0)
    expect(region(page, "All collectives")).to_have_count(0)


def test_a_step_is_selected_in_every_view(open_page) -> None:
    recording = samples.make_steps(2)
    page = open_page(build_page(recording), "#/communication")
    steps = region(page, "Timeline").get_by_role("group", name="steps")
    steps.get_by_role("button", name="2", exact=True).click()
    of_step = [call for call in recording.collectives if call.rank == 0 and call.order > 5]
    sent = format_bytes(sum(call.wire_bytes for call in of_step))
    share = page.locator(".selection-share")
    expect(share).to_contain_text(f"{len(of_step)} collectives, {sent} sent by a rank")
    table = region(page, "All collectives")
    expect(table.locator(".table-foot")).to_have_text(f"{2 * len(of_step)} of 22 rows")
    table.get_by_role("row").nth(1).click()
    expect(table.locator(".table-detail")).to_contain_text("in forward of step 2")
    page.get_by_role("tab", name="Overview").click()
    expect(page.locator(".fact-value").first).to_have_text(str(len(of_step)))
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Communication").click()
    table.get_by_role("link", name="1", exact=True).locator("visible=true").first.click()
    page.go_back()
    expect(steps.get_by_role("button", name="2", exact=True)).to_be_visible()


def test_causes_and_lines_are_never_cut(open_page, large) -> None:
    for width in (400, 1280, 2560):
        page = open_page(large, "#/communication", width=width)
        for table in ("causes", "collectives"):
            texts = page.get_by_role("grid", name=table, exact=True).locator(
                ".cell:has(.source-location) .clip, .cell .clip[title*='redistribution']"
            )
            expect(texts.first).to_be_attached()
            cut = texts.evaluate_all(
                "texts => texts.filter(text => text.scrollWidth > text.clientWidth)"
                ".map(text => text.textContent)"
            )
            assert cut == [], (table, width)


def test_totals_are_in_sight_on_a_phone(open_page, large) -> None:
    page = open_page(large, "#/communication", width=400)
    table = page.get_by_role("table", name="totals by mesh axis and kind")
    num_axes, num_kinds = (
        len({*getattr(large.communication.traffic, column)}) for column in ("axis", "kind")
    )
    assert num_kinds > num_axes
    expect(table.get_by_role("columnheader")).to_have_count(1 + num_axes + 1)
    for figure in table.get_by_role("button").all():
        box = figure.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 400
