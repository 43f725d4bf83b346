"""What ranks say: collectives, their bytes and their causes."""

from __future__ import annotations

from compared_recordings import UNASKED, add_reductions, list_changes, make_calls, make_traced
from sample_recordings import make_collective, make_recording
from shardscope.record import Call, Phase
from shardscope.report.compare.changes import Area
from shardscope.report.compare.compare_recordings import compare


def test_collectives_are_counted_by_module_kind_axis_and_phase():
    before = make_traced({"a": 1, "b": 2, "c": 1})
    after = make_traced({"b": 3, "c": 1, "d": 1})
    assert list_changes(before, after, Area.COLLECTIVES) == [
        "changed worse | b: all_reduce[tp] in forward: 2 → 3",
        "added worse | d: all_reduce[tp] in forward: – → 1",
        "gone better | a: all_reduce[tp] in forward: 1 → –",
    ]
    backward = make_recording(make_calls({"a": 1}, phase=Phase.BACKWARD))
    assert list_changes(make_traced({"a": 1}), backward, Area.COLLECTIVES) == [
        "added worse | a: all_reduce[tp] in backward: – → 1",
        "gone better | a: all_reduce[tp] in forward: 1 → –",
    ]


def test_collectives_of_the_root_and_of_no_module_are_distinguished():
    before = make_recording()
    after = make_recording((make_collective(owner=""), make_collective(owner=None, order=1)))
    assert list_changes(before, after, Area.COLLECTIVES) == [
        "added worse | the model itself: all_reduce[world] in forward: – → 1",
        "added worse | outside any module: all_reduce[world] in forward: – → 1",
    ]


def test_bytes_sent_and_of_inputs_are_compared():
    before = make_recording(make_calls({"a": 1}))
    after = make_recording(make_calls({"a": 1}, input_bytes=8192, wire_bytes=14336))
    assert list_changes(before, after, Area.COLLECTIVES) == []
    assert list_changes(before, after, Area.BYTES) == [
        "changed worse | a: all_reduce[tp] in forward, sent: 7.00 KiB → 14.0 KiB",
        "changed worse | a: all_reduce[tp] in forward, input: 4.00 KiB → 8.00 KiB",
    ]


def test_a_collective_that_is_added_says_why_and_where(llama):
    (row,) = compare(llama, add_reductions(llama)).of(Area.COLLECTIVES)
    assert str(row) == "layers.{0…31}.attention.wo ×32: all_reduce[tp] in forward: – → 1"
    assert row.because == (
        "implicit redistribution Partial(sum) → Replicate(), required by aten.add.Tensor "
        "(shardscope/cli/_llama.py:152)"
    )


def test_another_cause_of_the_same_collective_is_a_change():
    call = Call(api="dist.all_reduce")
    before = make_recording(make_calls({"a": 2}, cause=call))
    after = make_recording(make_calls({"a": 2}, cause=UNASKED))
    cause = "implicit redistribution Partial(sum) → Replicate(), required by aten.add.Tensor"
    line = "a: all_reduce[tp] in forward"
    assert list_changes(before, after, Area.COLLECTIVES) == []
    assert list_changes(before, after, Area.CAUSES) == [
        f"changed worse | {line}: call of dist.all_reduce → {cause}"
    ]
    assert list_changes(after, before, Area.CAUSES)[0].startswith("changed better")
    recording = make_recording((*before.collectives, *after.collectives[:1]))
    assert list_changes(before, recording, Area.CAUSES) == [
        f"changed worse | {line}: call of dist.all_reduce → 2× call of dist.all_reduce, 1× {cause}"
    ]
