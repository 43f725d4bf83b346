"""What the compiler does: breaks, recompilations, and whether it is right."""

from __future__ import annotations

from msgspec.structs import replace

from compared_recordings import list_changes, make_explanation
from sample_recordings import make_diagnosis, make_recording
from shardscope.record import Condition, Recompile, SkippedFrame
from shardscope.report.compare.changes import Area
from shardscope.report.compare.compare_recordings import compare


def test_break_sites_are_known_by_their_code_wherever_the_line_moved():
    before = make_recording(explanations=(make_explanation((10, "print(x)", 1), (20, "y()", 1)),))
    after = make_recording(
        explanations=(make_explanation((13, "print(x)", 2), (25, "z()", 1), num_graphs=3),)
    )
    assert list_changes(before, after, Area.GRAPH_BREAKS) == [
        "changed worse | graphs: 1 → 3",
        "changed worse | breaks at train.py:13: 1 → 2",
        "added worse | breaks at train.py:25: – → 1",
        "gone better | breaks at train.py:20: 1 → –",
    ]
    moved = make_recording(explanations=(make_explanation((11, "print(x)", 1), (21, "y()", 1)),))
    assert list_changes(before, moved, Area.GRAPH_BREAKS) == []
    (_, first, second) = compare(make_recording(explanations=(make_explanation(),)), after).of(
        Area.GRAPH_BREAKS
    )
    assert (first.because, second.because) == (
        "call of a builtin: print(x)",
        "call of a builtin: z()",
    )


def test_recompilations_skipped_functions_and_failures_are_compared():
    again = Recompile(
        function="forward", number=1, compile_id="0/1", guard="g", description="x has another size"
    )
    skipped = SkippedFrame(function="helper", reason="it is a generator")
    bare = make_recording(explanations=(make_explanation(),))
    renamed = make_explanation(
        recompiles=(again, again), skipped_frames=(skipped,), failure="ValueError: no", target="B"
    )
    assert list_changes(bare, make_recording(explanations=(renamed,)), Area.GRAPH_BREAKS) == [
        "added worse | recompilations of forward: – → 2",
        "added worse | helper not compiled: – → 1",
        "added worse | failure: – → ValueError: no",
    ]


def test_functions_are_paired_by_name_where_there_are_several():
    first, second = make_explanation(target="A"), make_explanation(target="B", num_graphs=2)
    before = make_recording(explanations=(first, second))
    after = make_recording(explanations=(replace(second, graphs=()), first))
    assert list_changes(before, after, Area.GRAPH_BREAKS) == ["changed better | B: graphs: 2 → 0"]


def test_diagnoses_compare_what_a_function_is():
    before = make_diagnosis(Condition.FINE, "f")
    after = replace(make_diagnosis(Condition.WRONG_RESULT, "f"), part="fuse")
    changes = list_changes(
        make_recording(diagnoses=(replace(before, stage=None, part=""),)),
        make_recording(diagnoses=(after,)),
        Area.DIAGNOSES,
    )
    assert changes == ["changed worse | f with f: fine → wrong result (decomposition fuse)"]
