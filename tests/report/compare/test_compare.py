"""Every area: what was added, what is gone, what changed, and whether that is worse."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from compared_recordings import (
    MIB,
    UNASKED,
    add_reductions,
    lines,
    make_calls,
    make_coverage,
    make_explanation,
    make_fallback,
    make_memory,
    make_module,
    make_parameter,
    make_program,
    make_traced,
    make_world,
    told,
)
from sample_recordings import (
    make_collective,
    make_diagnosis,
    make_llama,
    make_recording,
    make_run,
)
from shardscope.record import (
    Agreement,
    Axis,
    Call,
    CollectiveKind,
    Condition,
    Divergence,
    Finding,
    Gap,
    Inserted,
    Level,
    Mark,
    MarkKind,
    MemoryKind,
    Parity,
    Phase,
    Placed,
    PlacedKind,
    RankMemory,
    RankSpan,
    Recompile,
    Severity,
    SkippedFrame,
    Suspect,
    TensorKind,
    TensorVerdict,
    Verdict,
)
from shardscope.report.compare.changes import Area
from shardscope.report.compare.compare import compare

HELD = MemoryKind.PARAMETERS
SAVED = MemoryKind.ACTIVATIONS


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
    found = [(row.area, row.path, row.before, row.after) for row in back.rows]
    for row in there.rows:
        index = found.index((row.area, row.path, row.after, row.before))
        other = back.rows[index]
        assert (other.status, other.delta) == (turned[row.status], -row.delta)
        assert other.is_worse == (None if row.is_worse is None else not row.is_worse)
    assert len(there.rows) == len(back.rows)


def test_collectives_are_counted_by_module_kind_axis_and_phase():
    before = make_traced({"a": 1, "b": 2, "c": 1})
    after = make_traced({"b": 3, "c": 1, "d": 1})
    assert told(before, after, Area.COLLECTIVES) == [
        "changed worse | b: all_reduce[tp] in forward: 2 → 3",
        "added worse | d: all_reduce[tp] in forward: – → 1",
        "gone better | a: all_reduce[tp] in forward: 1 → –",
    ]
    backward = make_recording(make_calls({"a": 1}, phase=Phase.BACKWARD))
    assert told(make_traced({"a": 1}), backward, Area.COLLECTIVES) == [
        "added worse | a: all_reduce[tp] in backward: – → 1",
        "gone better | a: all_reduce[tp] in forward: 1 → –",
    ]


def test_collectives_of_the_root_and_of_no_module_are_told_apart():
    before = make_recording()
    after = make_recording((make_collective(owner=""), make_collective(owner=None, order=1)))
    assert told(before, after, Area.COLLECTIVES) == [
        "added worse | the model itself: all_reduce[world] in forward: – → 1",
        "added worse | outside any module: all_reduce[world] in forward: – → 1",
    ]


def test_bytes_on_the_wire_and_put_in_are_compared():
    before = make_recording(make_calls({"a": 1}))
    after = make_recording(make_calls({"a": 1}, input_bytes=8192, wire_bytes=14336))
    assert told(before, after, Area.COLLECTIVES) == []
    assert told(before, after, Area.BYTES) == [
        "changed worse | a: all_reduce[tp] in forward, on the wire: 7.00 KiB → 14.0 KiB",
        "changed worse | a: all_reduce[tp] in forward, put in: 4.00 KiB → 8.00 KiB",
    ]


def test_a_collective_that_is_added_says_why_and_where(llama):
    (row,) = compare(llama, add_reductions(llama)).of(Area.COLLECTIVES)
    assert str(row) == "layers.{0…31}.attention.wo ×32: all_reduce[tp] in forward: – → 1"
    assert row.because == (
        "DTensor Partial(sum) → Replicate() unasked, for aten.add.Tensor "
        "(shardscope/cli/_llama.py:152)"
    )


def test_another_cause_of_the_same_collective_is_a_change():
    call = Call(api="dist.all_reduce")
    before = make_recording(make_calls({"a": 2}, cause=call))
    after = make_recording(make_calls({"a": 2}, cause=UNASKED))
    said = "DTensor Partial(sum) → Replicate() unasked, for aten.add.Tensor"
    what = "a: all_reduce[tp] in forward"
    assert told(before, after, Area.COLLECTIVES) == []
    assert told(before, after, Area.CAUSES) == [
        f"changed worse | {what}: call of dist.all_reduce → {said}"
    ]
    assert told(after, before, Area.CAUSES)[0].startswith("changed better")
    both = make_recording((*before.collectives, *after.collectives[:1]))
    assert told(before, both, Area.CAUSES) == [
        f"changed worse | {what}: call of dist.all_reduce → 2× call of dist.all_reduce, 1× {said}"
    ]


def test_memory_is_compared_by_kind_and_module():
    before = make_recording(memory=(make_memory((HELD, "a", MIB), (SAVED, "b", MIB)),))
    after = make_recording(
        memory=(make_memory((HELD, "a", MIB), (SAVED, "c", 3 * MIB), reserved_bytes=5 * MIB),)
    )
    assert told(before, after, Area.MEMORY) == [
        "changed worse | peak: 2.00 MiB → 4.00 MiB",
        "added worse | reserved by the allocator: – → 5.00 MiB",
        "changed worse | activations at the peak: 1.00 MiB → 3.00 MiB",
        "added worse | c: activations at the peak: – → 3.00 MiB",
        "gone better | b: activations at the peak: 1.00 MiB → –",
    ]


def test_a_step_that_no_longer_fits_is_worse():
    sizes = {"device_bytes": 8 * MIB}
    before = make_recording(memory=(make_memory(needed_bytes=7 * MIB, **sizes),))
    after = make_recording(memory=(make_memory(needed_bytes=9 * MIB, **sizes),))
    found = told(before, after, Area.MEMORY)
    assert "changed worse | on a device of 8.00 MiB: fits → does not fit" in found


def test_ranks_whose_memory_changes_alike_share_a_row():
    def profiles(*sizes: int):
        made = [make_memory((HELD, "a", size), rank=rank) for rank, size in enumerate(sizes)]
        ranks = tuple(range(len(sizes)))
        return make_recording(run=make_run(ranks=ranks), memory=tuple(made))

    found = told(profiles(*[MIB] * 4), profiles(MIB, 2 * MIB, 2 * MIB, MIB), Area.MEMORY)
    assert "changed worse | peak, ranks 1-2: 1.00 MiB → 2.00 MiB" in found
    found = told(profiles(*[MIB] * 4), profiles(*[2 * MIB] * 4), Area.MEMORY)
    assert "changed worse | peak: 1.00 MiB → 2.00 MiB" in found


def test_break_sites_are_known_by_their_code_wherever_the_line_moved():
    before = make_recording(explanations=(make_explanation((10, "print(x)", 1), (20, "y()", 1)),))
    after = make_recording(
        explanations=(make_explanation((13, "print(x)", 2), (25, "z()", 1), num_graphs=3),)
    )
    assert told(before, after, Area.GRAPH_BREAKS) == [
        "changed worse | graphs: 1 → 3",
        "changed worse | breaks at train.py:13: 1 → 2",
        "added worse | breaks at train.py:25: – → 1",
        "gone better | breaks at train.py:20: 1 → –",
    ]
    moved = make_recording(explanations=(make_explanation((11, "print(x)", 1), (21, "y()", 1)),))
    assert told(before, moved, Area.GRAPH_BREAKS) == []
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
    other = make_explanation(
        recompiles=(again, again), skipped_frames=(skipped,), failure="ValueError: no", target="B"
    )
    assert told(bare, make_recording(explanations=(other,)), Area.GRAPH_BREAKS) == [
        "added worse | recompilations of forward: – → 2",
        "added worse | helper left to Python: – → 1",
        "added worse | failure: – → ValueError: no",
    ]


def test_functions_are_paired_by_name_where_there_are_several():
    first, second = make_explanation(target="A"), make_explanation(target="B", num_graphs=2)
    before = make_recording(explanations=(first, second))
    after = make_recording(explanations=(replace(second, graphs=()), first))
    assert told(before, after, Area.GRAPH_BREAKS) == ["changed better | B: graphs: 2 → 0"]


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
    assert told(before, after, Area.PLACEMENTS) == [
        "changed other | a: weight: placement: tp: Shard(0) → tp: Replicate()",
        "changed other | a: weight: shape on a rank: 4×8 → 8×8",
        "changed other | a: weight: dtype: float32 → bfloat16",
        "changed other | a: weight: trainable: yes → no",
        "changed other | a: weight: rule: layers.* → none",
        "changed other | a: weight: FSDP group: layers.0 → the root",
        "changed other | a: weight: tied to: none → head.weight",
    ]


def test_what_only_an_audit_knows_is_compared_if_both_recordings_have_one():
    audited = make_recording(modules=(make_module("a", make_parameter(rule="a*")),))
    traced = make_recording(modules=(make_module("a", make_parameter(live_name=None)),))
    assert told(audited, traced, Area.PLACEMENTS) == []


def test_parameters_that_came_or_went_have_one_row():
    before = make_recording(modules=(make_module("a", make_parameter()), make_module("b")))
    after = make_recording(modules=(make_module("a"), make_module("b", make_parameter("bias"))))
    assert told(before, after, Area.PLACEMENTS) == [
        "added other | b: bias: – → 8×8, float32, tp: Shard(0)",
        "gone other | a: weight: 8×8, float32, tp: Shard(0) → –",
    ]


def test_classes_and_marks_of_modules_are_compared():
    mark = Mark(kind=MarkKind.FULLY_SHARD, axes=("dp",), detail="reshards after forward")
    before = make_recording(modules=(make_module("a"), make_module("b", marks=(mark,))))
    after = make_recording(modules=(make_module("a", type="Norm", marks=(mark,)), make_module("b")))
    assert told(before, after, Area.PLACEMENTS) == [
        "changed other | a: class: Linear → Norm",
        "added other | a: fully shard: – → reshards after forward over dp",
        "gone other | b: fully shard: reshards after forward over dp → –",
    ]


def test_ranks_that_hold_other_pieces_are_named():
    def recorded(last_rows: int):
        rows = {(RankSpan(0, 3),): 3, (RankSpan(3),): last_rows}
        modules = [
            make_module("a", make_parameter(local_shape=(size, 8)), ranks=ranks)
            for ranks, size in rows.items()
        ]
        return make_recording(run=make_run(ranks=(0, 1, 2, 3)), modules=tuple(modules))

    assert told(recorded(1), recorded(2), Area.PLACEMENTS) == [
        "changed other | a: weight: shape on a rank: 3×8 (rank 0-2), 1×8 (rank 3) → "
        "3×8 (rank 0-2), 2×8 (rank 3)"
    ]
    assert told(recorded(1), recorded(1), Area.PLACEMENTS) == []


def test_coverage_compares_verdicts_per_op_and_level():
    before = make_recording(
        coverage=(
            make_coverage({"mm": Verdict.SHARDED, "sort": Verdict.MISSING, "add": Verdict.SHARDED}),
            make_coverage({"mm": Verdict.SHARDED}, Level.INDUCTOR),
        )
    )
    after = make_recording(
        coverage=(
            make_coverage({"mm": Verdict.REPLICATED, "sort": Verdict.DECOMPOSED}),
            make_coverage({"mm": Verdict.SHARDED, "cat": Verdict.WRONG}, Level.INDUCTOR),
        )
    )
    place = "layers.{0,1}.up"
    assert told(before, after, Area.COVERAGE) == [
        f"changed worse | {place}: mm (exported): sharded → replicated",
        f"changed better | {place}: sort (exported): missing → decomposed",
        f"added worse | {place}: cat (inductor): – → wrong",
        f"gone other | {place}: add (exported): sharded → –",
    ]


def test_parity_compares_verdicts_and_where_versions_part():
    def verdict(name: str, agreement: Agreement) -> TensorVerdict:
        return TensorVerdict(name=name, kind=TensorKind.GRADIENT, agreement=agreement)

    axes = (Axis(name="tp", size=4),)
    parts = Divergence(
        module="a", phase=Phase.BACKWARD, suspect=Suspect.MISSING_REDUCTION, detail="an addend"
    )
    before = Parity(
        axes=axes,
        tensors=(verdict("a.weight", Agreement.EQUAL), verdict("b.weight", Agreement.DIFFERS)),
    )
    after = Parity(
        axes=axes,
        tensors=(verdict("a.weight", Agreement.DIFFERS), verdict("b.weight", Agreement.CLOSE)),
        divergences=(parts,),
    )
    found = told(make_recording(parity=(before,)), make_recording(parity=(after,)), Area.PARITY)
    assert found == [
        "changed worse | a: gradient weight: agrees → differs",
        "changed better | b: gradient weight: differs → agrees",
        "added worse | a: parts in backward: – → missing reduction",
    ]
    noise = replace(before, tensors=(verdict("a.weight", Agreement.CLOSE), before.tensors[1]))
    assert not told(make_recording(parity=(before,)), make_recording(parity=(noise,)), Area.PARITY)


def test_parallel_programs_compare_collectives_fallbacks_placements_and_memory():
    inserted = Inserted(
        kind=CollectiveKind.ALL_REDUCE,
        axis="tp",
        num_ranks=4,
        size_bytes=64,
        phase=Phase.FORWARD,
        node="n",
        module="a",
        cause="the plan",
    )
    placed = Placed(
        name="a.weight",
        kind=PlacedKind.PARAMETER,
        shape=(8, 8),
        local_shape=(2, 8),
        dtype="float32",
        placements=("S(0)",),
        local_bytes=64,
    )
    held = RankMemory(
        ranks=(RankSpan(0, 4),),
        parameter_bytes=1,
        buffer_bytes=0,
        input_bytes=0,
        gradient_bytes=0,
        intermediate_bytes=0,
        peak_bytes=1024,
    )
    before = make_program(inserted=(inserted,), placed=(placed,), rank_memory=(held,))
    whole = replace(placed, placements=("R",), local_shape=(8, 8))
    after = make_program(
        inserted=(inserted, inserted),
        fallbacks=(make_fallback("layers.0"), make_fallback("layers.1")),
        placed=(whole,),
        rank_memory=(replace(held, peak_bytes=2048),),
        unverified="the loss is random",
    )
    both = make_recording(parallel=(before,)), make_recording(parallel=(after,))
    assert told(*both, Area.PARALLEL) == [
        "changed worse | peak of tensors: 1.00 KiB → 2.00 KiB",
        "changed worse | a: all_reduce[tp] in forward: 1 → 2",
        "changed worse | a: all_reduce[tp] in forward, put in: 64 B → 128 B",
        "added worse | layers.{0,1} ×2: fallback of aten.sort.default along tp (replicate): – → 1",
        "changed other | a: parameter weight: S(0); 2×8 float32 → R; 8×8 float32",
    ]
    assert told(*both, Area.PARITY) == ["changed worse | verification: done → the loss is random"]


def test_diagnoses_compare_what_a_function_is():
    before = make_diagnosis(Condition.FINE, "f")
    after = replace(make_diagnosis(Condition.WRONG_RESULT, "f"), part="fuse")
    found = told(
        make_recording(diagnoses=(replace(before, stage=None, part=""),)),
        make_recording(diagnoses=(after,)),
        Area.DIAGNOSES,
    )
    assert found == ["changed worse | f with f: fine → wrong result (decomposition fuse)"]


def test_findings_are_new_gone_or_say_something_else():
    def finding(subject: str, fact: str, severity: Severity = Severity.WARNING, rank: int = 0):
        return Finding(
            rule="r", severity=severity, subject=subject, fact=fact, remedy="Do.", rank=rank
        )

    before = make_recording(findings=(finding("a", "1 MiB"), finding("b", "x"), finding("c", "y")))
    after = make_recording(
        findings=(
            finding("c", "y", rank=3),
            finding("a", "2 MiB"),
            finding("d", "z", Severity.ERROR),
            finding("e", "z", Severity.INFO),
        )
    )
    assert told(before, after, Area.FINDINGS) == [
        "changed other | r of a: warning: 1 MiB → warning: 2 MiB",
        "added worse | r of d: – → error: z",
        "added other | r of e: – → info: z",
        "gone better | r of b: warning: x → –",
    ]


def test_findings_of_ranks_count_once_and_those_of_layers_fold():
    modules = tuple(make_module(f"layers.{index}.up") for index in range(3))
    found = tuple(
        Finding(
            rule="r",
            severity=Severity.ERROR,
            subject=f"layers.{index}.up.weight",
            fact=f"layers.{index}.up.weight is whole",
            remedy="Cut it.",
            rank=rank,
        )
        for index in range(3)
        for rank in range(2)
    )
    before, after = make_recording(modules=modules), make_recording(modules=modules, findings=found)
    assert told(before, after, Area.FINDINGS) == [
        "added worse | layers.{0…2}.up ×3: r of weight: – → error: layers.{0…2}.up.weight is whole"
    ]
    (total,) = (one for one in compare(before, after).totals if one.area is Area.FINDINGS)
    assert (total.before, total.after) == ("none", "3 errors")


def test_gaps_are_compared_and_lost_records_noted():
    before = make_recording(gaps=(Gap(place="p", fact="f", rank=0),))
    after = make_recording(
        gaps=(Gap(place="p", fact="f", rank=1), Gap(place="q", fact="g", is_loss=True))
    )
    changes = compare(before, after)
    assert lines(changes, Area.GAPS) == ["added worse | q: – → g"]
    assert changes.notes == (
        "records of the second were lost: what is missing there may have happened",
    )


def test_run_facts_are_compared_but_not_the_command():
    before = make_recording(run=make_run(command="a.py", instruments=("trace",)))
    axes = (Axis(name="dp", size=2), Axis(name="tp", size=4))
    after = make_recording(
        run=make_run(
            command="b.py", instruments=("trace", "audit"), torch_version="2.14.0", axes=axes
        )
    )
    assert told(before, after, Area.RUN) == [
        "added other | mesh: – → dp=2 × tp=4",
        "changed other | torch: 2.13.0 → 2.14.0",
        "changed other | instruments: trace → trace, audit",
    ]


def test_what_only_one_recording_has_is_not_compared_but_noted():
    traced = replace(make_traced({"a": 1}), run=make_run(instruments=("trace",)))
    profiled = make_recording(
        run=make_run(instruments=("memory",)),
        memory=(make_memory(),),
        coverage=(make_coverage({}),),
    )
    changes = compare(traced, profiled)
    assert lines(changes) == ["changed other | instruments: trace → memory"]
    assert changes.notes == (
        "only the first recording has collectives: not compared",
        "only the second recording has memory and coverage: not compared",
    )


def test_a_step_that_says_nothing_is_compared_if_somebody_looked():
    silent = make_recording(run=make_run(instruments=("trace",)))
    spoken = replace(make_traced({"a": 1}), run=make_run(instruments=("trace",)))
    assert len(told(spoken, silent, Area.COLLECTIVES)) == 1


def test_ranks_are_compared_one_by_one_and_named_where_not_all_changed():
    before = make_world({"a": 1}, {"a": 1}, {"a": 1}, {"b": 1})
    after = make_world({"a": 1}, {"a": 2}, {"a": 2}, {"b": 1})
    changes = compare(before, after)
    assert lines(changes, Area.COLLECTIVES) == [
        "changed worse | a: all_reduce[tp] in forward, ranks 1-2: 1 → 2"
    ]
    assert changes.notes == ()
    everywhere = make_world({"a": 2}, {"a": 2}, {"a": 2}, {"a": 1, "b": 1})
    assert told(make_world(*[{"a": 1}] * 4), everywhere, Area.COLLECTIVES) == [
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
    assert changes.notes == (
        "the worlds have 2 ranks and 4 ranks: the busiest rank of each is compared",
    )


def test_only_common_ranks_are_compared_where_one_recording_has_more():
    before, after = make_world({"a": 1}), make_world({"a": 1}, {"a": 5})
    changes = compare(before, after)
    assert lines(changes, Area.COLLECTIVES) == []
    assert changes.notes == ("only ranks that both recordings have are compared: 0",)
    elsewhere = make_recording(make_calls({"a": 2}, rank=3))
    assert compare(before, elsewhere).notes == (
        "the recordings have no rank in common: the busiest rank of each is compared",
    )


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("_orig_mod.layers.0", "layers.0"),
        ("layers.0._fsdp_wrapped_module.up", "layers.0.up"),
        ("layers._checkpoint_wrapped_module.0", "layers.0"),
        ("module._orig_mod.layers.0", "layers.0"),
        ("module", ""),
    ],
)
def test_modules_that_wrappers_renamed_are_the_same(wrapped, plain):
    before, after = make_traced({plain: 1, "": 1}), make_traced({wrapped: 1, "": 1})
    if wrapped == "module":
        before, after = make_traced({"": 1}), make_traced({wrapped: 1})
    assert not compare(before, after)
    assert not compare(after, before)


def test_a_module_that_is_really_called_module_keeps_its_name():
    before = make_traced({"module.a": 1})
    after = make_traced({"module.a": 1, "head": 1})
    assert told(before, after, Area.COLLECTIVES) == [
        "added worse | head: all_reduce[tp] in forward: – → 1"
    ]


def test_names_that_wrappers_put_into_facts_are_cleaned_too():
    def recorded(prefix: str):
        one = make_parameter(fsdp_group=f"{prefix}layers.0", alias_group=f"{prefix}head.weight")
        return make_recording(
            modules=(make_module(f"{prefix}layers.0", one),),
            memory=(make_memory((HELD, f"{prefix}layers.0", MIB)),),
        )

    assert not compare(recorded(""), recorded("_orig_mod."))


def test_a_recording_without_ranks_is_compared():
    empty = make_recording(run=make_run(ranks=()), ranks=())
    assert told(empty, make_traced({"a": 1}), Area.COLLECTIVES) == [
        "added worse | a: all_reduce[tp] in forward: – → 1"
    ]


def test_totals_are_those_of_the_busiest_rank():
    before, after = make_world({"a": 1}, {"a": 2}), make_world({"a": 1}, {"a": 5})
    totals = {one.area: (one.before, one.after) for one in compare(before, after).totals}
    assert totals[Area.COLLECTIVES] == ("2", "5")
    assert totals[Area.BYTES] == ("14.0 KiB", "35.0 KiB")


def test_many_collectives_and_modules_fold_to_a_few_rows():
    before = make_llama(num_layers=100)
    changes = compare(before, add_reductions(before))
    assert [row.repeat for row in changes.rows] == [100] * 3
    assert len(changes.rows[0].modules) == 100
