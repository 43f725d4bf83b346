"""A check before launch on the page: its verdict, what was tried, and what was not and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from checked_programs import make_checked
from shardscope.record import Severity
from shardscope.report.html.html import build_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api").expect


def read_column(page: Page, number: int) -> list[str]:
    cells = page.get_by_role("grid", name="variations").locator(
        f".table-body [role=row] [role=gridcell]:nth-child({number})"
    )
    return [text.strip() for text in cells.all_text_contents()]


def test_variations_that_make_ranks_diverge_come_first_and_follow_the_selection(open_page) -> None:
    page = open_page(build_page(make_checked(Severity.WARNING)), "#/proof")
    panel = page.get_by_role("region", name="Would its ranks wait for each other forever?")
    expect(panel).to_contain_text("2 of 2 ranks were run, with data, 6 steps")
    expect(panel.locator(".proof-words .badge")).to_have_text("ranks may diverge")
    assert read_column(page, 2) == ["ranks diverge", "not tried", "raises", "same collectives"]
    assert read_column(page, 1)[0] == "item() at train.py:15 is False on rank 1"
    assert read_column(page, 3)[2] == "ValueError: no loss"
    page = open_page(build_page(make_checked(Severity.WARNING)), "#/proof?rank=0")
    expect(page.get_by_role("grid", name="variations")).to_have_attribute("aria-rowcount", "1")


def test_ranks_that_diverge_anyway_have_no_table_and_an_alert(open_page) -> None:
    page = open_page(build_page(make_checked(Severity.ERROR)), "#/proof")
    expect(page.locator(".proof-wrong .badge")).to_have_text("ranks diverge")
    expect(page.get_by_role("grid", name="variations")).to_have_count(0)
    expect(page.get_by_role("alert")).to_contain_text("Does not run: Ranks diverge")


def test_ranks_that_do_not_diverge_are_fine(open_page) -> None:
    page = open_page(build_page(make_checked()), "#/proof")
    expect(page.locator(".proof-words .badge")).to_have_text("no rank diverges")
    page = open_page(build_page(make_checked()), "#/overview")
    expect(page.locator(".view-overview")).to_contain_text("As expected")
    expect(page.locator(".view-overview")).to_contain_text("ranks before launch")
