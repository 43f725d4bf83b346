"""All areas at once: what is compared at all, both ways round, and what it adds up to."""

from __future__ import annotations

from msgspec.structs import replace

from compared_recordings import (
    add_reductions,
    lines,
    list_changes,
    make_coverage,
    make_memory,
    make_traced,
    make_world,
)
from sample_recordings import make_llama, make_recording, make_run
from shardscope.record import Axis, Gap
from shardscope.report.compare.changes import Area
from shardscope.report.compare.compare_recordings import compare


def test_a_recording_has_no_changes_from_itself(any_recording):
    changes = compare(any_recording, any_recording)
    assert not changes
    assert str(changes) == "before → after: no change"
    assert changes.notes == ()


def test_the_other_way_round_what_was_added_is_gone_and_worse_is_better(any_recording):
    before = make_traced({"layers.0.up": 2}, gaps=(Gap(place="p", fact="f"),))
    there, back = (
        compare(*pair, is_folded=False)
        for pair in ((before, any_recording), (any_recording, before))
    )
    turned = {"added": "gone", "gone": "added", "changed": "changed"}
    reversed_changes = [(row.area, row.path, row.before, row.after) for row in back.rows]
    for row in there.rows:
        index = reversed_changes.index((row.area, row.path, row.after, row.before))
        reversed_change = back.rows[index]
        assert (reversed_change.status, reversed_change.delta) == (turned[row.status], -row.delta)
        assert reversed_change.is_worse == (None if row.is_worse is None else not row.is_worse)
    assert len(there.rows) == len(back.rows)


def test_run_facts_are_compared_but_not_the_command():
    before = make_recording(run=make_run(command="a.py", instruments=("trace",)))
    axes = (Axis(name="dp", size=2), Axis(name="tp", size=4))
    after = make_recording(
        run=make_run(
            command="b.py", instruments=("trace", "audit"), torch_version="2.14.0", axes=axes
        )
    )
    assert list_changes(before, after, Area.RUN) == [
        "added other | mesh: – → dp=2 × tp=4",
        "changed other | torch: 2.13.0 → 2.14.0",
        "changed other | instruments: trace → trace, audit",
    ]


def test_parts_of_a_single_recording_are_noted_but_not_compared():
    traced = replace(make_traced({"a": 1}), run=make_run(instruments=("trace",)))
    profiled = make_recording(
        run=make_run(instruments=("memory",)),
        memory=(make_memory(),),
        coverage=(make_coverage({}),),
    )
    changes = compare(traced, profiled)
    assert lines(changes) == ["changed other | instruments: trace → memory"]
    assert changes.notes == (
        "findings come from different checks (trace; memory)",
        "only the first recording has collectives: not compared",
        "only the second recording has memory and coverage: not compared",
    )


def test_collectives_of_more_forward_passes_are_noted():
    once, twice, uncounted = (
        replace(make_traced({"a": 1}), run=make_run(num_forwards=number)) for number in (1, 2, None)
    )
    words = "collectives are of different numbers of forward passes"
    assert compare(once, twice).notes == (f"{words} (1 and 2)",)
    assert compare(once, uncounted).notes == (f"{words} (1 and not counted)",)
    assert compare(twice, twice).notes == ()


def test_a_step_without_collectives_is_compared_if_it_was_traced():
    silent = make_recording(run=make_run(instruments=("trace",)))
    spoken = replace(make_traced({"a": 1}), run=make_run(instruments=("trace",)))
    assert len(list_changes(spoken, silent, Area.COLLECTIVES)) == 1


def test_totals_are_those_of_the_busiest_rank():
    before, after = make_world({"a": 1}, {"a": 2}), make_world({"a": 1}, {"a": 5})
    totals = {total.area: (total.before, total.after) for total in compare(before, after).totals}
    assert totals[Area.COLLECTIVES] == ("2", "5")
    assert totals[Area.BYTES] == ("14.0 KiB", "35.0 KiB")


def test_many_collectives_and_modules_fold_to_a_few_rows():
    before = make_llama(num_layers=100)
    changes = compare(before, add_reductions(before))
    assert [row.repeat for row in changes.rows] == [100] * 3
    assert len(changes.rows[0].modules) == 100
