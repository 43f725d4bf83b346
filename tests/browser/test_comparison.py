"""Pages of two recordings, and files that are dropped onto a page, in a real browser."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from compared_recordings import make_pair
from shardscope.record import Finding, Module, Phase, Recording, Severity, load, save
from shardscope.record.units import format_bytes
from shardscope.report.html.html import build_page, render_page

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect = pytest.importorskip("playwright.sync_api").expect

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "recordings"
VIEWS = ("Overview", "Modules", "Communication", "Sharding", "Coverage", "Memory")
SENT = "bytes sent per rank (ring estimate)"


def panel_of(page: Page, view: str) -> Locator:
    return page.get_by_role("region", name=re.compile(f"^{view}: compared with "))


def rows_of(panel: Locator) -> list[str]:
    rows = panel.locator(".table-body [role=row]")
    return [row.inner_text() for row in rows.all()]


def drop(page: Page, file: Path) -> None:
    """Drop a file onto the page, as the system does."""
    content = base64.b64encode(file.read_bytes()).decode()
    page.evaluate(
        """([name, content]) => {
            const bytes = Uint8Array.from(atob(content), (char) => char.charCodeAt(0));
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([bytes], name));
            const options = { dataTransfer, bubbles: true, cancelable: true };
            for (const type of ["dragover", "drop"]) {
                document.body.dispatchEvent(new DragEvent(type, options));
            }
        }""",
        [file.name, content],
    )


def test_every_view_shows_differences(open_page) -> None:
    before, after = make_pair()
    record = build_page(after, against=before, titles=("before.json", "after.json"))
    page = open_page(record, "#/communication")
    wire = {figure.label: figure.value for figure in record.earlier_figures if figure.group == SENT}
    assert wire["all_reduce[tp]"] == 104
    row = panel_of(page, "Communication").get_by_role("row").filter(has_text="all_reduce[tp]")
    expect(row.first).to_contain_text("104 B")
    expect(row.first).to_contain_text("+128 MiB")
    page.get_by_role("tab", name="Overview").click()
    findings = panel_of(page, "Overview")
    expect(findings).to_contain_text(re.compile(r"In other views, \d+ differ: see Compare"))
    expect(findings.get_by_role("row").nth(1)).to_contain_text("warning")
    assert build_page(before).figures == record.earlier_figures


def sum_sent(recording: Recording, **fields: object) -> int:
    return sum(
        call.wire_bytes
        for call in recording.collectives
        if all(getattr(call, name) == value for name, value in fields.items())
    )


def test_differences_are_of_what_is_selected_in_both_recordings(open_page) -> None:
    before, after = make_pair()
    record = build_page(after, against=before, titles=("before.json", "after.json"))
    page = open_page(record, "#/communication?axis=tp&phase=forward&m=layers.1")
    panel = panel_of(page, "Communication")
    expect(panel).to_contain_text("differ in what is selected")
    expect(panel.locator(".unfollowed")).to_have_count(0)

    def sent(recording: Recording) -> str:
        inside = [
            call.wire_bytes
            for call in recording.collectives
            if (call.axis, call.phase) == ("tp", Phase.FORWARD)
            and f"{call.owner}.".startswith("layers.1.")
        ]
        return format_bytes(sum(inside))

    assert sent(before) != sent(after)
    row = panel.get_by_role("row").filter(has_text="all").filter(has_text=SENT).first
    cells = [cell.inner_text() for cell in row.get_by_role("gridcell").all()]
    assert (cells[0], cells[4], cells[5]) == ("all", sent(before), sent(after))

    page = open_page(record, "#/communication?axis=tp&range=0-9")
    expect(panel_of(page, "Communication").locator(".unfollowed")).to_have_text(
        "Not filtered by range."
    )
    page = open_page(record, "#/modules?axis=tp&show=bytes")
    root = page.get_by_role("treegrid").get_by_role("row").nth(1)
    change = sum_sent(after, axis="tp") - sum_sent(before, axis="tp")
    expect(root).to_contain_text(f"+{format_bytes(change)}")
    expect(panel_of(page, "Modules").locator(".unfollowed")).to_have_text("Not filtered by axis.")
    page = open_page(record, "#/overview?m=layers.0.attention&axis=tp&differences=all")
    panel = panel_of(page, "Overview")
    expect(panel.locator(".unfollowed")).to_have_text("Not filtered by axis.")
    expect(panel).to_contain_text("Not shown: 1 figure of the whole run.")  # gaps have no module
    assert "mixed-meshes" in "".join(rows_of(panel))
    page.evaluate("location.hash = location.hash.replace('overview', 'modules')")
    rows = {row.split("\n")[0]: row.split("\n")[-2:] for row in rows_of(panel_of(page, "Modules"))}
    inside = [m for m in after.modules if f"{m.name}.".startswith("layers.0.attention.")]
    assert rows["all"] == [str(len(inside))] * 2
    page.evaluate("location.hash = location.hash.replace('modules', 'sharding')")
    expect(panel_of(page, "Sharding")).to_be_visible()
    placed = [row.split("\n") for row in rows_of(panel_of(page, "Sharding"))]
    numbers = [[int(cell.replace("none", "0")) for cell in cells[-2:]] for cells in placed]
    counts = [sum(column) for column in zip(*numbers, strict=True)]
    assert counts == [sum(len(module.parameters) for module in inside)] * 2


def test_changes_are_filtered_by_axis_kind_phase_and_rank(open_page) -> None:
    before, after = make_pair()
    record = build_page(after, against=before)
    page = open_page(record, "#/compare?axis=tp&phase=forward")
    changes = record.comparison.changes
    shown = [row for row in changes if (row.axis, row.phase) == ("tp", "forward")]
    assert 0 < len(shown) < len(changes)
    panel = page.get_by_role("region", name="Changes", exact=True)
    expect(panel.locator(".table-foot")).to_have_text(f"{len(shown)} of {len(changes)} rows")
    others = sum(not row.axis or not row.phase for row in changes)
    expect(panel).to_contain_text(f"{others} that have no axis and phase are not shown.")
    totals = [
        format_bytes(sum_sent(recording, axis="tp", phase=Phase.FORWARD))
        for recording in (before, after)
    ]
    area = page.get_by_role("button", name=re.compile("^bytes"))
    expect(area.locator(".area-figures")).to_have_text(" → ".join(totals))
    findings = page.get_by_role("button", name=re.compile("^findings"))
    expect(findings).to_contain_text("of the whole run; nothing selected")


def make_earlier(after: Recording) -> Recording:
    """The same with fewer collectives, a module less, another class, a finding and a gap less."""
    return replace(
        after,
        collectives=after.collectives[: len(after.collectives) * 2 // 3],
        modules=(*after.modules[:-1], Module(name="old", type="Linear", ranks=after.run.ranks)),
        findings=(Finding(rule="odd", severity=Severity.ERROR, subject="s", fact="f", remedy="r"),),
    )


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_a_dropped_recording_is_compared_like_a_report_of_it(
    open_page, tmp_path: Path, name: str
) -> None:
    after = load(EXAMPLES / f"{name}.json.gz")
    before = make_earlier(after)
    (tmp_path / "earlier.html").write_text(render_page(build_page(before)), encoding="utf-8")
    save(before, tmp_path / "earlier.json.gz")
    page = open_page(build_page(after, files=("after.json.gz",)), "#/communication?axis=dp")
    shown: dict[str, dict[str, list[str]]] = {}
    for file in ("earlier.html", "earlier.json.gz"):
        drop(page, tmp_path / file)
        shown[file] = {}
        for view in VIEWS:
            page.get_by_role("tab", name=re.compile(f"^{view}")).click()
            panel = panel_of(page, view)
            if panel.count():
                shown[file][view] = rows_of(panel)
    report, recording = shown["earlier.html"], shown["earlier.json.gz"]
    assert set(report) == set(recording) >= {"Overview", "Modules", "Communication", "Memory"}
    for view in report:  # bytes of parameters come first, and are not compared of a recording
        rows = [row for row in report[view] if "bytes of parameters" not in row]
        assert recording[view][: len(rows)] == rows[: len(recording[view])], view
    assert recording["Overview"][0].startswith("error")
    command = "shardscope report after.json.gz --against earlier.json.gz"
    page.get_by_role("tab", name="Communication").click()
    expect(panel_of(page, "Communication")).not_to_contain_text("Not compared")
    page.get_by_role("tab", name="Sharding").click()
    expect(panel_of(page, "Sharding")).to_contain_text(
        f"Not compared in the browser: bytes of parameters. For these: {command}"
    )
    page.get_by_role("tab", name="Compare").click()
    expect(page.locator(".compare-command code")).to_have_text(command)


def test_the_picture_of_modules_shows_what_changed_since_a_dropped_recording(
    open_page, tmp_path: Path
) -> None:
    after = samples.make_llama(num_layers=2, dp=2, tp=2)
    before = samples.make_llama(num_layers=3, dp=2, tp=2)
    save(before, tmp_path / "before.json")
    page = open_page(build_page(after), "#/modules?axis=tp")
    expect(page.get_by_role("button", name="Change", exact=True)).to_have_count(0)
    drop(page, tmp_path / "before.json")
    expect(page.get_by_role("button", name="Change", exact=True)).to_be_visible()
    picture = page.get_by_role("tree", name="modules by bytes sent")
    picture.focus()
    change = sum_sent(before, axis="tp") - sum_sent(after, axis="tp")
    root = page.get_by_role("treegrid").get_by_role("row").nth(1)
    expect(root).to_contain_text(f"−{format_bytes(change)}")
    gone = format_bytes(
        sum(
            call.wire_bytes
            for call in before.collectives
            if call.axis == "tp" and f"{call.owner}.".startswith("layers.2.")
        )
    )
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    expect(picture.get_by_role("treeitem")).to_have_text(f"layers.2: gone, was {gone}")
    page = open_page(build_page(after), "#/modules?line=shardscope%2Fcli%2F_llama.py%3A140")
    drop(page, tmp_path / "before.json")
    expect(page.get_by_role("region", name="Where it goes")).to_contain_text(
        "Not compared with before.json by line."
    )


def test_wrong_files_are_refused_and_a_comparison_can_be_ended(open_page, tmp_path: Path) -> None:
    after = samples.make_llama(num_layers=1)
    (tmp_path / "notes.txt").write_text("hello")
    save(after, tmp_path / "same.json.gz")
    page = open_page(build_page(after), "#/communication")
    drop(page, tmp_path / "notes.txt")
    expect(page.locator(".drop-error span")).to_have_text(
        re.compile("'notes.txt' is neither a report nor a recording of shardscope. Drop a report")
    )
    drop(page, tmp_path / "same.json.gz")
    panel = panel_of(page, "Communication")
    expect(panel).to_contain_text(re.compile(r"^.*None of \d+ figures differ"))
    expect(page.locator(".drop-error")).to_have_count(0)
    bar = page.get_by_role("region", name="comparison")
    expect(bar).to_contain_text("Compared with same.json.gz")
    bar.get_by_role("link", name="Show all differences").click()
    expect(page.get_by_role("tab", name="Compare")).to_have_attribute("aria-selected", "true")
    bar.get_by_role("button", name="End comparison").click()
    expect(panel).to_have_count(0)
    expect(bar).to_have_count(0)
