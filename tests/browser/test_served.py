"""The page over a server: the table of collectives has all of them, and asks only its server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from huge_run import write_huge
from shardscope.report.serve.served_page import make_served_page
from shardscope.report.serve.server import PageServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

NUM_CALLS = 40 * 1_024


def _refuse_to_load() -> None:
    raise AssertionError("a large Parquet file must not be loaded")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    path: Path = tmp_path_factory.mktemp("served") / "large.parquet"
    write_huge(path, num_calls=NUM_CALLS)
    page = make_served_page(path, _refuse_to_load)  # type: ignore[arg-type]
    assert page.calls is not None
    with PageServer(page.document, page.calls.answer) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _rows(table: Locator) -> list[list[str]]:
    """The texts of the rows that are drawn, without the head."""
    return [row.split("\n") for row in table.locator(".table-body .table-row").all_inner_texts()]


def _wait_for(table: Locator, text: str) -> None:
    table.locator(".table-body .table-row", has_text=text).first.wait_for()


def test_table_scrolls_sorts_and_filters_all_collectives(
    browser: Browser, server: PageServer
) -> None:
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page: Page = context.new_page()
    page.set_default_timeout(10_000)
    page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    own = urlsplit(server.url).netloc
    page.on("request", lambda asked: urlsplit(asked.url).netloc == own or wrong.append(asked.url))
    page.goto(server.url)
    page.wait_for_selector("main h2, .facts")
    address = page.url
    assert server.token not in address
    findings = page.get_by_role("region", name=re.compile("^Findings"))
    assert "As they were saved with the file" in findings.inner_text()
    page.goto(f"{address}#/communication")
    table = page.locator(".table[aria-label=collectives]")
    _wait_for(table, "layers.0")
    assert table.get_attribute("aria-rowcount") == str(NUM_CALLS + 1)

    table.evaluate("table => { table.scrollTop = table.scrollHeight / 2; }")
    _wait_for(table, "layers.6")  # of the third stage, whose first rank is 512
    table.evaluate("table => { table.scrollTop = table.scrollHeight; }")
    table.locator(".table-row[aria-rowindex='40961']", has_text="1023").wait_for()

    table.get_by_role("button", name="No.").click()
    table.evaluate("table => { table.scrollTop = 0; }")
    table.locator(".table-row[aria-rowindex='3']", has_text="1\n").first.wait_for()
    assert {row[3] for row in _rows(table)} == {"0"}  # all ranks' first calls come first

    page.goto(f"{address}#/communication?rank=700&kind=all_reduce")
    _wait_for(table, "700")
    assert table.get_attribute("aria-rowcount") == "11"
    table.locator(".table-body .table-row").first.locator(".cell").nth(3).click()
    detail = page.locator(".table-detail").inner_text()
    assert "tp[2,23]: 8 ranks, 696-703 by nccl" in detail
    assert "700 (" in detail

    page.goto(f"{address}#/communication?q=w2%20backward&m=layers.120")
    _wait_for(table, "layers.120.feed_forward.w2")
    assert {row[0] for row in _rows(table)} == {"all_reduce"}
    assert {row[4] for row in _rows(table)} == {"backward"}
    assert "these are those of ranks 0, 256, 512, 768" in page.locator("main").inner_text()
    assert wrong == []

    server.shutdown()
    server.server_close()
    page.goto(f"{address}#/communication?rank=1")
    page.get_by_text("The server does not answer. Start `shardscope serve` again").wait_for()
    context.close()
