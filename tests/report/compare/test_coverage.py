"""Which ops shard."""

from __future__ import annotations

from compared_recordings import list_changes, make_coverage
from sample_recordings import make_recording
from shardscope.record import Level, OpVerdict
from shardscope.report.compare.changes import Area


def test_coverage_compares_verdicts_per_op_and_level():
    before = make_recording(
        coverage=(
            make_coverage(
                {"mm": OpVerdict.SHARDED, "sort": OpVerdict.MISSING, "add": OpVerdict.SHARDED}
            ),
            make_coverage({"mm": OpVerdict.SHARDED}, Level.INDUCTOR),
        )
    )
    after = make_recording(
        coverage=(
            make_coverage({"mm": OpVerdict.REPLICATED, "sort": OpVerdict.DECOMPOSED}),
            make_coverage({"mm": OpVerdict.SHARDED, "cat": OpVerdict.WRONG}, Level.INDUCTOR),
        )
    )
    place = "layers.{0,1}.up"
    assert list_changes(before, after, Area.COVERAGE) == [
        f"changed worse | {place}: mm (exported): sharded → replicated",
        f"changed better | {place}: sort (exported): missing → decomposed",
        f"added worse | {place}: cat (inductor): – → wrong",
        f"gone other | {place}: add (exported): sharded → –",
    ]
