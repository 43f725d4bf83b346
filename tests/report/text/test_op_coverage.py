"""Coverage as a table and as CSV: complete, sorted, and sanitized."""

from __future__ import annotations

import csv
from io import StringIO

from msgspec.structs import replace

from sample_recordings import make_recording
from shardscope.record import (
    Axis,
    Coverage,
    Level,
    Move,
    OpCoverage,
    OpVerdict,
    Recording,
    Source,
)
from shardscope.record.units import format_flops
from shardscope.report.export.csv import render_coverage_csv
from shardscope.report.text.summary import render_text

HOSTILE = "evil\x1b[31m\n=cmd [bold]"


def make_op(op: str, verdict: OpVerdict = OpVerdict.SHARDED, **changes: object) -> OpCoverage:
    base = OpCoverage(op=op, schema=f"{op}(Tensor self) -> Tensor", verdict=verdict, num_forward=1)
    return replace(base, **changes)


def make_coverage(*ops: OpCoverage, level: Level = Level.EXPORTED, rank: int = 0) -> Coverage:
    axes = (Axis(name="tp", size=2),)
    return Coverage(rank=rank, level=level, axes=axes, has_plan=False, ops=ops)


def make_covered(*levels: Coverage) -> Recording:
    return replace(make_recording(), coverage=levels)


MIXED = make_coverage(
    make_op("aten.mm.default", num_forward=6, num_backward=2, flops=3_000_000),
    make_op("aten.small.default", OpVerdict.MISSING, num_forward=2, flops=0),
    make_op(
        "aten.big.default",
        OpVerdict.WRONG,
        flops=1_000_000,
        detail="with self as Shard(1) result 0 is off",
        remedy="Do not shard self.",
        modules=("layers.0", "layers.1"),
        sources=(Source(file="model.py", line=7, function="forward", text="x.big()"),),
    ),
)


def test_the_share_of_calls_and_of_flops_that_shard_is_shown_for_every_level() -> None:
    core = make_coverage(make_op("aten.t.default"), level=Level.CORE_ATEN)
    text = render_text(make_covered(MIXED, core), width=100)
    assert "exported  73% of 11 calls, 75% of 4.00 MFLOP; 1 of 3 ops shard" in text
    assert "core_aten 100% of 1 call; 1 of 1 op shard\n" in text
    assert "on tp=2, each dim of each input in turn" in text


def test_what_blocks_first_is_what_computes_most_with_module_line_and_remedy() -> None:
    text = render_text(make_covered(MIXED), width=100)
    blockers = text[text.index("What blocks sharding first") :]
    assert blockers.index("wrong aten.big.default") < blockers.index("missing aten.small.default")
    assert "layers.0 + 1" in blockers
    assert "model.py:7 forward" in blockers
    assert "→ Do not shard self." in blockers


def test_ops_that_shard_block_nothing() -> None:
    text = render_text(make_covered(make_coverage(make_op("aten.t.default"))))
    assert "What blocks" not in text
    assert "No collectives" not in text


def test_moves_show_what_the_costliest_sends() -> None:
    move = Move(argument="self", before=("Shard(0)",), after=("Replicate",), num_bytes=2048)
    op = make_op("aten.mm.default", OpVerdict.REDISTRIBUTED, moves=(move,))
    assert "2.00 KiB" in render_text(make_covered(make_coverage(op)), width=120)


def test_a_model_without_ops_says_so() -> None:
    assert "The model called no ops." in render_text(make_covered(make_coverage()))


def test_ranks_of_a_merged_recording_have_tables_of_their_own() -> None:
    levels = [make_coverage(make_op("aten.t.default"), rank=rank) for rank in (0, 1)]
    text = render_text(make_covered(*levels))
    assert "Op coverage (exported, rank 0)" in text
    assert "Op coverage (exported, rank 1)" in text


def test_hostile_names_stay_on_their_lines_and_run_nowhere() -> None:
    op = make_op(HOSTILE, OpVerdict.MISSING, detail=HOSTILE, remedy=HOSTILE, modules=(HOSTILE,))
    recording = make_covered(make_coverage(op))
    assert "\x1b" not in render_text(recording, width=60)
    text = render_coverage_csv(recording).decode()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2


def test_the_table_has_a_row_for_each_op_of_each_level() -> None:
    core = make_coverage(make_op("aten.t.default"), level=Level.CORE_ATEN)
    text = render_coverage_csv(make_covered(MIXED, core)).decode()
    rows = list(csv.DictReader(StringIO(text)))
    assert [(row["level"], row["op"], row["verdict"], row["is_covered"]) for row in rows] == [
        ("exported", "aten.mm.default", "sharded", "true"),
        ("exported", "aten.small.default", "missing", "false"),
        ("exported", "aten.big.default", "wrong", "false"),
        ("core_aten", "aten.t.default", "sharded", "true"),
    ]
    assert rows[2]["sources"] == "model.py:7"
    assert rows[2]["modules"] == "layers.0 layers.1"


def test_flops_are_counted_in_thousands() -> None:
    counts = [0, 512, 1500, 2_000_000, 240 * 10**12, 10**22]
    shown = ["0 FLOP", "512 FLOP", "1.50 kFLOP", "2.00 MFLOP", "240 TFLOP", "10000 EFLOP"]
    assert [format_flops(value) for value in counts] == shown
