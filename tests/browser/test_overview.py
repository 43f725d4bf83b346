"""The verdict, what is next, empty views and narrow screens, in a real browser."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.record import Finding, FullyShard, Recording, Severity
from shardscope.report.html.html import build_page
from shardscope.report.html.page import FindingItem
from shardscope.report.model.terms import TERMS

expect = pytest.importorskip("playwright.sync_api").expect

VIEWS = ("overview", "modules", "communication", "sharding", "coverage")
VIEWS += ("compiler", "memory", "proof", "compare")
TARGET = "shardscope trace train.py --mesh dp=8,tp=4"

# Lines, modules and ops whose end is outside of the box that clips them.
CUT_OFF = """() => {
  const wrong = [];
  for (const part of document.querySelectorAll(".source-location, .module-link, code")) {
    const text = part.textContent.trim();
    if (!text || !part.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(part);
    const end = [...range.getClientRects()].at(-1);
    for (let box = part.parentElement; box && end; box = box.parentElement) {
      const style = getComputedStyle(box);
      if (style.overflowX === "auto" || style.overflowX === "scroll") break;
      if (style.overflowX !== "hidden" && style.overflowX !== "clip") continue;
      const bounds = box.getBoundingClientRect();
      const isCut = box.scrollWidth > box.clientWidth + 1 && style.direction === "ltr";
      const isEllipsis = style.textOverflow === "ellipsis" && isCut; // of its end
      if (isEllipsis || end.right > bounds.right + 1.5) wrong.push(`${box.className}: ${text}`);
      break;
    }
  }
  return wrong;
}"""
# Tables without a figure of their first row inside the screen.
HIDDEN_FIGURES = """() => [...document.querySelectorAll(".table")].filter((table) => {
  const figures = [...table.querySelectorAll(".table-body > .table-row .cell-end")];
  return figures.length && !figures.some((cell) => {
    const { left, right } = cell.getBoundingClientRect();
    return left >= 0 && right <= innerWidth;
  });
}).map((table) => table.getAttribute("aria-label"))"""


def make_traced() -> Recording:
    gather = FullyShard(action="unshard", num_parameters=1)
    call = samples.make_collective(cause=gather, owner="layers.0", wire_bytes=2**30)
    return samples.make_recording(
        collectives=(call,), run=samples.make_run(instruments=("trace",), command=TARGET)
    )


def go_to(page, view: str) -> None:
    page.evaluate("address => { location.hash = address; }", f"#/{view}")
    expect(page.locator(f".view-{view}")).to_be_visible()


def test_the_overview_says_what_dominates_what_was_not_checked_and_what_is_next(open_page) -> None:
    page = open_page(build_page(make_traced(), files=("runs/a b.json.gz",)))
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict.get_by_role("heading")).to_have_text("As expected")
    expect(verdict).to_contain_text("makes up 100% of the 1.00 GiB that a rank sends, in layers.0")
    expect(verdict).to_contain_text("Not checked: numerics, memory, sharding, 7 of 8 ranks.")
    following = page.get_by_role("region", name="Next")
    assert following.locator("code").all_inner_texts() == [
        "shardscope show 'runs/a b.json.gz' --module layers.0 --by cause",
        "shardscope parity train.py",
        "shardscope diff 'runs/a b.json.gz' AFTER.json.gz",
    ]
    expect(following.get_by_role("button", name="copy shardscope parity train.py")).to_be_visible()
    picture = page.get_by_role("region", name="Where it goes")
    expect(picture.get_by_role("tree", name="modules by bytes sent")).to_be_visible()
    causes = page.get_by_role("region", name="What sends most")
    expect(causes).to_contain_text("FSDP unshard")
    cells = page.get_by_role("region", name="Bytes by axis and phase")
    cells.get_by_role("button", name="1.00 GiB").click()
    assert "phase=forward" in page.url
    checks = page.get_by_role("region", name="What was checked")
    expect(checks).to_contain_text("1 of 6 instruments ran")


@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_the_first_screen_says_what_is_wrong_what_was_not_checked_and_what_to_do(
    open_page, width: int
) -> None:
    remedy = "Shard it along tp, too."
    finding = Finding(
        rule="replicated-parameter",
        severity=Severity.WARNING,
        subject="head.weight",
        fact="1.00 GiB are the same on 4 ranks",
        remedy=remedy,
    )
    recording = replace(make_traced(), findings=(finding,))
    page = open_page(build_page(recording, files=("a.json",)), width=width)
    verdict = page.get_by_role("region", name="Verdict")
    for words in (
        "Costs more than it needs",
        "1.00 GiB are the same on 4 ranks",
        remedy,
        "Not checked: numerics, memory, sharding",
        "Does it compute what a single device does?",
        "shardscope parity train.py",
    ):
        element = verdict.get_by_text(words).first
        expect(element).to_be_in_viewport()
    expect(verdict.get_by_role("button", name="copy shardscope parity train.py")).to_be_visible()


def test_a_wrong_result_is_on_every_tab(open_page) -> None:
    page = open_page(build_page(samples.make_holdings()))
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict.get_by_role("heading")).to_have_text("Wrong result")
    color = verdict.locator("header").evaluate("e => getComputedStyle(e).backgroundColor")
    assert color == "rgb(194, 37, 92)"
    expect(page.get_by_role("tab", name="Correctness Wrong result")).to_be_visible()
    for view in VIEWS[1:]:
        go_to(page, view)
        alert = page.locator(".alert")
        expect(alert).to_contain_text("Wrong result: 84 of 182 tensors differ")
    alert.get_by_role("link").click()
    expect(page.get_by_role("tab", name="Correctness")).to_have_attribute("aria-selected", "true")


def test_views_without_data_have_the_command_that_fills_them(open_page) -> None:
    page = open_page(build_page(make_traced(), files=("a.json",)))
    for view, command in {
        "sharding": "shardscope audit train.py",
        "coverage": "shardscope coverage train.py",
        "compiler": "shardscope explain train.py",
        "memory": "shardscope memory train.py --gpu-memory 80GiB",
        "proof": "shardscope parity train.py",
        "compare": "shardscope report a.json --against BEFORE.json.gz",
    }.items():
        go_to(page, view)
        expect(page.locator(".empty code")).to_have_text(command)
        expect(page.locator(".empty p")).to_have_text(re.compile(r"\w.*\.$"))


def test_terms_and_rules_explain_themselves_on_focus(open_page) -> None:
    record = build_page(make_traced())
    finding = FindingItem(
        rule="implicit-gather",
        severity="warning",
        subject="w",
        fact="f",
        remedy="r",
        explanation="DTensor inserted it.",
        documentation="docs/findings/implicit-gather.md",
        cost="1.00 GiB sent",
    )
    page = open_page(replace(record, findings=(finding,)))
    page.locator("dfn", has_text="axis").focus()
    expect(page.get_by_role("tooltip")).to_have_text(TERMS["mesh, axis"])
    item = page.locator(".finding")
    expect(item).to_contain_text("1.00 GiB sent")
    expect(item).to_contain_text("docs/findings/implicit-gather.md")
    item.locator("dfn").focus()
    expect(page.get_by_role("tooltip")).to_have_text("DTensor inserted it.")
    go_to(page, "communication")
    head = page.get_by_role("grid", name="causes").get_by_role("button", name="Cause")
    page.keyboard.press("Tab")
    head.focus()
    expect(page.get_by_role("tooltip")).to_have_text(TERMS["cause"])


@pytest.mark.parametrize("width", [400, 1280, 3840])
def test_lines_modules_and_figures_are_visible_at_every_width(open_page, large, width: int) -> None:
    page = open_page(large, width=width)
    for view in VIEWS:
        go_to(page, view)
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert page.evaluate(CUT_OFF) == [], view
        assert page.evaluate(HIDDEN_FIGURES) == [], view


def test_op_names_are_as_wide_as_they_need(open_page) -> None:
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    recording = samples.make_holdings()
    level = recording.coverage[0]
    ops = tuple(replace(op, op=name) for op in level.ops[:2])
    covered = replace(recording, coverage=(replace(level, ops=ops),))
    page = open_page(build_page(covered), "#/coverage", width=1280)
    cell = page.get_by_role("grid").get_by_role("gridcell", name=name).first.locator(".clip")
    assert cell.evaluate("e => e.scrollWidth <= e.clientWidth")
