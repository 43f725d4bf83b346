"""What ranks hold: parameters, modules and what was done to them."""

from __future__ import annotations

from compared_recordings import list_changes, make_module, make_parameter
from sample_recordings import make_recording, make_run
from shardscope.record import Mark, MarkKind, RankSpan
from shardscope.report.compare.changes import Area


def test_parameters_are_compared_by_everything_an_audit_knows():
    old = make_parameter(rule="layers.*", fsdp_group="layers.0")
    new = make_parameter(
        placements=("Replicate()",),
        local_shape=(8, 8),
        dtype="bfloat16",
        is_trainable=False,
        rule=None,
        fsdp_group="",
        alias_group="head.weight",
    )
    before = make_recording(modules=(make_module("a", old),))
    after = make_recording(modules=(make_module("a", new),))
    assert list_changes(before, after, Area.PLACEMENTS) == [
        "changed other | a: weight: placement: tp: Shard(0) → tp: Replicate()",
        "changed other | a: weight: shape on a rank: 4×8 → 8×8",
        "changed other | a: weight: dtype: float32 → bfloat16",
        "changed other | a: weight: trainable: yes → no",
        "changed other | a: weight: rule: layers.* → none",
        "changed other | a: weight: FSDP group: layers.0 → the root",
        "changed other | a: weight: tied to: none → head.weight",
    ]


def test_what_only_an_audit_records_is_compared_if_both_recordings_have_it():
    audited = make_recording(modules=(make_module("a", make_parameter(rule="a*")),))
    traced = make_recording(modules=(make_module("a", make_parameter(live_name=None)),))
    assert list_changes(audited, traced, Area.PLACEMENTS) == []


def test_added_or_removed_parameters_have_a_single_row():
    before = make_recording(modules=(make_module("a", make_parameter()), make_module("b")))
    after = make_recording(modules=(make_module("a"), make_module("b", make_parameter("bias"))))
    assert list_changes(before, after, Area.PLACEMENTS) == [
        "added other | b: bias: – → 8×8, float32, tp: Shard(0)",
        "gone other | a: weight: 8×8, float32, tp: Shard(0) → –",
    ]


def test_classes_and_marks_of_modules_are_compared():
    mark = Mark(kind=MarkKind.FULLY_SHARD, axes=("dp",), detail="reshards after forward")
    before = make_recording(modules=(make_module("a"), make_module("b", marks=(mark,))))
    after = make_recording(modules=(make_module("a", type="Norm", marks=(mark,)), make_module("b")))
    assert list_changes(before, after, Area.PLACEMENTS) == [
        "changed other | a: class: Linear → Norm",
        "added other | a: fully shard: – → reshards after forward over dp",
        "gone other | b: fully shard: reshards after forward over dp → –",
    ]


def test_ranks_that_hold_different_shards_are_named():
    def recorded(last_rows: int):
        rows = {(RankSpan(0, 3),): 3, (RankSpan(3),): last_rows}
        modules = [
            make_module("a", make_parameter(local_shape=(size, 8)), ranks=ranks)
            for ranks, size in rows.items()
        ]
        return make_recording(run=make_run(ranks=(0, 1, 2, 3)), modules=tuple(modules))

    assert list_changes(recorded(1), recorded(2), Area.PLACEMENTS) == [
        "changed other | a: weight: shape on a rank: 3×8 (rank 0-2), 1×8 (rank 3) → "
        "3×8 (rank 0-2), 2×8 (rank 3)"
    ]
    assert list_changes(recorded(1), recorded(1), Area.PLACEMENTS) == []
