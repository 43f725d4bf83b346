"""`check`: which limits hold, which are violated, and the text of a violation."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.contract import BreachKind, Contract, Figure, Limit, check, record_contract
from shardscope.contract.limits import CauseKind
from shardscope.errors import ContractError
from shardscope.record import (
    Axis,
    Call,
    CollectiveKind,
    Coverage,
    Explanation,
    Fallback,
    FallbackKind,
    Finding,
    FullyShard,
    Gap,
    Inserted,
    Level,
    Module,
    OpCoverage,
    OpVerdict,
    Parallelization,
    Phase,
    Placed,
    PlacedKind,
    RankSpan,
    Recording,
    Redistribute,
    Severity,
    Source,
)

LINE = Source(file="train.py", line=12, function="forward", text="x = self.wo(x)")
UNASKED = Redistribute(
    before=("Shard(1)",), after=("Replicate",), asked_by="aten.mm", is_implicit=True
)


def comm(**facts: Any) -> Contract:
    return Contract((Limit(**({"figure": Figure.COUNT} | facts)),))


def whole(figure: str, most: int, **facts: Any) -> Contract:
    return Contract((Limit(figure=Figure(figure), most=most, **facts),))


def two_layers(*, ranks: tuple[int, ...] = (0,), extra: int = 0) -> Recording:
    """An all-reduce of 4 KiB in each of two layers, by `attn.wo`, and more on the last rank."""
    calls = [
        samples.make_collective(
            rank=rank,
            order=order,
            axis="tp",
            owner=f"layers.{order % 2}.attn.wo",
            cause=UNASKED if order > 1 else Call(api="dist.all_reduce"),
            source=LINE,
        )
        for rank in ranks
        for order in range(2 + (extra if rank == ranks[-1] else 0))
    ]
    names = [
        "",
        "layers",
        *(f"layers.{n}{end}" for n in (0, 1) for end in ("", ".attn", ".attn.wo")),
    ]
    spans = (RankSpan(0, 8),)
    modules = tuple(Module(name=name, type="Linear", ranks=spans) for name in names)
    return samples.make_recording(tuple(calls), ranks=ranks, modules=modules)


@pytest.mark.parametrize(
    "limits",
    [
        {"least": 2, "most": 2},
        {"most": 2, "module": ""},
        {"least": 1, "most": 1, "module": "layers.*"},
        {"least": 1, "most": 1, "module": "layers.*.attn"},
        {"least": 1, "most": 1, "module": "layers.[0-1].attn.wo"},
        {"least": 1, "module": "**.attn"},
        {"most": 0, "module": "layers.*", "phases": (Phase.BACKWARD,)},
        {"most": 0, "kinds": (CollectiveKind.ALL_GATHER,)},
        {"least": 2, "axes": ("tp",), "phases": (Phase.FORWARD, Phase.BACKWARD)},
        {"least": 2, "causes": (CauseKind.CALL,)},
        {"most": 0, "causes": (CauseKind.UNASKED,)},
        {"figure": Figure.BYTES, "most": 4096, "module": "layers.*"},
        {"figure": Figure.WIRE_BYTES, "least": 14336, "most": 14336},
        {"figure": Figure.OUTPUT_BYTES, "most": 8192},
    ],
    ids=str,
)
def test_a_limit_that_holds_gives_no_violation(limits: dict[str, Any]) -> None:
    assert check(comm(**limits), two_layers()) == ()


@pytest.mark.parametrize(
    ("limits", "kind", "expected", "actual", "modules"),
    [
        ({"least": 1, "most": 1}, "too much", "exactly 1", "2", ()),
        ({"least": 3}, "too little", "at least 3", "2", ()),
        ({"least": 3, "most": 4, "module": ""}, "too little", "3 to 4", "2", ("",)),
        ({"most": 0, "module": "layers.*"}, "too much", "none", "1", ("layers.0", "layers.1")),
        ({"most": 1, "axes": ("tp",)}, "too much", "at most 1", "2", ()),
        ({"least": 1, "phases": (Phase.BACKWARD,)}, "too little", "at least 1", "0", ()),
        ({"most": 1, "kinds": (CollectiveKind.ALL_REDUCE,)}, "too much", "at most 1", "2", ()),
        ({"most": 1, "causes": (CauseKind.CALL,)}, "too much", "at most 1", "2", ()),
        ({"figure": Figure.BYTES, "most": 8191}, "too much", "at most 8,191 bytes (8.0 KiB)",
         "8 KiB", ()),
        ({"figure": Figure.WIRE_BYTES, "most": 1}, "too much", "at most 1 byte", "14 KiB", ()),
        ({"figure": Figure.OUTPUT_BYTES, "least": 9216}, "too little", "at least 9 KiB", "8 KiB",
         ()),
    ],
    ids=str,
)  # fmt: skip
def test_a_limit_that_does_not_hold_is_a_violation(
    limits: dict[str, Any], kind: str, expected: str, actual: str, modules: tuple[str, ...]
) -> None:
    (violation,) = check(comm(**limits), two_layers())
    assert (violation.kind, violation.expected, violation.actual) == (kind, expected, actual)
    assert violation.modules == modules
    assert violation.remedy


def test_a_violation_shows_the_costliest_cause_first_with_its_line() -> None:
    calls = tuple(
        samples.make_collective(
            order=order, owner="a", wire_bytes=size, cause=Call(api=api), source=LINE
        )
        for order, (api, size) in enumerate((("small", 10), ("big", 99), ("small", 20)))
    )
    (violation,) = check(comm(most=1), samples.make_recording(calls))
    big, small = violation.evidence
    assert (big.cause, big.count, big.num_bytes, big.source) == ("call of big", 1, 99, LINE)
    assert (small.cause, small.count, small.num_bytes) == ("call of small", 2, 30)
    assert (small.what, small.module) == ("all_reduce[world], forward", "a")


def test_what_no_limit_names_is_shown_before_what_costs_more() -> None:
    recording = two_layers()
    new = samples.make_collective(order=9, axis="tp", owner="layers.1.mlp", wire_bytes=1)
    grown = replace(recording, collectives=(*recording.collectives, new))
    contract = Contract((
        Limit(figure=Figure.COUNT, least=2, most=2),
        Limit(figure=Figure.COUNT, module="layers.*.attn.wo", least=1, most=1, axes=("tp",),
              phases=(Phase.FORWARD,), kinds=(CollectiveKind.ALL_REDUCE,)),
    ))  # fmt: skip
    (violation,) = check(contract, grown)
    assert violation.evidence[0].module == "layers.1.mlp"


def test_a_maximum_applies_to_the_largest_rank_and_a_minimum_to_the_smallest() -> None:
    recording = two_layers(ranks=(0, 1, 2), extra=1)
    (over,) = check(comm(most=2), recording)
    assert (over.value, over.ranks) == (3, (RankSpan(2),))
    (under,) = check(comm(least=3), recording)
    assert (under.value, under.ranks) == (2, (RankSpan(0, 2),))
    assert check(comm(least=2, most=3), recording) == ()
    (only,) = check(comm(least=2, most=2), recording)
    assert only.kind is BreachKind.TOO_MUCH


def test_a_rank_without_collectives_counts_as_the_minimum() -> None:
    calls = (samples.make_collective(rank=1),)
    (violation,) = check(comm(least=1), samples.make_recording(calls, ranks=(0, 1)))
    assert (violation.value, violation.ranks) == (0, (RankSpan(0),))


def test_limits_on_layers_apply_only_to_pipeline_stages_that_have_them() -> None:
    calls = tuple(samples.make_collective(rank=rank, owner=f"layers.{rank}") for rank in (0, 1))
    modules = tuple(
        Module(name=f"layers.{rank}", type="Block", ranks=(RankSpan(rank),)) for rank in (0, 1)
    )
    recording = samples.make_recording(calls, ranks=(0, 1), modules=modules)
    assert check(comm(least=1, most=1, module="layers.*"), recording) == ()
    shared = replace(modules[0], ranks=(RankSpan(0, 2),))
    (violation,) = check(
        comm(least=1, most=1, module="layers.*"), replace(recording, modules=(shared, modules[1]))
    )
    assert (violation.modules, violation.ranks) == (("layers.0",), (RankSpan(1),))


def test_aliases_of_a_shared_module_count_as_one_unless_recorded_separately() -> None:
    shared = Module(name="a.0", type="Block", ranks=(RankSpan(0),), aliases=("a.1", "b"))
    calls = tuple(
        samples.make_collective(order=order, owner=owner)
        for order, owner in enumerate(("a.0", "b", "b"))
    )
    recording = samples.make_recording(calls, modules=(shared,))
    assert check(comm(least=2, most=2, module="b"), recording) == ()
    assert check(comm(least=1, most=1, module="a.1"), recording) == ()
    (violation,) = check(comm(least=2, module="a.*"), recording)
    assert violation.modules == ("a.0",)


def test_a_pattern_that_matches_no_module_is_a_violation_that_suggests_names() -> None:
    (violation,) = check(comm(most=9, module="layers.*.attention"), two_layers())
    assert violation.kind is BreachKind.NOTHING_FITS
    assert violation.actual == "no module matches 'layers.*.attention'"
    assert "'layers.*.attn'" in violation.remedy
    (violation,) = check(comm(most=9, module="layers"), samples.make_recording())
    assert "has no module" in violation.remedy


def test_an_axis_that_the_mesh_does_not_have_is_a_violation() -> None:
    (violation,) = check(comm(most=0, axes=("tpp",)), two_layers())
    assert (violation.kind, violation.actual) == (BreachKind.NOTHING_FITS, "no axis matches 'tpp'")
    assert "'tp'" in violation.remedy
    silent = samples.make_recording(run=samples.make_run(axes=(Axis(name="dp", size=8),)))
    assert check(comm(most=0, axes=("dp",)), silent) == ()


@pytest.mark.parametrize(
    ("figure", "verb"),
    [
        ("peak_memory", "memory"),
        ("graph_breaks", "explain"),
        ("recompiles", "explain"),
        ("skipped_functions", "explain"),
        ("uncovered_ops", "coverage"),
        ("wrong_ops", "coverage"),
        ("fallbacks", "parallelize"),
    ],
)
def test_an_unmeasured_figure_is_a_violation_with_the_command_to_run(
    figure: str, verb: str
) -> None:
    (violation,) = check(whole(figure, 10**9), two_layers())
    assert violation.kind is BreachKind.NOT_MEASURED
    assert f"shardscope {verb} TARGET" in violation.remedy


def test_a_recording_without_a_trace_does_not_measure_collectives() -> None:
    (violation,) = check(comm(most=10**9), samples.make_explained())
    assert violation.kind is BreachKind.NOT_MEASURED
    assert "shardscope trace TARGET" in violation.remedy


def test_what_no_recorded_rank_has_was_not_measured() -> None:
    elsewhere = Module(name="layers.9", type="Block", ranks=(RankSpan(7),))
    recording = samples.make_recording(ranks=(0,), modules=(elsewhere,))
    (violation,) = check(comm(most=0, module="layers.9"), recording)
    assert (violation.kind, "no rank" in violation.actual) == (BreachKind.NOT_MEASURED, True)
    nobody = samples.make_recording(run=replace(samples.make_run(), ranks=()))
    assert check(comm(most=0), nobody)[0].kind is BreachKind.NOT_MEASURED


def test_with_lost_records_only_certain_violations_count() -> None:
    lossy = replace(two_layers(), gaps=(Gap(place="stream", fact="cut off", is_loss=True),))
    (violation,) = check(comm(most=2), lossy)
    assert violation.kind is BreachKind.NOT_MEASURED
    assert [violation.kind for violation in check(comm(most=1), lossy)] == [BreachKind.TOO_MUCH]
    assert check(comm(least=2), lossy) == ()


def test_each_limit_is_checked_in_the_recording_that_measured_it() -> None:
    holdings = samples.make_holdings()
    peak = holdings.memory[0].peak_bytes
    contract = Contract((*comm(most=2).limits, *whole("peak_memory", peak).limits))
    assert check(contract, two_layers(), holdings) == ()
    assert [violation.kind for violation in check(contract, two_layers())] == [
        BreachKind.NOT_MEASURED
    ]


def test_a_limit_applies_to_the_traces_that_have_its_module_and_axis() -> None:
    other = samples.make_recording((samples.make_collective(owner="head", axis="dp"),))
    both = (two_layers(), other)
    assert check(comm(least=1, most=1, module="layers.*", axes=("tp",)), *both) == ()
    (violation,) = check(comm(most=0, module="head"), *both)
    assert violation.modules == ("head",)
    (violation,) = check(comm(most=9, module="tail"), *both)
    assert violation.kind is BreachKind.NOTHING_FITS
    assert check(record_contract(*both), *both) == ()


def test_a_module_without_collectives_of_the_limited_kind_counts_as_zero() -> None:
    recording = samples.make_recording((samples.make_collective(owner="a"),))
    (violation,) = check(comm(least=1, module="a", kinds=(CollectiveKind.SEND,)), recording)
    assert (violation.kind, violation.value) == (BreachKind.TOO_LITTLE, 0)


WHOLES: dict[str, tuple[Recording, int]] = {
    "peak_memory": (samples.make_holdings(), 1300),
    "uncovered_ops": (samples.make_holdings(), 5),
    "missing_ops": (samples.make_holdings(), 2),
    "wrong_ops": (samples.make_holdings(), 1),
    "replicated_ops": (samples.make_holdings(), 2),
    "fallbacks": (samples.make_parallel(), 26),
    "gaps": (samples.make_varied(), 13),
    "findings": (samples.make_varied(), 39),
}


@pytest.mark.parametrize("figure", WHOLES)
def test_a_total_may_equal_its_limit_and_not_exceed_it(figure: str) -> None:
    recording, value = WHOLES[figure]
    assert check(whole(figure, value), recording) == ()
    (violation,) = check(whole(figure, value - 1), recording)
    assert (violation.kind, violation.value) == (BreachKind.TOO_MUCH, value)
    assert 1 <= len(violation.evidence) <= 3


@pytest.mark.parametrize(
    ("figure", "value"), [("graph_breaks", 39), ("recompiles", 13), ("skipped_functions", 13)]
)
def test_what_the_compiler_did_is_added_up_for_each_rank(figure: str, value: int) -> None:
    made = samples.make_explained()
    told = tuple(replace(explanation, failure="") for explanation in made.explanations)
    explained = replace(made, explanations=told)
    assert check(whole(figure, value), explained) == ()
    (violation,) = check(whole(figure, value - 1), explained)
    assert (violation.value, violation.evidence[0].source) == (value, _first_source(told[0]))
    twice = replace(explained, explanations=(told[0], told[0], told[1]))
    assert check(whole(figure, 2 * value - 1), twice)[0].value == 2 * value


def _first_source(told: Explanation) -> Source | None:
    return told.break_sites[0].source


def test_a_function_that_raised_before_its_end_was_not_measured() -> None:
    raised = Explanation(rank=0, target="f", fingerprint="", failure="ValueError: no")
    recording = samples.make_recording(
        run=samples.make_run(instruments=("explain",)), explanations=(raised,)
    )
    (violation,) = check(whole("graph_breaks", 0), recording)
    assert violation.kind is BreachKind.NOT_MEASURED
    assert "f raised ValueError: no" in violation.actual


def test_findings_are_counted_by_severity_and_by_rule_once_for_all_ranks() -> None:
    findings = tuple(
        Finding(rule=rule, severity=severity, subject="s", fact="f", remedy="r", rank=rank)
        for rule, severity in (("a", Severity.ERROR), ("b", Severity.WARNING))
        for rank in (0, 1)
    )
    recording = samples.make_recording(findings=findings)
    assert check(whole("findings", 2), recording) == ()
    assert check(whole("findings", 1), recording)[0].value == 2
    assert check(whole("findings", 1, severity=Severity.ERROR), recording) == ()
    assert check(whole("findings", 0, severity=Severity.ERROR), recording)[0].value == 1
    assert check(whole("findings", 0, severity=Severity.INFO), recording) == ()
    assert check(whole("findings", 0, rule="b"), recording)[0].value == 1
    assert check(whole("findings", 0, rule="c"), recording) == ()


def test_the_worst_level_of_coverage_counts_with_wrong_ops_first() -> None:
    ops = tuple(
        OpCoverage(op=f"aten.{verdict}", schema="", verdict=verdict, sources=(LINE,))
        for verdict in OpVerdict
    )
    levels = tuple(
        Coverage(rank=0, level=level, axes=(), has_plan=True, ops=ops[: 7 - index])
        for index, level in enumerate(Level)
    )
    recording = samples.make_recording(coverage=levels)
    (violation,) = check(whole("uncovered_ops", 0), recording)
    assert (violation.value, violation.actual) == (3, "3 at the level exported")
    assert [evidence.what for evidence in violation.evidence] == [
        "aten.wrong is wrong",
        "aten.missing is missing",
        "aten.replicated is replicated",
    ]


def test_limits_apply_to_the_collectives_inserted_into_a_parallel_program() -> None:
    inserted = tuple(
        Inserted(
            kind=CollectiveKind.ALL_REDUCE,
            axis="tp",
            num_ranks=4,
            size_bytes=64,
            phase=Phase.FORWARD,
            node="all_reduce",
            module=f"layers.{index}.wo",
            cause="the plan's output",
            source=LINE,
        )
        for index in range(2)
    )
    fallback = Fallback(
        axis="tp",
        kind=FallbackKind.REPLICATE,
        op="aten.sort",
        node="sort",
        module="layers.0",
        placements=("S(0)",),
        size_bytes=8,
        remedy="Sort before.",
        source=LINE,
    )
    program = Parallelization(
        program="Net",
        axes=(Axis(name="tp", size=4),),
        is_training=False,
        num_ops=9,
        inserted=inserted,
        fallbacks=(fallback,),
        placed=(
            Placed(
                name="embed.weight",
                kind=PlacedKind.PARAMETER,
                shape=(4,),
                local_shape=(4,),
                dtype="float32",
                placements=("R",),
                local_bytes=16,
            ),
        ),
    )
    recording = samples.make_recording(
        run=samples.make_run(instruments=("parallelize",)), parallel=(program,)
    )
    assert check(comm(least=1, most=1, module="layers.*", axes=("tp",)), recording) == ()
    assert check(comm(most=0, module="embed"), recording) == ()  # known by what it holds
    (violation,) = check(comm(figure=Figure.BYTES, most=127), recording)
    assert (violation.actual, violation.ranks) == ("128 bytes", ())
    assert violation.evidence[0].cause == "the plan's output"
    (violation,) = check(comm(figure=Figure.WIRE_BYTES, most=10**9), recording)
    assert violation.kind is BreachKind.NOT_MEASURED
    (violation,) = check(whole("fallbacks", 0), recording)
    assert violation.evidence[0].what == "aten.sort on S(0): replicate"
    assert violation.remedy == "Sort before."


def test_an_unasked_collective_is_a_redistribution_too() -> None:
    calls = (
        samples.make_collective(cause=UNASKED, source=LINE),
        samples.make_collective(order=1, cause=FullyShard(action="unshard", num_parameters=1)),
    )
    recording = samples.make_recording(calls)
    (violation,) = check(comm(most=0, causes=(CauseKind.UNASKED,)), recording)
    assert violation.evidence[0].cause == (
        "implicit redistribution Shard(1) → Replicate, required by aten.mm"
    )
    assert check(comm(least=1, most=1, causes=(CauseKind.REDISTRIBUTE,)), recording) == ()
    assert check(comm(least=2, causes=tuple(CauseKind)), recording) == ()


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"figure": Figure.COUNT}, "neither a minimum nor a maximum"),
        ({"figure": Figure.COUNT, "most": -1}, "is negative"),
        ({"figure": Figure.COUNT, "least": 3, "most": 2}, "at least 3 and at most 2"),
        ({"figure": Figure.GAPS, "least": 1}, "a maximum for the total"),
        ({"figure": Figure.GAPS, "most": 1, "module": "a"}, "a maximum for the total"),
        ({"figure": Figure.GAPS, "most": 1, "rule": "a"}, "only findings"),
    ],
)
def test_a_limit_that_means_nothing_is_refused(facts: dict[str, Any], fault: str) -> None:
    with pytest.raises(ContractError, match=fault):
        Limit(**facts)


def test_a_total_is_limited_once() -> None:
    with pytest.raises(ContractError, match="limits gaps 2 times"):
        Contract((Limit(figure=Figure.GAPS, most=1), Limit(figure=Figure.GAPS, most=2)))
