"""Graphs, breaks, diagnoses, proofs and coverage on a page."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from checked_programs import make_checked
from sample_recordings import make_diagnosis, make_holdings, make_parallel, make_recording
from shardscope.record import (
    Agreement,
    Axis,
    BreakSite,
    CompiledGraph,
    Condition,
    Coverage,
    Explanation,
    GraphEnd,
    GraphOp,
    Inserted,
    Level,
    Module,
    Move,
    OpCoverage,
    OpKind,
    OpVerdict,
    Parity,
    Phase,
    RankSpan,
    Severity,
    Source,
    StageTime,
    TensorKind,
    TensorVerdict,
)
from shardscope.report.html import compiler_rows as compiler
from shardscope.report.html.html import build_page
from shardscope.report.html.page_views import Compiler

LINE = Source(file="model.py", line=3, function="forward", text="print(x)")


def explain(rank: int = 0, **changes: Any) -> Explanation:
    ops = (
        GraphOp(kind=OpKind.FUNCTION, op="torch.relu", module="layers.0", source=LINE),
        GraphOp(kind=OpKind.BOOKKEEPING, op="getitem"),
    )
    graphs = tuple(
        CompiledGraph(
            index=index,
            compile_id=f"{index}/0",
            function="forward",
            num_inputs=1,
            num_outputs=1,
            end=end,
            fingerprint="f",
            ops=ops,
            break_site=site,
        )
        for index, (end, site) in enumerate([(GraphEnd.BREAK, 0), (GraphEnd.RETURN, None)])
    )
    facts: dict[str, Any] = {
        "target": "Net",
        "fingerprint": "f",
        "graphs": graphs,
        "break_sites": (BreakSite(source=LINE, num_events=2, reason="print"),),
        "stages": (StageTime(stage="aot", num_calls=1, total_ns=100 + rank),),
    }
    return Explanation(rank=rank, **(facts | changes))


def read(**records: Any) -> Compiler:
    compiler = build_page(make_recording(**records)).compiler
    assert compiler is not None
    return compiler


def test_ranks_that_compiled_the_same_share_an_explanation() -> None:
    compiler = read(explanations=(explain(0), explain(1), explain(2, failure="it raised")))
    first, second = compiler.explanations
    assert (first.ranks, second.ranks, second.failure) == ("0-1", "2", "it raised")
    assert first.summary == (
        "2 graphs with 2 ops; 1 break site, 2 breaks; 0 recompilations; 0 skipped functions."
    )
    assert [stage.total_ns for stage in first.stages] == [100]


def test_graphs_have_their_ops_in_columns() -> None:
    page = build_page(make_recording(explanations=(explain(),)))
    assert page.compiler is not None
    (explanation,) = page.compiler.explanations
    first, second = explanation.graphs
    assert (first.op, first.kind) == (("torch.relu", "getitem"), ("function", "bookkeeping"))
    assert (first.num_ops, first.left_out) == (1, 0)
    assert page.modules.path[first.module[0]] == "layers.0"
    assert (first.module[1], first.line) == (-1, (0, -1))
    assert (first.end, first.break_site) == ("the break at model.py:3", 0)
    assert (second.end, second.break_site) == ("return", -1)
    assert page.sources.text[explanation.break_sites[0].source] == "print(x)"


def test_a_break_site_that_is_not_there_is_none() -> None:
    graph = replace(explain().graphs[0], break_site=7)
    (explanation,) = read(explanations=(explain(graphs=(graph,)),)).explanations
    assert (explanation.graphs[0].end, explanation.graphs[0].break_site) == ("a break", -1)


def test_ops_past_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_MAX_OPS", 3)
    (explanation,) = read(explanations=(explain(),)).explanations
    assert [(len(graph.op), graph.left_out) for graph in explanation.graphs] == [(2, 0), (1, 1)]


def test_a_diagnosis_carries_its_script() -> None:
    script = "import torch\nprint('</script>')\n\tprint(1)\n"
    bad = replace(make_diagnosis(Condition.NAN, "f"), script=script)
    (diagnosis,) = read(diagnoses=(bad,)).diagnoses
    assert (diagnosis.condition, diagnosis.is_bad, diagnosis.script) == (
        "NaN or infinity",
        True,
        script,
    )
    assert (diagnosis.where, diagnosis.stage) == ("graph 1 of 0 – 2, backward", "decomposition")
    assert diagnosis.deviation == "up to 3,204 units in the last place of f"
    assert bad.deviation is not None
    far = replace(bad, deviation=replace(bad.deviation, max_ulp=7e44))  # from a zero
    assert read(diagnoses=(far,)).diagnoses[0].deviation == ""
    assert len(diagnosis.suspects) == 2


def test_ops_that_block_sharding_come_first() -> None:
    ops = tuple(
        OpCoverage(op=op, schema=op, verdict=verdict, num_forward=1, flops=flops)
        for op, verdict, flops in (
            ("fine", OpVerdict.SHARDED, 9),
            ("small", OpVerdict.MISSING, 1),
            ("large", OpVerdict.MISSING, 5),
            ("bad", OpVerdict.WRONG, 0),
        )
    )
    move = Move(argument="mat2", before=("Shard(0)",), after=("Replicate",), num_bytes=2048)
    ops = (replace(ops[0], moves=(move, move)), *ops[1:])
    axes = (Axis(name="tp", size=4),)
    levels = tuple(
        Coverage(rank=rank, level=Level.EXPORTED, axes=axes, has_plan=True, ops=ops)
        for rank in (0, 1)
    )
    (level,) = build_page(make_recording(coverage=levels)).coverage
    assert (level.level, level.mesh) == ("exported, ranks 0-1", "tp=4")
    assert [row.op for row in level.ops] == ["bad", "large", "small", "fine"]
    assert {
        verdict: count for verdict, count in zip(level.verdicts, level.counts, strict=True) if count
    } == {"wrong": 1, "missing": 2, "sharded": 1}
    assert level.ops[-1].moves[0] == "mat2: Shard(0) → Replicate (2.00 KiB)"
    assert level.ops[-1].moved_bytes == 4096
    (level,) = build_page(make_recording(coverage=levels[:1])).coverage
    assert level.level == "exported"


def test_tensors_that_differ_come_first() -> None:
    verdicts = tuple(
        TensorVerdict(name=name, kind=TensorKind.GRADIENT, agreement=agreement, error=0.5)
        for name, agreement in (
            ("a", Agreement.EQUAL),
            ("b", Agreement.RANKS_DISAGREE),
            ("c", Agreement.ROUNDED),
        )
    )
    axes = (Axis(name="tp", size=2),)
    page = build_page(make_recording(parity=(Parity(axes=axes, tensors=verdicts),)))
    assert page.proof is not None
    (parity,) = page.proof.parity
    assert (parity.tensors.name, parity.tensors.is_fine) == (("b", "a", "c"), (False, True, True))
    assert parity.tensors.agreement[0] == "ranks disagree"
    assert (parity.is_fine, parity.summary.startswith("1 of 3 tensors differ")) == (False, True)


def test_collectives_that_were_put_in_fold_over_layers() -> None:
    program = make_parallel().parallel[0]
    inserted = tuple(
        Inserted(
            kind=program.inserted[0].kind,
            axis="tp",
            num_ranks=4,
            size_bytes=10,
            phase=Phase.FORWARD,
            node=f"n{layer}",
            module=f"layers.{layer}.wo",
            cause=f"layers.{layer}.wo.weight is cut",
        )
        for layer in range(3)
    )
    recording = make_recording(parallel=(replace(program, inserted=inserted, fallbacks=()),))
    page = build_page(recording)
    assert page.proof is not None
    (row,) = page.proof.parallel[0].inserted
    assert (row.size_bytes, row.cause) == (10, "layers.0-2.wo.weight is cut")
    assert [page.modules.path[module] for module in row.modules] == [
        f"layers.{layer}.wo" for layer in range(3)
    ]
    assert row.sources == (-1, -1, -1)


def test_tensors_have_the_modules_that_own_them() -> None:
    names = {"": TensorKind.OUTPUT, "layers.0.wq.weight": TensorKind.GRADIENT}
    names |= {"[1]": TensorKind.OUTPUT, "head.bias": TensorKind.GRADIENT}
    verdicts = tuple(
        TensorVerdict(name=name, kind=kind, agreement=Agreement.CLOSE)
        for name, kind in names.items()
    )
    axes = (Axis(name="tp", size=2),)
    modules = tuple(
        Module(name=name, type="Linear", ranks=(RankSpan(0),)) for name in ("layers.0.wq", "head")
    )
    page = build_page(
        make_recording(modules=modules, parity=(Parity(axes=axes, tensors=verdicts),))
    )
    assert page.proof is not None
    (parity,) = page.proof.parity
    assert parity.tensors.name == ("the output", "layers.0.wq.weight", "output [1]", "head.bias")
    owners = [page.modules.path[at] if at >= 0 else None for at in parity.tensors.module]
    assert owners == [None, "layers.0.wq", None, "head"]
    assert parity.tensors.phase == ("forward", "backward", "forward", "backward")


def test_tensors_of_training_steps_have_the_phase_and_the_step_that_computed_them() -> None:
    kinds = (TensorKind.LOSS, TensorKind.GRADIENT, TensorKind.NORM, TensorKind.UPDATED)
    verdicts = tuple(
        TensorVerdict(
            name="a.weight", kind=kind, agreement=Agreement.CLOSE, step=2, dtype="bfloat16"
        )
        for kind in (*kinds, TensorKind.PARAMETER)
    )
    page = build_page(make_recording(parity=(Parity(axes=(), tensors=verdicts),)))
    assert page.proof is not None
    tensors = page.proof.parity[0].tensors
    assert tensors.phase == ("forward", "backward", "outside", "optimizer", "")
    assert (set(tensors.step), set(tensors.dtype)) == ({2}, {"bfloat16"})
    assert tensors.kind[1] == "gradient, step 2"


def test_a_check_before_launch_has_its_variations_in_columns() -> None:
    page = build_page(make_checked(Severity.WARNING))
    assert page.proof is not None
    (item,) = page.proof.checks
    assert item.severity == "warning"
    assert item.ranks == "2 of 2 ranks were run, with data, 6 steps, to the end of the program"
    assert item.variations.outcome == ("diverged", "not tried", "raised", "same")
    assert item.variations.ranks == ("1",) * 4
    assert {page.sources.line[at] for at in item.variations.source} == {12}
    fine = build_page(make_checked()).proof
    assert fine is not None
    assert fine.checks[0].severity == ""


def test_a_page_without_compilers_has_no_such_view() -> None:
    page = build_page(make_holdings())
    assert page.compiler is None
    assert page.proof is not None
