"""Views follow what is selected as far as their data can, and say what they do not follow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.record import (
    Agreement,
    Axis,
    CollectiveKind,
    Condition,
    Coverage,
    Divergence,
    Fallback,
    FallbackKind,
    Gap,
    Inserted,
    Level,
    OpCoverage,
    OpVerdict,
    Parallelization,
    Parity,
    Phase,
    RankSpan,
    Recording,
    Source,
    Suspect,
    SuspectOp,
    TensorKind,
    TensorVerdict,
)
from shardscope.record.units import format_bytes
from shardscope.report.html.html import build_page
from small_recordings import make_memory_recording

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect = pytest.importorskip("playwright.sync_api").expect

LINE = Source(file="net.py", line=7, function="forward", text="return x @ w")
ELSEWHERE = Source(file="net.py", line=9, function="forward", text="return x + w")
WQ, WO = "layers.0.attention.wq", "layers.1.attention.wo"


def make_checked() -> Recording:
    """A small Llama on 2 × 2 ranks with parity, a parallel program, a diagnosis and coverage."""
    llama = samples.make_llama(num_layers=2, dp=2, tp=2, ranks=(0, 1, 2, 3))
    axes = (Axis(name="tp", size=2),)
    bad = {"agreement": Agreement.DIFFERS, "ranks": (RankSpan(1),)}
    tensors = (
        TensorVerdict(name="", kind=TensorKind.OUTPUT, **bad),
        TensorVerdict(name=f"{WQ}.weight", kind=TensorKind.GRADIENT, **bad),
        TensorVerdict(name=f"{WO}.weight", kind=TensorKind.GRADIENT, agreement=Agreement.CLOSE),
    )
    divergence = Divergence(
        module=WQ, phase=Phase.FORWARD, suspect=Suspect.SCALED, detail="twice", source=LINE
    )
    inserted = tuple(
        Inserted(
            kind=CollectiveKind.ALL_REDUCE,
            axis="tp",
            num_ranks=2,
            size_bytes=1024,
            phase=Phase.FORWARD,
            node=f"n{layer}",
            module=f"layers.{layer}.attention.wo",
            cause=f"the plan's output of layers.{layer}.attention.wo",
            source=LINE,
        )
        for layer in range(2)
    )
    fallback = Fallback(
        axis="tp",
        kind=FallbackKind.REPLICATE,
        op="aten.sort",
        node="s",
        module=WO,
        placements=("S(0)",),
        size_bytes=2048,
        remedy="Leave it out.",
        source=ELSEWHERE,
    )
    program = Parallelization(
        program="Llama",
        axes=axes,
        is_training=True,
        num_ops=9,
        inserted=inserted,
        fallbacks=(fallback,),
        verdicts=tensors[2:],
    )
    diagnosis = replace(
        samples.make_diagnosis(Condition.WRONG_RESULT, "net"),
        suspects=(SuspectOp(op="aten.mm", module=WQ, source=LINE),),
    )
    return replace(
        llama,
        parity=(Parity(axes=axes, tensors=tensors, divergences=(divergence,)),),
        parallel=(program,),
        diagnoses=(diagnosis,),
        coverage=(Coverage(rank=0, level=Level.EXPORTED, axes=axes, has_plan=True, ops=_OPS),),
        gaps=(Gap(place="here", fact="odd", rank=2), Gap(place="there", fact="even")),
    )


_OPS = (
    OpCoverage(
        op="aten.mm",
        schema="mm()",
        verdict=OpVerdict.SHARDED,
        num_forward=4,
        modules=(WQ,),
        sources=(LINE,),
    ),
    OpCoverage(
        op="aten.sort", schema="sort()", verdict=OpVerdict.REPLICATED, num_backward=2, modules=(WO,)
    ),
)


def region(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=re.compile(name))


def grid_rows(page: Page, name: str) -> list[str]:
    """The first cells of the rows of a table."""
    rows = page.get_by_role("grid", name=name, exact=True).locator(".table-body [role=row]")
    return [row.get_by_role("gridcell").first.inner_text() for row in rows.all()]


def test_the_correctness_view_follows_modules_ranks_phases_axes_and_lines(open_page) -> None:
    record = build_page(make_checked())
    page = open_page(record, "#/proof")
    program = "inserted collectives of Llama"
    assert len(grid_rows(page, "compared tensors")) == 3
    assert "2 KiB" in page.get_by_role("grid", name=program).inner_text().replace("2.00", "2")

    page = open_page(record, "#/proof?m=layers.0")
    assert grid_rows(page, "compared tensors") == [f"{WQ}.weight"]
    parity = region(page, "Does the parallel model compute the same")
    expect(parity).to_contain_text("2 of 3 tensors differ")
    expect(parity).to_contain_text("In what is selected, 1 of 1 tensor differs.")
    expect(parity).to_contain_text("first differs in")
    partitioned = region(page, "partitioned for")
    expect(partitioned).to_contain_text("In what is selected, no tensor was compared.")
    expect(partitioned).to_contain_text("No fallback is in what is selected.")
    row = page.get_by_role("grid", name=program).get_by_role("row").nth(1)
    assert [row.get_by_role("gridcell").nth(at).inner_text() for at in (2, 3, 4)] == [
        "1",
        "1.00 KiB",
        "layers.0.attention.wo",
    ]

    page.get_by_role("grid", name=program).get_by_role("link", name="tp", exact=True).click()
    page.get_by_role("grid", name=program).get_by_role("link", name="all_reduce").click()
    chips = region(page, "selection").get_by_role("listitem")
    expect(chips).to_have_text(["modulelayers.0×", "axistp×", "kindall_reduce×"])

    page = open_page(record, "#/proof?phase=backward&rank=0")
    assert grid_rows(page, "compared tensors") == [f"{WO}.weight"]
    expect(region(page, "Does the parallel")).to_contain_text(
        "1 place where the versions first differ is not in what is selected."
    )
    page = open_page(record, "#/proof?axis=dp&line=net.py%3A9")
    assert grid_rows(page, program) == []
    texts = page.locator(".unfollowed").all_inner_texts()
    assert texts == [
        "Places that differ are not filtered by axis.",
        "Tensors are not filtered by axis and line.",
        "Tensors are not filtered by axis and line.",
    ]


def test_tensors_of_training_steps_follow_phases_steps_and_dtypes(open_page) -> None:
    kinds = (TensorKind.GRADIENT, TensorKind.CLIPPED, TensorKind.UPDATED)
    tensors = tuple(
        TensorVerdict(
            name=f"{WQ}.weight",
            kind=kind,
            step=step,
            dtype="bfloat16" if kind is TensorKind.GRADIENT else "float32",
            agreement=Agreement.CLOSE,
        )
        for step in (1, 2)
        for kind in kinds
    )
    parity = Parity(axes=(Axis(name="tp", size=2),), tensors=tensors)
    page = open_page(build_page(replace(make_checked(), parity=(parity,))), "#/proof")
    tensor_kinds = page.get_by_role("grid", name="compared tensors", exact=True).locator(
        ".table-body [role=row] [role=gridcell]:nth-child(2)"
    )
    for query, expected in {
        "phase=backward": ["gradient, step 1", "gradient, step 2"],
        "phase=optimizer&step=2": ["updated, step 2"],
        "dtype=float32&step=1": ["clipped, step 1", "updated, step 1"],
    }.items():
        page.evaluate("query => { location.hash = `#/proof?${query}` }", query)
        expect(tensor_kinds).to_have_text(expected)
        assert page.locator(".notice").count() == 0
    expect(region(page, "selection").get_by_role("listitem").nth(1)).to_have_text("step1 of 2×")


def test_coverage_and_diagnoses_follow_modules_lines_ranks_and_phases(open_page) -> None:
    record = build_page(make_checked())
    page = open_page(record, "#/coverage?phase=backward")
    verdicts = page.get_by_role("group", name="verdicts")
    expect(verdicts).to_have_text("1 replicated 100%")
    assert grid_rows(page, "ops") == ["aten.sort"]
    page = open_page(record, f"#/coverage?m={WQ}&axis=tp")
    expect(page.get_by_role("group", name="verdicts")).to_have_text("1 sharded 100%")
    expect(region(page, "^Ops$").locator(".unfollowed")).to_have_text("Not filtered by axis.")

    page = open_page(record, f"#/compiler?m={WQ}&line=net.py%3A7")
    expect(region(page, "Is net compiled correctly")).to_be_visible()
    page = open_page(record, "#/compiler?m=layers.1")
    expect(region(page, "Is net compiled correctly")).to_have_count(0)
    expect(page.locator("#view")).to_contain_text(
        "1 diagnosis of other ranks, modules or lines is not shown."
    )
    page = open_page(record, "#/overview?rank=3&kind=all_gather")
    gaps = region(page, "Gaps")
    expect(gaps.get_by_role("listitem")).to_have_count(1)
    expect(gaps.locator(".unfollowed")).to_have_text("Not filtered by kind.")
    expect(region(page, "Verdict")).to_contain_text("on the whole run, whatever is selected")


def test_the_matrix_of_ranks_follows_the_selection(open_page) -> None:
    llama = samples.make_llama(num_layers=1, dp=2, tp=2, ranks=(0, 1, 2, 3))
    calls = tuple(
        replace(call, wire_bytes=2 * call.wire_bytes) if call.rank == 3 else call
        for call in llama.collectives
    )
    record = build_page(replace(llama, collectives=calls))
    sent = sum(
        call.wire_bytes
        for call in calls
        if call.rank == 0 and call.axis == "tp" and call.phase is Phase.FORWARD
    )
    page = open_page(record, "#/communication?axis=tp&phase=forward")
    grid = page.get_by_role("slider", name="bytes from rank to rank")
    grid.focus()
    page.keyboard.press("ArrowDown")
    expect(grid).to_have_attribute("aria-valuetext", f"rank 0 to rank 1: {format_bytes(sent)}")
    page.keyboard.press("ArrowRight")
    expect(grid).to_have_attribute("aria-valuetext", "rank 0 to rank 2: 0 B")
    matrix = region(page, "Traffic between ranks")
    expect(matrix).to_contain_text("Of what is selected.")
    expect(matrix.locator(".unfollowed")).to_have_count(0)
    page = open_page(record, "#/communication?rank=0&range=0-3")
    grid = page.get_by_role("slider", name="bytes from rank to rank")
    matrix = region(page, "Traffic between ranks")
    expect(matrix.locator(".unfollowed")).to_have_text("Not filtered by range.")
    box = grid.locator("canvas").bounding_box()
    corner = {"x": box["width"] - 3, "y": box["height"] - 3}
    grid.locator("canvas").hover(position=corner)
    expect(page.get_by_role("tooltip")).to_contain_text("Click to select the sender.")
    grid.locator("canvas").click(position=corner)
    expect(region(page, "selection").get_by_role("listitem").first).to_contain_text("rank2")
    grid.press("Enter")
    expect(region(page, "selection").get_by_role("listitem")).to_have_count(1)  # the range
    page = open_page(record, "#/communication?kind=all_reduce&m=layers.0.attention.wq")
    expect(region(page, "Traffic between ranks")).to_contain_text("Nothing of it was sent.")


def test_memory_over_the_step_follows_the_selected_modules(open_page) -> None:
    recording = make_memory_recording()
    table = recording.memory[0].allocations
    module = next(name for name in table.modules if name)
    rows = [
        (start, end, num_bytes)
        for start, end, num_bytes, owner in zip(
            table.start, table.end, table.num_bytes, table.module, strict=True
        )
        if owner >= 0 and (table.modules[owner] + ".").startswith(f"{module}.")
    ]
    most = max(
        sum(num_bytes for start, end, num_bytes in rows if start <= sample.order < end)
        for sample in recording.memory[0].samples
    )
    page = open_page(build_page(recording), f"#/memory?m={module}&axis=tp")
    panel = region(page, "Memory over the step")
    expect(panel).to_contain_text(f"Drawn: what is selected, at most {format_bytes(most)}")
    expect(panel.locator("svg")).to_contain_text(f"most of it {format_bytes(most)}")
    expect(panel.locator(".unfollowed")).to_have_text("These figures are not filtered by module.")
    page = open_page(build_page(recording), f"#/overview?m={module}")
    expect(region(page, "Memory of a step")).to_contain_text("drawn: what is selected")


def test_parameters_follow_the_axis_that_their_placements_name(open_page) -> None:
    page = open_page(build_page(samples.make_llama(num_layers=1, dp=2, tp=2)), "#/sharding?axis=tp")
    panel = region(page, "^Parameters$")
    expect(panel).to_contain_text("Those that are divided along tp.")
    page.evaluate("location.hash = '#/sharding?dtype=int8'")
    expect(page.locator(".notice")).to_contain_text("dtype int8")
    without_calls = replace(samples.make_llama(num_layers=1, dp=2, tp=2), collectives=())
    page = open_page(build_page(without_calls), "#/sharding?axis=tp&dtype=float32")
    panel = region(page, "^Parameters$")
    expect(page.locator(".notice")).to_have_count(0)
    expect(panel).to_contain_text("Those that are divided along tp.")
    expect(panel.locator(".unfollowed")).to_have_count(0)
    expect(region(page, "What a rank holds").locator(".empty, .unfollowed").first).to_be_visible()


ADDRESSES = {
    "#/communication?axis=zz&kind=all_gather": ["axis zz (there are dp and tp)"],
    "#/memories?rank=99": [
        "view memories (the overview is shown; there are overview, modules, communication, "
        "sharding, coverage, compiler and 3 more)",
        "rank 99 (ranks are 0 to 3)",
    ],
    "#/modules?m=layers.7&by=volume": [
        "module layers.7 (no module has this name)",
        "by volume (there are wire, count and parameters)",
    ],
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_unknown_parts_of_an_address_are_named_and_can_be_cleared(open_page, address: str) -> None:
    llama = samples.make_llama(num_layers=1, dp=2, tp=2, ranks=(0, 1, 2, 3))
    page = open_page(build_page(llama), address)
    notice = region(page, "unknown parts of the address")
    expect(notice.get_by_role("listitem")).to_have_text(ADDRESSES[address])
    notice.get_by_role("link", name="Clear").click()
    expect(notice).to_have_count(0)
    assert ("kind=all_gather" in page.url) == ("kind=all_gather" in address)
    page.go_back()
    expect(notice).to_be_visible()


def test_an_unknown_sort_order_is_named_below_its_table(open_page) -> None:
    page = open_page(
        build_page(samples.make_llama(num_layers=1)), "#/communication?sort.causes=-size"
    )
    foot = region(page, "^Causes$").locator(".table-foot")
    expect(foot).to_contain_text("The address sorts by size, which is no column.")
    foot.get_by_role("button", name="clear").click()
    expect(foot).not_to_contain_text("which is no column")
