"""Memory, coverage, the compiler and comparisons, in a real browser."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import sample_recordings as samples
from compared_recordings import make_pair
from page_blocks import ROOT
from shardscope.record import Explanation, FrameGuards, Recompile, Source, load
from shardscope.record.units import format_bytes
from shardscope.report.html.html import build_page

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect = pytest.importorskip("playwright.sync_api").expect


def foot_of(page: Page, name: str) -> str:
    return page.get_by_role("region", name=re.compile(name)).locator(".table-foot").inner_text()


def test_the_memory_chart_marks_the_peak_and_keys_move_over_the_step(open_page, large) -> None:
    page = open_page(large, "#/memory")
    curve = large.memory[0]
    expect(page.locator(".area-peak text")).to_have_text(f"peak {format_bytes(curve.peak_bytes)}")
    area = page.get_by_role("slider", name="memory over the step")
    area.focus()
    page.keyboard.press("Home")
    first = sum(column[0] for column in curve.num_bytes)
    expect(area).to_have_attribute("aria-valuenow", "0")
    expect(area).to_have_attribute("aria-valuetext", format_bytes(first))
    page.keyboard.press("ArrowRight")
    second = sum(column[1] for column in curve.num_bytes)
    expect(page.get_by_role("tooltip")).to_contain_text(format_bytes(second))
    expect(page.locator(".area-cursor")).to_have_count(1)
    kinds = page.get_by_role("region", name="At the peak, by category")
    shown = kinds.locator(".memory-kind").all_inner_texts()
    assert len(shown) == sum(any(column) for column in curve.num_bytes)
    module = page.get_by_role("grid").get_by_role("link").first
    name = module.inner_text()
    module.click()
    expect(page.get_by_text(f"{name} owns")).to_be_visible()


def test_clicking_a_verdict_filters_ops_and_an_op_lists_its_call_sites(open_page, large) -> None:
    page = open_page(large, "#/coverage")
    level = large.coverage[0]
    verdict, count = next(
        (one, num) for one, num in zip(level.verdicts, level.counts, strict=True) if num
    )
    button = page.get_by_role("group", name="verdicts").get_by_role("button", name=verdict)
    expect(button).to_contain_text(f"{count} {verdict}")
    button.click()
    assert foot_of(page, "Ops$") == f"{count} of {len(level.ops)} rows"
    ops = page.get_by_role("grid", name="ops")
    assert set(ops.locator(".table-body .badge").all_inner_texts()) == {verdict}
    ops.get_by_role("row").nth(1).click()
    detail = page.locator(".table-detail")
    expect(detail).to_contain_text("(Tensor self, Tensor other) -> Tensor")
    expect(detail.get_by_role("link").first).to_have_text("layers.0.attention.wq")


def test_the_compiler_view_lists_graph_breaks_and_the_ops_of_a_graph(open_page, large) -> None:
    page = open_page(large, "#/compiler")
    broken = page.get_by_role("region", name=re.compile("Lines that break graphs"))
    for text in ("call of print", "print(x.shape)", "block.py:31", "Leave it out."):
        expect(broken).to_contain_text(text)
    graph = large.compiler.explanations[0].graphs[0]
    button = page.get_by_role("button", name=re.compile("graph 0"))
    expect(button).to_contain_text("broken at line 31")
    expect(button).to_have_attribute("aria-pressed", "true")
    lines = page.get_by_role("list", name="ops of graph 0")
    expect(lines.locator(".op")).to_have_count(len(graph.op))
    expect(lines.locator(".op").first).to_contain_text(f"{graph.op[0]}→ {graph.result[0]}")
    expect(lines).to_contain_text("block.py")
    page.get_by_role("button", name="Table", exact=True).click()
    ops = page.get_by_role("grid", name="ops of graph 0")
    expect(ops).to_have_attribute("aria-rowcount", str(len(graph.op) + 1))
    expect(ops).to_contain_text("aten.mm.default")
    diagnosis = large.compiler.diagnoses[0]
    expect(page.locator("#view")).to_contain_text(diagnosis.fact)


def test_a_comparison_lists_changes_and_filters_them(open_page) -> None:
    before, after = make_pair()
    record = build_page(after, against=before)
    page = open_page(record, "#/compare")
    comparison = record.comparison
    assert foot_of(page, "Changes") == f"{len(comparison.changes)} rows"
    area = next(i for i, one in enumerate(comparison.areas) if one.name == "collectives")
    rows = [one for one in comparison.changes if one.area == area]
    page.get_by_role("button", name=re.compile("^collectives")).click()
    assert foot_of(page, "Changes").startswith(f"{len(rows)} of ")
    changes = page.get_by_role("grid", name="changes")
    row = changes.get_by_role("row").nth(1)
    expect(row).to_contain_text("layers.{0…3}.attention.wo")
    row.locator(".badge").click()
    detail = page.locator(".table-detail")
    expect(detail).to_contain_text("implicit redistribution")
    page.get_by_role("group", name="which changes").get_by_role("button", name="Gone").click()
    assert foot_of(page, "Changes").startswith("0 of ")


def test_guards_are_in_words_and_recompilations_are_grouped_by_line(open_page) -> None:
    source = Source(file="net.py", line=3, function="forward", text="h = self.up(x)")
    tensor = (
        "check_tensor(self._modules['up']._parameters['weight'], Parameter, DispatchKeySet(CPU, "
        "AutogradCPU), torch.float32, device=None, requires_grad=True, size=[8, None], "
        "stride=[None, 1])"
    )
    guards = ("___check_torch_function_mode_stack()", "mode == 'train'", tensor, "unknown(form)")
    explanation = Explanation(
        rank=0,
        target="Net",
        fingerprint="f",
        recompiles=tuple(
            Recompile(
                function="forward",
                number=number,
                compile_id=f"0/{number}",
                guard="size mismatch",
                description=f"tensor x: size 0 is {number}",
                source=source,
            )
            for number in (1, 2)
        ),
        guards=(FrameGuards(compile_id="0/0", function="forward", guards=guards),),
    )
    recording = samples.make_recording(explanations=(explanation,))
    page = open_page(build_page(recording), "#/compiler")
    table = page.get_by_role("grid", name="guards")
    rows = [row.all_inner_texts() for row in map(_cells, table.get_by_role("row").all())]
    weight = "Parameter of float32[8, ?], strides [?, 1], requires a gradient"
    assert rows[1:] == [
        ["tensor", "self.up.weight", weight],
        ["value", "mode", "equals 'train'"],
        ["torch's state", "", "the same torch function modes are active"],
        ["other", "", "unknown(form)"],
    ]
    expect(page.get_by_role("region", name=re.compile("Guards"))).to_contain_text(
        "compilation 0/0 of forward"
    )
    table.get_by_role("row").nth(1).click()
    expect(page.locator(".table-detail")).to_contain_text(tensor)
    again = page.get_by_role("region", name=re.compile("Recompilations"))
    expect(again.locator(".break")).to_have_count(1)
    expect(again.locator(".source-text")).to_have_text("h = self.up(x)")
    expect(again.locator(".recompiles li")).to_have_text(
        ["compilation 2tensor x: size 0 is 1", "compilation 3tensor x: size 0 is 2"]
    )


def _cells(row: Locator) -> Locator:
    return row.get_by_role("gridcell")


def test_lines_open_in_the_chosen_editor_and_hostile_names_stay_paths(open_page, hostile) -> None:
    page = open_page(hostile, "#/compiler")
    page.get_by_role("button", name=re.compile("in an editor$")).first.click()
    dialog = page.get_by_role("dialog", name="editor")
    dialog.get_by_label("Editor").select_option(label="Cursor")
    dialog.get_by_label("Folder of the program").fill("/home/me/my project")
    dialog.get_by_role("button", name="close").click()
    links = page.locator("a[href^='cursor:']")
    expect(links.first).to_be_attached()
    schemes = page.evaluate("[...document.links].map((link) => new URL(link.href).protocol)")
    assert set(schemes) <= {"cursor:", "file:"}
    for href in links.evaluate_all("(links) => links.map((link) => link.getAttribute('href'))"):
        assert re.fullmatch(r"cursor://file/[!#-;=?-~]+:\d+", href), href
    page.reload()
    expect(page.locator("a[href^='cursor:']").first).to_be_attached()  # the browser kept it


def test_the_command_that_records_guards_names_the_target(open_page) -> None:
    recording = load(ROOT / "examples" / "recordings" / "vision.json.gz")
    page = open_page(build_page(recording), "#/compiler")
    command = "shardscope explain examples/vision.py --mesh dp=8 --guards"
    expect(page.get_by_text("Guards were not recorded")).to_have_text(
        f"Guards were not recorded: {command}"
    )
