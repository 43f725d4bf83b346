"""The verdict: each rule of docs/guide/verdict.md, their order, and what was not checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from checked_programs import make_checked
from sample_recordings import make_collective, make_diagnosis, make_recording, make_run
from shardscope.record import (
    Agreement,
    Axis,
    BreakSite,
    BucketReduce,
    Call,
    CollectiveKind,
    CompiledGraph,
    Condition,
    Coverage,
    Divergence,
    Explanation,
    Fallback,
    FallbackKind,
    Finding,
    FullyShard,
    Gap,
    GraphEnd,
    Group,
    Level,
    Mark,
    MarkKind,
    MemoryKind,
    MemoryProfile,
    MemoryUse,
    Module,
    OpCoverage,
    OpVerdict,
    Parallelization,
    Parameter,
    Parity,
    Phase,
    RankProcess,
    RankSpan,
    Recording,
    Redistribute,
    RunComparison,
    RunDeviation,
    Severity,
    Source,
    Stop,
    Suspect,
    TensorKind,
    TensorVerdict,
    ValueKind,
)
from shardscope.report.compare.changes_text import judge_changes
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.model.traffic_totals import fold_ranks
from shardscope.report.text.judgements import Concern, Judgement
from shardscope.report.text.verdict import RunVerdict, judge

MIB = 1024**2
GIB = 1024**3
LINE = Source(file="train.py", line=12)
GATHER = FullyShard(action="unshard", num_parameters=9)
IMPLICIT = Redistribute(
    before=("Shard(1)",), after=("Replicate",), asked_by="aten.topk.default", is_implicit=True
)


DEFAULTS = {
    "kind": CollectiveKind.ALL_GATHER,
    "axis": "tp",
    "wire_bytes": MIB,
    "input_bytes": MIB,
    "source": LINE,
}


def judged(recording: Recording) -> RunVerdict:
    return judge(recording, fold_ranks(recording))


def first_of(recording: Recording) -> Concern:
    return judged(recording).concerns[0]


def calls(*changes: dict[str, Any]) -> tuple[Any, ...]:
    """Collectives of rank 0; each dict may have `times`."""
    issued: list[Any] = []
    for change in changes:
        for _ in range(change.get("times", 1)):
            fields = {name: value for name, value in change.items() if name != "times"}
            fields = DEFAULTS | {"owner": f"layers.{len(issued)}"} | fields
            issued.append(make_collective(order=len(issued), **fields))
    return tuple(issued)


def traced(
    *changes: dict[str, Any], run: dict[str, Any] | None = None, **records: Any
) -> Recording:
    facts: dict[str, Any] = {"instruments": ("trace",), "num_forwards": 1} | (run or {})
    return make_recording(collectives=calls(*changes), run=make_run(**facts), **records)


def finding(rule: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(rule=rule, severity=severity, subject="w", fact="it is odd.", remedy="Fix it.")


def audited(*findings: Finding) -> Recording:
    parameter = Parameter(
        name="weight",
        shape=(8,),
        local_shape=(1,),
        dtype="float32",
    )
    module = Module(name="", type="Net", ranks=(RankSpan(0),), parameters=(parameter,))
    run = make_run(instruments=("audit",))
    return make_recording(modules=(module,), run=run, findings=findings)


def replicated(memory_bytes: int) -> Finding:
    return replace(finding("replicated", Severity.WARNING), memory_bytes=memory_bytes)


def profile(needed: int | None, device: int | None) -> Recording:
    use = MemoryUse(kind=MemoryKind.ACTIVATIONS, module="layers.0", num_bytes=3 * GIB)
    memory = MemoryProfile(
        rank=0,
        peak_bytes=4 * GIB,
        peak_order=0,
        peak_phase=Phase.BACKWARD,
        peak_module="layers.0",
        at_peak=(use,),
        needed_bytes=needed,
        device_bytes=device,
    )
    return make_recording(memory=(memory,), run=make_run(instruments=("memory",)))


def compared(*agreements: Agreement) -> Recording:
    tensors = tuple(
        TensorVerdict(name=str(agreement), kind=TensorKind.GRADIENT, agreement=agreement)
        for agreement in agreements
    )
    divergence = Divergence(
        module="layers.1.wo",
        phase=Phase.BACKWARD,
        suspect=Suspect.MISSING_REDUCTION,
        detail="partial",
        source=LINE,
    )
    parity = Parity(
        axes=(Axis(name="tp", size=8),),
        tensors=tensors,
        divergences=(divergence,) if Agreement.DIFFERS in agreements else (),
    )
    return make_recording(parity=(parity,), run=make_run(instruments=("parity",)))


def explained(*sites: BreakSite) -> Recording:
    graph = CompiledGraph(
        index=0,
        compile_id="0/0",
        function="f",
        num_inputs=1,
        num_outputs=1,
        end=GraphEnd.RETURN,
        fingerprint="x",
    )
    explanation = Explanation(
        rank=0, target="step", fingerprint="x", graphs=(graph,), break_sites=sites
    )
    run = make_run(world_size=1, instruments=("explain",))
    return make_recording(explanations=(explanation,), run=run)


def covered(verdict: OpVerdict, *, has_plan: bool = True) -> Recording:
    op = OpCoverage(op="aten.topk.default", schema="topk", verdict=verdict, sources=(LINE,))
    coverage = Coverage(rank=0, level=Level.EXPORTED, axes=(), has_plan=has_plan, ops=(op,))
    return make_recording(coverage=(coverage,), run=make_run(instruments=("coverage",)))


def partitioned(*agreements: Agreement, fallbacks: tuple[Fallback, ...] = ()) -> Recording:
    verdicts = tuple(
        TensorVerdict(name="y", kind=TensorKind.OUTPUT, agreement=agreement)
        for agreement in agreements
    )
    program = Parallelization(
        program="Net",
        axes=(Axis(name="tp", size=2),),
        is_training=False,
        num_ops=3,
        verdicts=verdicts,
        fallbacks=fallbacks,
        unverified="" if agreements else "it needs 2 GPUs.",
    )
    return make_recording(parallel=(program,), run=make_run(instruments=("parallelize",)))


FALLBACK = Fallback(
    axis="tp",
    kind=FallbackKind.REPLICATE,
    op="aten.sort.default",
    node="sort",
    module="head",
    placements=("S(0)",),
    size_bytes=3 * MIB,
    remedy="",
)
ACROSS = Group(name="tp[0-15]", torch_name="1", ranks=(RankSpan(0, 16),), num_ranks=16, axis="tp")
WITHIN = Group(name="tp[0-7]", torch_name="1", ranks=(RankSpan(0, 8),), num_ranks=8, axis="tp")
SPANNING = replace(ACROSS, axis=None)
TWO_AXES = {"world_size": 16, "axes": (Axis(name="dp", size=2), Axis(name="tp", size=8))}
BUCKETS = {"cause": BucketReduce(bucket=0, parameters=("w",)), "num_ranks": 8, "wire_bytes": GIB}
SMALL = {"cause": Call(api="torch.distributed.all_reduce"), "input_bytes": 64, "wire_bytes": 64}
ASKED = Redistribute(before=("P",), after=("R",), asked_by="RowwiseParallel", is_implicit=False)
PARTIAL = Redistribute(before=("P",), after=("R",), asked_by="aten.add", is_implicit=True)
REDUCE = {"kind": CollectiveKind.ALL_REDUCE}
SITE = BreakSite(source=LINE, num_events=2, reason="print")
STOP = Stop(rank=1, error="RuntimeError: boom")
W, F, S, C, U, OK = Judgement


# Each rule: a recording that it applies to, its judgement, its name, and words of it.
def compared_runs(**changes: Any) -> Recording:
    deviation = RunDeviation(step=3, kind=ValueKind.SETTING, name="AdamW.lr")
    comparison = RunComparison(
        run_a="a.json",
        run_b="b.json",
        world_size_a=1,
        world_size_b=2,
        steps=(3,),
        num_compared=9,
        deviations=(deviation,) * changes.get("num_deviating", 0),
        **changes,
    )
    return make_recording(comparisons=(comparison,), run=make_run(instruments=("compare",)))


CASES = {
    "ranks that diverge": (
        make_checked(Severity.ERROR),
        (F, "check", "Ranks diverge: rank 1 skips an all_reduce that the other ranks issue"),
    ),
    "ranks that diverge under a condition": (
        make_checked(Severity.WARNING),
        (S, "check", "Ranks diverge if item() at train.py:15 is False on rank 1: 1 variation not"),
    ),
    "ranks that do not diverge": (
        make_checked(),
        (OK, "check", "the same collectives in 6 steps, also under 2 variations of what some see"),
    ),
    "implicit gathers from 5% of the bytes": (
        traced({"cause": GATHER, "times": 9}, {"cause": IMPLICIT, "owner": "layers.3.moe"}),
        (
            C,
            "implicit-redistribution",
            "make up 10% of the 10.0 MiB that a rank sends, in layers.3.moe",
        ),
    ),
    "implicit gathers below 5%": (
        traced({"cause": GATHER, "wire_bytes": 30 * MIB}, {"cause": IMPLICIT}),
        (OK, "dominating-cause", "FSDP unshard (all_gather[tp]) makes up 97% of the 31.0 MiB"),
    ),
    "an implicit reduction": (
        traced({"cause": PARTIAL, **REDUCE}),
        (U, "dominating-cause", "partial sums have to be reduced"),
    ),
    "parameters gathered three times": (
        traced({"cause": GATHER, "owner": "layers.0", "times": 3}),
        (C, "gathered-often", "Gathers of the same parameters by FSDP, 3 in a forward pass"),
    ),
    "parameters gathered twice in each of two passes": (
        traced({"cause": GATHER, "owner": "layers.0", "times": 4}, run={"num_forwards": 2}),
        (OK, "dominating-cause", "FSDP gathers parameters before they are used"),
    ),
    "parameters gathered often in passes that were not counted": (
        traced({"cause": GATHER, "owner": "layers.0", "times": 9}, run={"num_forwards": None}),
        (OK, "dominating-cause", "100%"),
    ),
    "many small collectives": (
        traced({**SMALL, "times": 40}, {"cause": GATHER, "input_bytes": 2 * MIB}),
        (C, "small-collectives", "40 of 41 collectives are all_gather[tp] in forward, 64 B each"),
    ),
    "only small collectives, as in a toy": (
        traced({**SMALL, "times": 40}),
        (U, "dominating-cause", "the program itself calls it, and may need it or not"),
    ),
    "tensor parallelism across nodes": (
        traced({"cause": ASKED, "group": "tp[0-15]"}, groups=(ACROSS,)),
        (C, "tensor-parallel-across-nodes", "over ranks 0-15 make up 100%"),
    ),
    "tensor parallelism across nodes of which nothing is known": (
        traced({"cause": ASKED, "group": "tp[0-15]"}, groups=(ACROSS,)),
        (C, "tensor-parallel-across-nodes", "if a node has no more, which was not recorded"),
    ),
    "tensor parallelism across nodes of four GPUs": (
        traced({"cause": ASKED, "group": "tp[0-7]"}, groups=(WITHIN,), run={"ranks_per_node": 4}),
        (C, "tensor-parallel-across-nodes", "with 4 GPUs in a node this leaves the node in every"),
    ),
    "tensor parallelism within a node of 72 GPUs": (
        traced({"cause": ASKED, "group": "tp[0-15]"}, groups=(ACROSS,), run={"ranks_per_node": 72}),
        (OK, "dominating-cause", "RowwiseParallel asks for it"),
    ),
    "tensor parallelism within a node": (
        traced({"cause": ASKED, "group": "tp[0-7]"}, groups=(WITHIN,)),
        (OK, "dominating-cause", "RowwiseParallel asks for it"),
    ),
    "large replicated gradients": (
        traced({**BUCKETS, "input_bytes": 4 * GIB}),
        (C, "replicated-gradients", "4.00 GiB of gradients, the same on 8 ranks"),
    ),
    "small replicated gradients": (
        traced(BUCKETS),
        (OK, "dominating-cause", "DDP reduces every gradient once"),
    ),
    "an unknown cause": (traced({"cause": None}), (U, "dominating-cause", "cause is not known")),
    "barriers, which send nothing": (
        traced({"cause": None, "wire_bytes": 0, "times": 2}),
        (U, "dominating-cause", "has 2 collectives"),
    ),
    "a step that does not fit": (
        profile(81 * GIB, 80 * GIB),
        (F, "does-not-fit", "and does not fit in 80.0 GiB, 1.00 GiB too much"),
    ),
    "a step that nearly fills the device": (
        profile(73 * GIB, 80 * GIB),
        (C, "little-memory-left", "7.00 GiB free"),
    ),
    "a step that fits": (
        profile(5 * GIB, 80 * GIB),
        (OK, "fits", "Activations take 75% of the peak of 4.00 GiB on rank 0, in backward of"),
    ),
    "a device that was not given": (
        profile(5 * GIB, None),
        (U, "device-not-given", "the memory of the device was not given"),
    ),
    "tensors that differ": (
        compared(Agreement.CLOSE, Agreement.DIFFERS),
        (W, "parity", "1 of 2 tensors differ from a single device, first in layers.1.wo: likely a"),
    ),
    "tensors that agree": (compared(Agreement.CLOSE), (OK, "parity", "The only tensor agrees")),
    "parity of nothing": (compared(), (U, "parity", "compared nothing")),
    "runs that differ": (
        compared_runs(num_deviating=1),
        (W, "runs", "1 of 9 tensors deviate in 1 step, first in step 3: AdamW.lr, setting"),
    ),
    "runs that agree": (
        compared_runs(num_equal=2),
        (OK, "runs", "All 9 tensors agree within noise in 1 step, 2 of them bit for bit"),
    ),
    "runs that cannot be compared": (
        compared_runs(incomparable="dropout"),
        (U, "runs", "the rest cannot be compared: dropout"),
    ),
    "a partitioned program that differs": (
        partitioned(Agreement.DIFFERS),
        (W, "parallel-program", "1 of 1 tensor of the partitioned Net differ"),
    ),
    "a partitioned program that agrees": (
        partitioned(Agreement.EQUAL),
        (OK, "parallel-program", "The only tensor of the partitioned Net agrees with"),
    ),
    "a partitioned program that was not compared": (
        partitioned(),
        (U, "parallel-program", "it needs 2 GPUs"),
    ),
    "ops of a partitioned program on gathered inputs": (
        partitioned(Agreement.EQUAL, fallbacks=(FALLBACK,)),
        (C, "fallbacks", "such as aten.sort.default; 3.00 MiB moved"),
    ),
    "a compiled function that computes something else": (
        make_recording(diagnoses=(make_diagnosis(Condition.WRONG_RESULT, "f"),)),
        (W, "compiled-result", "f under f: wrong result"),
    ),
    "a compiled function that does not compile": (
        make_recording(diagnoses=(make_diagnosis(Condition.COMPILE_ERROR, "f"),)),
        (F, "compiled-result", "compile error"),
    ),
    "a function that is not deterministic": (
        make_recording(diagnoses=(make_diagnosis(Condition.NONDETERMINISTIC, "f"),)),
        (U, "compiled-result", "f under f"),
    ),
    "graph breaks": (explained(SITE), (C, "graph-breaks", "step has 1 line that breaks its graph")),
    "one graph": (explained(), (OK, "graph-breaks", "compiled to 1 graph without a break")),
    "an op that is wrong when sharded": (
        covered(OpVerdict.WRONG),
        (W, "coverage", "other numbers"),
    ),
    "an op that raises when sharded": (covered(OpVerdict.MISSING), (F, "coverage", "raises")),
    "an op that is replicated": (covered(OpVerdict.REPLICATED), (C, "coverage", "replicated")),
    "an op that raises for a sharding that may not be used": (
        covered(OpVerdict.MISSING, has_plan=False),
        (U, "coverage", "without a plan every sharding was tried"),
    ),
    "ops that all run sharded": (
        covered(OpVerdict.SHARDED),
        (OK, "coverage", "The only op with sharded inputs runs"),
    ),
    "ops without a sharded input": (
        covered(OpVerdict.LOCAL),
        (U, "coverage", "No input of 1 op is"),
    ),
    "an audit that found nothing": (
        audited(),
        (OK, "sharding", "The audit of 1 parameter found no mistake"),
    ),
    "an audit with a warning": (
        audited(finding("replicated", Severity.WARNING)),
        (C, "replicated", "w: it is odd"),
    ),
    "a finding of wrong results": (
        make_recording(findings=(finding("tied-weights"),)),
        (W, "tied-weights", "w: it is odd"),
    ),
    "a finding of failure": (
        make_recording(findings=(finding("deadlock"), finding("deadlock"))),
        (F, "deadlock", "w (and 1 more): it is odd"),
    ),
    "a warning of wrong results": (
        make_recording(findings=(finding("outside-groups", Severity.WARNING),)),
        (S, "outside-groups", "w: it is odd"),
    ),
    "a warning of cost": (
        make_recording(findings=(finding("replicated", Severity.WARNING),)),
        (C, "replicated", "w: it is odd"),
    ),
    "a limit that is exceeded": (
        make_recording(findings=(finding("contract-exceeded"),)),
        (F, "contract-exceeded", "w: it is odd"),
    ),
    "a warning of a large cost of memory": (
        replace(profile(9 * GIB, 80 * GIB), findings=(replicated(2 * GIB),)),
        (C, "replicated", "w: it is odd"),
    ),
    "a warning of a negligible cost of memory": (
        replace(profile(9 * GIB, 80 * GIB), findings=(replicated(2 * MIB),)),
        (OK, "fits", "Activations take"),
    ),
    "a rank that raised": (
        make_recording(stops=(STOP,)),
        (F, "stopped", "Rank 1 stopped early: it raised RuntimeError: boom"),
    ),
    "a rank that was killed": (
        make_recording(stops=(Stop(rank=1),)),
        (U, "records", "The recording of rank 1 stops before the step was over"),
    ),
    "lost records": (
        traced({"cause": GATHER}, gaps=(Gap(place="stream", fact="cut", is_loss=True),)),
        (U, "records", "Records were lost (1 gap)"),
    ),
    "no collectives": (traced(), (U, "nothing", "No collectives were issued")),
    "an axis along which nothing is sent in a forward pass": (
        traced({"cause": ASKED, "group": "tp[0-7]"}, run=TWO_AXES, groups=(WITHIN,)),
        (U, "silent-axis", "Nothing is sent along dp (2 ranks): if this step trains, its replicas"),
    ),
    "an axis along which nothing is sent in a step that trains": (
        traced(
            {"cause": ASKED, "group": "tp[0-7]", "phase": Phase.BACKWARD},
            run=TWO_AXES,
            groups=(WITHIN,),
        ),
        (S, "silent-axis", "dp (2 ranks): its replicas do not exchange gradients"),
    ),
    "a group that spans both axes": (
        traced({"cause": GATHER, "group": "tp[0-15]"}, run=TWO_AXES, groups=(SPANNING,)),
        (OK, "dominating-cause", "FSDP gathers parameters"),
    ),
    "a silent axis where records are missing": (
        traced(
            {"cause": GATHER, "group": "tp[0-7]"},
            run=TWO_AXES,
            groups=(WITHIN,),
            gaps=(Gap(place="nccl", fact="a call was not observed"),),
        ),
        (OK, "dominating-cause", "FSDP gathers parameters"),
    ),
    "nothing": (make_recording(), (U, "nothing", "No rule applies")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_judges_what_it_is_about(name: str) -> None:
    recording, (judgement, rule, words) = CASES[name]
    concern = first_of(recording)
    assert (concern.judgement, concern.rule) == (judgement, rule)
    assert words in concern.words


def test_the_guide_has_a_section_for_every_rule_and_no_other() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "verdict.md").read_text()
    sections = set(re.findall(r"^\| `([\w-]+)` \|", guide, re.MULTILINE))
    findings = {"tied-weights", "deadlock", "outside-groups", "replicated"}
    rules = {rule for _, (_, rule, _) in CASES.values()} - findings | {"comparison"}
    assert sections == rules


@pytest.mark.parametrize(
    ("ranks_per_node", "words"),
    [
        (None, "8 GPUs in a node are assumed, as the number was not recorded"),
        (8, "it has 8 GPUs"),
    ],
)
def test_tensor_parallelism_within_a_node_says_which_node_is_meant(
    ranks_per_node: int | None, words: str
) -> None:
    calls = {"cause": ASKED, "group": "tp[0-7]"}
    run = {"ranks_per_node": ranks_per_node}
    _, concern = judged(traced(calls, groups=(WITHIN,), run=run)).concerns
    assert (concern.judgement, concern.rule) == (OK, "tensor-parallel-across-nodes")
    assert concern.words == f"Tensor parallelism over ranks 0-7 stays within a node: {words}"


def test_hosts_tell_which_ranks_share_a_node_unless_the_run_was_simulated() -> None:
    def judge_hosts(*hosts: str, **run: Any) -> tuple[Judgement, str]:
        processes = tuple(RankProcess(rank=rank, host=host) for rank, host in enumerate(hosts))
        calls = {"cause": ASKED, "group": "tp[0-7]"}
        recording = traced(calls, groups=(WITHIN,), run=run, processes=processes)
        concern = next(
            item
            for item in judged(recording).concerns
            if item.rule == "tensor-parallel-across-nodes"
        )
        return concern.judgement, concern.reason

    two = ("node-a",) * 4 + ("node-b",) * 4
    assert judge_hosts(*two) == (C, "on 2 hosts this leaves the node in every layer")
    assert judge_hosts(*["node-a"] * 8) == (OK, "its ranks ran on node-a")
    assumed = (OK, "8 GPUs in a node are assumed, as the number was not recorded")
    assert judge_hosts(*two[:7]) == assumed  # the host of a rank is not known
    assert judge_hosts(*two, is_simulated=True) == assumed
    assert judge_hosts(*two, ranks_per_node=8) == (OK, "it has 8 GPUs")


def test_tensor_parallelism_across_nodes_says_what_to_do_and_how_to_give_their_size() -> None:
    calls = {"cause": ASKED, "group": "tp[0-15]"}
    assumed = first_of(traced(calls, groups=(ACROSS,)))
    known = first_of(traced(calls, groups=(ACROSS,), run={"ranks_per_node": 4}))
    assert known.remedy.startswith("Make the axis no larger than a node")
    assert assumed.remedy == (
        f"{known.remedy} If a node has more GPUs, say so with --nproc-per-node of show or report."
    )


def test_the_worst_comes_first_and_what_dominates_comes_before_what_is_fine() -> None:
    records = traced(
        {"cause": GATHER, "times": 9},
        {"cause": IMPLICIT, "owner": "moe"},
        parity=compared(Agreement.DIFFERS).parity,
        memory=profile(5 * GIB, 80 * GIB).memory,
        findings=(finding("deadlock"),),
    )
    rules = [concern.rule for concern in judged(records).concerns]
    assert rules == ["parity", "deadlock", "implicit-redistribution", "dominating-cause", "fits"]
    calm = traced({"cause": GATHER}, parity=compared(Agreement.EQUAL).parity)
    assert [concern.rule for concern in judged(calm).concerns] == ["dominating-cause", "parity"]


def test_a_dominating_implicit_gather_is_named_once() -> None:
    concerns = judged(traced({"cause": IMPLICIT})).concerns
    assert [concern.rule for concern in concerns] == ["implicit-redistribution"]
    assert (concerns[0].source, concerns[0].view) == (LINE, "communication")


def test_the_sentence_names_what_was_not_checked() -> None:
    verdict = judged(traced({"cause": GATHER, "owner": "layers.0"}))
    assert verdict.sentence == (
        "As expected: FSDP unshard (all_gather[tp]) makes up 100% of the 1.00 MiB that a rank "
        "sends, in layers.0: FSDP gathers parameters before they are used. "
        "Not checked: numerics, memory, sharding, 7 of 8 ranks."
    )
    gap = Gap(place="stream", fact="cut")
    compiled = Module(
        name="", type="Net", ranks=(RankSpan(0),), marks=(Mark(kind=MarkKind.COMPILED),)
    )
    everything = ("parity", "trace", "memory", "audit")
    recording = traced(
        {"cause": GATHER},
        run={"world_size": 1, "instruments": everything},
        gaps=(gap, gap),
        modules=(compiled,),
    )
    assert judged(recording).unchecked == ("graph breaks", "compiled numerics", "1 gap")
    alone = make_recording(run=make_run(world_size=1, instruments=("memory",)))
    assert judged(alone).unchecked == ()
    assert judged(alone).sentence == "Not judged: No rule applies to this recording."


def test_what_is_bad_has_the_remedy_of_the_finding_or_the_check_that_is_on_it() -> None:
    def find(rule: str, remedy: str) -> Finding:
        return Finding(rule=rule, severity=Severity.WARNING, subject="m", fact="f", remedy=remedy)

    calls = tuple(make_collective(order=at, cause=IMPLICIT, **DEFAULTS) for at in range(4))
    divergence = Divergence(
        module="m", phase=Phase.FORWARD, suspect=Suspect.SCALED, detail="", remedy="Divide it."
    )
    tensor = TensorVerdict(name="", kind=TensorKind.OUTPUT, agreement=Agreement.DIFFERS)
    recording = replace(
        make_recording(calls),
        parity=(Parity(axes=(), tensors=(tensor,), divergences=(divergence,)),),
        findings=(
            find("implicit-all-to-all", "Second."),
            find("implicit-gather", "First."),
            find("replicated-parameter", "Shard it."),
        ),
    )
    remedies = {concern.rule: concern.remedy for concern in judged(recording).concerns}
    assert remedies["parity"] == "Divide it."
    assert remedies["implicit-redistribution"] == "First."
    assert remedies["replicated-parameter"] == "Shard it."
    fine = make_recording((make_collective(cause=GATHER, **DEFAULTS),))
    assert [concern.remedy for concern in judged(fine).concerns] == [""]


def test_findings_on_what_other_rules_judge_are_not_named_again() -> None:
    findings = tuple(
        map(finding, ("implicit-gather", "out-of-memory", "parity-scaled", "compiled-nan"))
    )
    infos = (finding("deadlock", Severity.INFO),)
    assert first_of(make_recording(findings=findings + infos)).rule == "nothing"


@pytest.mark.parametrize(
    ("after", "judgement", "words"),
    [
        (traced({"cause": GATHER}), OK, "Against before: no change"),
        (traced({"cause": GATHER, "times": 2}), C, "bytes 1.00 MiB → 2.00 MiB"),
    ],
)
def test_a_comparison_is_judged_by_what_got_worse(
    after: Recording, judgement: Judgement, words: str
) -> None:
    changes = compare(traced({"cause": GATHER}), after, titles=("before", "after"))
    concern = judge_changes(changes)
    assert (concern.judgement, concern.rule) == (judgement, "comparison")
    assert words in concern.words
    assert judged(after).with_concern(concern).concerns[0] == concern


def test_a_comparison_in_which_results_got_worse_is_wrong() -> None:
    changes = compare(compared(Agreement.EQUAL), compared(Agreement.DIFFERS))
    assert judge_changes(changes).judgement is W


def test_a_check_before_launch_names_its_remedy_and_what_was_not_tried() -> None:
    verdict = judged(make_checked(Severity.WARNING, num_left=2))
    (concern,) = verdict.concerns
    assert (concern.view, concern.source) == (
        "proof",
        make_checked(Severity.ERROR).findings[0].source,
    )
    assert concern.remedy.startswith("Let all ranks decide the same")
    assert verdict.unchecked[-1] == "2 variations"
    assert "hangs" not in verdict.unchecked
    fine = judged(make_checked(num_left=0))
    assert fine.concerns[0].reason == ""
    assert not any("variation" in words for words in fine.unchecked)


def test_several_conditions_are_counted() -> None:
    recording = make_checked(Severity.WARNING)
    (check,) = recording.checks
    again = replace(check, variations=(*check.variations, check.variations[-1]))
    fact = first_of(replace(recording, checks=(again,))).fact
    assert fact.endswith("on rank 1, and under 1 more of 4 conditions that were tried")
