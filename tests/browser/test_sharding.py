"""What each rank holds, in a real browser: sums, the audit's filters, sharded tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from compared_recordings import make_module, make_parameter
from shardscope.record import Axis, Finding, RankSpan, Recording, Severity
from shardscope.record.units import format_bytes
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Page as PageRecord

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect = pytest.importorskip("playwright.sync_api").expect


@dataclass(frozen=True)
class ShardingView:
    """A page, and the table that it shows."""

    page: Page
    table: Locator
    drawn: Locator


@pytest.fixture(scope="module")
def audited() -> PageRecord:
    """Four ranks: a weight cut twice, a norm that is whole and flagged, and a buffer."""
    ranks = (RankSpan(0, 4),)
    axes = (Axis(name="dp", size=2), Axis(name="tp", size=2))
    cut = make_parameter(
        shape=(8, 4),
        local_shape=(4, 2),
        global_bytes=128,
        local_bytes=32,
        placements=("Shard(0)", "Shard(1)"),
        axes=("dp", "tp"),
        live_name="_orig_mod.wq.weight",
        checkpoint_key="model.wq.weight",
    )
    whole = replace(
        cut,
        shape=(8,),
        local_shape=(8,),
        global_bytes=32,
        placements=("Replicate", "Replicate"),
        live_name=None,
        checkpoint_key=None,
    )
    buffer = replace(whole, name="mask", placements=(), axes=(), is_buffer=True, is_trainable=False)
    recording = Recording(
        run=samples.make_run(world_size=4, ranks=(0, 1, 2, 3), axes=axes),
        modules=(
            make_module("", ranks=ranks),
            make_module("wq", cut, ranks=ranks),
            make_module("norm", whole, buffer, ranks=ranks),
        ),
        findings=(
            Finding(
                rule="replicated-parameter",
                severity=Severity.WARNING,
                subject="norm.weight",
                fact="Every rank holds all of it.",
                remedy="Shard it.",
            ),
        ),
    )
    return build_page(recording)


def show(page: Page) -> ShardingView:
    table = page.get_by_role("grid", name="parameters")
    return ShardingView(page, table, page.get_by_role("region", name="Layout"))


def names_of(view: ShardingView) -> list[str]:
    return view.table.locator(".table-body .cell:first-child .clip").all_inner_texts()


def test_sums_and_filters_of_the_audit(open_page, audited) -> None:
    view = show(open_page(audited, "#/sharding"))
    sums = view.page.get_by_role("region", name="What a rank holds")
    table = audited.sharding
    for figure in (table.global_bytes, table.local_bytes, table.replicated_bytes):
        expect(sums).to_contain_text(format_bytes(figure))
    assert names_of(view) == ["wq.weight", "norm.weight", "norm.mask buffer"]
    kept = {
        "Sharded": ["wq.weight"],
        "Not sharded": ["norm.weight", "norm.mask buffer"],
        "With findings": ["norm.weight"],
        "Trainable": ["wq.weight", "norm.weight"],
        "Buffers": ["norm.mask buffer"],
        "All": ["wq.weight", "norm.weight", "norm.mask buffer"],
    }
    for title, names in kept.items():
        view.page.get_by_role("button", name=title, exact=True).click()
        assert names_of(view) == names
    expect(view.table.locator(".badge")).to_have_text("replicated-parameter")


def test_the_parameter_that_is_chosen_is_drawn(open_page, audited) -> None:
    view = show(open_page(audited, "#/sharding"))
    expect(view.drawn).to_contain_text(
        "rows sharded 2 ways over dp, columns sharded 2 ways over tp"
    )
    expect(view.drawn.locator(".shard text")).to_have_text(["0", "1", "2", "3"])
    expect(view.drawn.locator(".side")).to_have_text(["dim 1: 4", "dim 0: 8"])
    view.drawn.locator(".shard").nth(2).hover()
    tip = view.page.get_by_role("tooltip")
    expect(tip).to_contain_text("[4:8, 0:2]")
    expect(tip).to_contain_text("rank 2")
    view.table.get_by_role("row", name=re.compile("norm.weight")).click()
    expect(view.drawn).to_contain_text("replicated over dp (2), replicated over tp (2)")
    view.table.get_by_role("row", name=re.compile("norm.mask")).click()
    expect(view.drawn).to_contain_text("not distributed")
    view.table.get_by_role("row", name=re.compile("wq.weight")).click()
    detail = view.page.locator(".table-detail")
    for text in ("_orig_mod.wq.weight", "model.wq.weight", "0-3", "a parameter"):
        expect(detail).to_contain_text(text)
    view.drawn.get_by_text("4 shards as a list").click()
    expect(view.drawn).to_contain_text("[0:4, 2:4]")


def test_selecting_a_module_filters_parameters_and_draws_one_of_them(open_page, large) -> None:
    view = show(open_page(large, "#/sharding?m=layers.17.attention"))
    assert names_of(view) == [f"layers.17.attention.w{one}.weight" for one in "qkvo"]
    expect(view.drawn).to_contain_text("layers.17.attention.wq.weight")
    expect(view.drawn.locator(".shard")).to_have_count(16)
    view.page.get_by_role("button", name="show all modules").click()
    expect(view.page.locator(".table-foot")).to_have_text("3,744 rows")


def test_recorded_layouts_are_drawn_without_an_audit(open_page) -> None:
    record = build_page(samples.make_holdings())
    page = open_page(record, "#/sharding", width=400)
    layouts = page.get_by_role("region", name="Layouts")
    expect(layouts.get_by_role("listitem").filter(has=page.locator("svg"))).to_have_count(
        len(record.sharding.layouts)
    )
    expect(layouts).to_contain_text("</script><script>alert(1)</script>")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
