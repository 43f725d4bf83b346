"""Ranks that compiled something else are told apart, and where."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed._functional_collectives import all_gather_tensor

from shardscope import explain, simulate
from shardscope.compile.explain.compare import compare_explanations
from shardscope.record import (
    Explanation,
    GraphCollective,
    RankSpan,
    Recording,
    Severity,
    Source,
)

LINE = Source(file="train.py", line=7)


def on_rank(recording: Recording, rank: int, **changes: Any) -> Recording:
    """The recording as if another of two ranks had made it."""
    told = replace(recording.explanations[0], rank=rank, target="step", **changes)
    run = replace(recording.run, ranks=(RankSpan(rank),), world_size=4)
    return replace(recording, run=run, explanations=(told,), findings=())


def collective(op: str, group: tuple[RankSpan, ...] = (RankSpan(0, 4),)) -> GraphCollective:
    return GraphCollective(graph=0, op=op, result="float32[4]", group=group, source=LINE)


def explained(function: Any) -> Recording:
    return explain(function, torch.ones(4))


SINE = explained(lambda x: x.sin() + 1)
COSINE = explained(lambda x: x.cos() + 1)


def test_ranks_that_compiled_the_same_have_the_same_fingerprint_and_no_finding() -> None:
    merged = compare_explanations([on_rank(SINE, 0), on_rank(SINE, 1)])
    first, second = merged.explanations
    assert first.fingerprint == second.fingerprint
    assert merged.findings == ()


def test_the_first_op_that_differs_is_named_with_its_line() -> None:
    merged = compare_explanations([on_rank(SINE, 0), on_rank(COSINE, 1), on_rank(SINE, 2)])
    (finding,) = merged.findings
    assert finding.rule == "compiled-graphs-differ"
    assert finding.severity is Severity.WARNING
    assert finding.rank == 1
    assert "graph 0, op 0: Tensor.cos of float32[4] here, Tensor.sin of" in finding.fact
    assert finding.source is not None
    assert finding.source.text == "COSINE = explained(lambda x: x.cos() + 1)"


def test_other_shapes_are_a_difference() -> None:
    larger = explain(lambda x: x.sin() + 1, torch.ones(5))
    (finding,) = compare_explanations([on_rank(SINE, 0), on_rank(larger, 3)]).findings
    assert "float32[5] here, Tensor.sin of float32[4] on rank 0" in finding.fact


def test_a_rank_with_a_graph_more_differs() -> None:
    told: Explanation = SINE.explanations[0]
    twice = (told.graphs[0], replace(told.graphs[0], index=1))
    more = on_rank(SINE, 1, graphs=twice, fingerprint="other")
    (finding,) = compare_explanations([on_rank(SINE, 0), more]).findings
    assert finding.fact == "graph 1: 2 ops here, no such graph on rank 0"


def test_collectives_in_another_order_are_an_error() -> None:
    calls = (collective("all_reduce"), collective("all_gather"))
    merged = compare_explanations(
        [
            on_rank(SINE, 0, collectives=calls),
            on_rank(COSINE, 1, collectives=(calls[0],)),
            on_rank(SINE, 2, collectives=calls[::-1]),
        ]
    )
    assert [(one.rule, one.severity, one.rank) for one in merged.findings] == [
        ("compiled-collective-order", Severity.ERROR, 1),
        ("compiled-collective-order", Severity.ERROR, 2),
    ]
    assert "collective 2 in its graphs is none here, and all_gather of" in merged.findings[0].fact
    assert "collective 1 in its graphs is all_gather of" in merged.findings[1].fact
    assert merged.findings[0].source == LINE


def test_collectives_of_groups_that_ranks_do_not_share_are_not_compared() -> None:
    pair, other = (RankSpan(0, 2),), (RankSpan(2, 2),)
    merged = compare_explanations(
        [
            on_rank(SINE, 0, collectives=(collective("all_reduce", pair),)),
            on_rank(SINE, 2, collectives=(collective("all_gather", other),)),
        ]
    )
    assert merged.findings == ()


def test_findings_are_recomputed() -> None:
    merged = compare_explanations([on_rank(SINE, 0), on_rank(COSINE, 1)])
    again = compare_explanations([merged])
    assert again.findings == merged.findings


def talk(x: torch.Tensor) -> torch.Tensor:
    """Rank 1 takes another branch."""
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        x = all_gather_tensor(x, 0, dist.group.WORLD)[:4]
    return x + 1


def test_a_rank_that_takes_another_branch_is_found_before_it_waits_forever() -> None:
    recordings = []
    for rank in range(2):
        with simulate(mesh={"tp": 2}, rank=rank):
            recordings.append(explain(talk, torch.ones(4)))
    (first,) = recordings[0].explanations[0].collectives
    assert first.op == "_c10d_functional.all_reduce"
    assert first.group == (RankSpan(0, 2),)
    errors = [one for one in compare_explanations(recordings).findings if one.severity == "error"]
    (error,) = errors
    assert error.rule == "compiled-collective-order"
    assert "all_gather_into_tensor" in error.fact
    assert "all_reduce" in error.fact
    assert error.source is not None
    assert error.source.text == "x = all_gather_tensor(x, 0, dist.group.WORLD)[:4]"
