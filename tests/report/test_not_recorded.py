"""No renderer shows a figure for what was not recorded: nothing, a dash or a word, never zero."""

from __future__ import annotations

import csv
import io
import re

import pytest

from compared_recordings import make_memory
from sample_recordings import make_collective, make_recording, make_run
from shardscope.record import (
    Axis,
    CompiledGraph,
    Coverage,
    Explanation,
    GraphEnd,
    Level,
    MemoryKind,
    Module,
    OpCoverage,
    OpVerdict,
    Parameter,
    RankSpan,
    Recording,
    StageTime,
)
from shardscope.report.export.csv import TABLES, render_table
from shardscope.report.export.markdown import render_markdown
from shardscope.report.export.metrics import list_scalars
from shardscope.report.export.perfetto import render_perfetto
from shardscope.report.html.html import build_page, render_html
from shardscope.report.text.summary import render_plain, render_text
from shardscope.report.text.views import render_views

# A figure of nothing, as people read them: 0 B, 0 ns, 0 parameters, 0%.
ZERO = re.compile(r"(?<![\d.,])0 ?(B|ns|ms|%|FLOP|parameters?|collectives?)\b|\b0\.0+ ?(ms|s)\b")
VIEWS = ("overview", "modules", "communication", "sharding", "coverage", "compiler", "memory")


def make_unknown() -> Recording:
    """Everything that may be not recorded is not."""
    parameter = Parameter(
        name="w",
        shape=(4, 4),
        local_shape=(2, 4),
        dtype="float32",
        placements=("Shard(0)",),
        axes=("tp",),
    )
    graph = CompiledGraph(
        index=0,
        compile_id="0/0",
        function="f",
        num_inputs=1,
        num_outputs=1,
        end=GraphEnd.RETURN,
        fingerprint="f",
    )
    op = OpCoverage(op="aten.sin.default", schema="", verdict=OpVerdict.LOCAL, num_forward=1)
    axes = (Axis(name="tp", size=2),)
    return make_recording(
        (make_collective(owner=""), make_collective(owner="", order=1)),
        run=make_run(world_size=2, ranks=(0,), axes=axes, is_simulated=True),
        modules=(Module(name="", type="Net", ranks=(RankSpan(0),), parameters=(parameter,)),),
        memory=(make_memory((MemoryKind.PARAMETERS, "", 1024), device_bytes=4096),),
        coverage=(Coverage(rank=0, level=Level.EXPORTED, axes=axes, has_plan=True, ops=(op,)),),
        explanations=(
            Explanation(
                rank=0,
                target="f",
                fingerprint="f",
                graphs=(graph,),
                stages=(StageTime(stage="aot", num_calls=1, total_ns=None),),
            ),
        ),
    )


def show(recording: Recording, *views: str) -> str:
    return render_plain(render_views(recording, views), width=160)


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_of_text_has_a_zero_for_it(view: str) -> None:
    text = show(make_unknown(), view)
    assert ZERO.search(text) is None, text


@pytest.mark.parametrize("render", [render_text, render_markdown])
def test_summaries_have_no_zero_for_it(render) -> None:
    text = render(make_unknown())
    assert ZERO.search(text) is None, text
    assert "what it needs was not recorded" in text


def test_views_say_what_was_not_recorded() -> None:
    nothing = make_recording()
    for view in VIEWS[1:]:
        assert "not recorded" in show(nothing, view), view
    assert "1 parameter; sizes were not recorded" in show(make_unknown(), "sharding")
    assert "Times were not recorded." in show(make_unknown(), "compiler")


def test_only_an_inspected_model_is_reported_to_have_no_parameters() -> None:
    module = Module(name="", type="Net", ranks=(RankSpan(0),))
    audited = make_recording(run=make_run(instruments=("audit",)), modules=(module,))
    assert "Sharded modules  0 parameters\n" in render_text(audited)
    assert "parameters" not in show(make_recording(modules=(module,)), "overview")


def test_exports_leave_it_out() -> None:
    unknown = make_unknown()
    scalars = list_scalars(unknown)
    assert [name for name in scalars if name.startswith("memory/")] == ["memory/peak_bytes"]
    assert (scalars["run/is_simulated"], scalars["run/recorded_ranks"]) == (1, 1)
    tables = {
        name: list(csv.DictReader(io.StringIO(b"".join(render_table(unknown, name)).decode())))
        for name in TABLES
    }
    assert [row["start_ns"] for row in tables["collectives"]] == ["", ""]
    assert {row["is_simulated"] for row in tables["collectives"]} == {"true"}
    assert [(row["global_bytes"], row["local_bytes"]) for row in tables["parameters"]] == [("", "")]
    assert [(row["global_bytes"], row["local_bytes"]) for row in tables["modules"]] == [("", "")]
    assert [(row["flops"], row["is_covered"]) for row in tables["coverage"]] == [("", "")]
    assert b"simulated order, not time" in render_perfetto(unknown)


def test_a_page_has_null_for_it() -> None:
    page = build_page(make_unknown())
    assert page.communication is not None
    assert page.communication.calls.start_ns == ()
    assert page.modules.recorded == ("wire", "parameters", "peak")
    (curve,) = page.memory
    assert (curve.first_peak_bytes, curve.reserved_bytes, curve.needed_bytes) == (None, None, None)
    assert curve.room == (
        "whether it fits in 4.00 KiB is not known: what it needs was not recorded"
    )
    assert page.sharding is not None
    assert (page.sharding.global_bytes, page.sharding.local_bytes) == (None, None)
    assert page.compiler is not None
    assert page.compiler.explanations[0].stages[0].total_ns is None
    assert page.coverage[0].ops[0].flops is None
    assert not [fact for fact in page.facts if ZERO.search(f"{fact.value} {fact.note}")]
    assert "not recorded" in render_html(make_recording())
