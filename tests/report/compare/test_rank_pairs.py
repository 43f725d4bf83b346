"""Which ranks are compared, and which are named."""

from __future__ import annotations

from compared_recordings import lines, list_changes, make_calls, make_traced, make_world
from sample_recordings import make_recording, make_run
from shardscope.report.compare.changes import Area
from shardscope.report.compare.compare_recordings import compare

CHOSEN_RANKS = "of each, the rank that sends most, or that needs most memory, is compared"


def test_ranks_are_compared_individually_and_named_where_not_all_changed():
    before = make_world({"a": 1}, {"a": 1}, {"a": 1}, {"b": 1})
    after = make_world({"a": 1}, {"a": 2}, {"a": 2}, {"b": 1})
    changes = compare(before, after)
    assert lines(changes, Area.COLLECTIVES) == [
        "changed worse | a: all_reduce[tp] in forward, ranks 1-2: 1 → 2"
    ]
    (row,) = changes.of(Area.COLLECTIVES)
    assert (row.axis, row.kind, row.phase, row.ranks) == ("tp", "all_reduce", "forward", "1-2")
    assert changes.notes == ()
    everywhere = make_world({"a": 2}, {"a": 2}, {"a": 2}, {"a": 1, "b": 1})
    assert list_changes(make_world(*[{"a": 1}] * 4), everywhere, Area.COLLECTIVES) == [
        "changed worse | a: all_reduce[tp] in forward, ranks 0-2: 1 → 2",
        "added worse | b: all_reduce[tp] in forward, rank 3: – → 1",
    ]


def test_the_busiest_ranks_are_compared_where_worlds_differ():
    before = make_world({"a": 1}, {"a": 3}, world_size=2)
    after = make_world({"a": 4}, {"a": 1}, {"a": 1}, world_size=4)
    changes = compare(before, after)
    assert lines(changes, Area.COLLECTIVES) == [
        "changed worse | a: all_reduce[tp] in forward: 3 → 4"
    ]
    assert changes.notes == (f"the worlds have 2 ranks and 4 ranks: {CHOSEN_RANKS}",)


def test_only_common_ranks_are_compared_where_a_recording_has_more():
    before, after = make_world({"a": 1}), make_world({"a": 1}, {"a": 5})
    changes = compare(before, after)
    assert lines(changes, Area.COLLECTIVES) == []
    assert changes.notes == ("only ranks that both recordings have are compared: 0",)
    elsewhere = make_recording(make_calls({"a": 2}, rank=3))
    assert compare(before, elsewhere).notes == (
        f"the recordings have no rank in common: {CHOSEN_RANKS}",
    )


def test_a_recording_without_ranks_is_compared():
    empty = make_recording(run=make_run(ranks=()), ranks=())
    assert list_changes(empty, make_traced({"a": 1}), Area.COLLECTIVES) == [
        "added worse | a: all_reduce[tp] in forward: – → 1"
    ]
