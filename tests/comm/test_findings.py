"""Implicit communication has a finding, once per stack of layers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sample_recordings import make_collective, make_recording
from shardscope.comm.findings import find_comm_problems, review
from shardscope.record import CollectiveKind, Finding, Phase, Redistribute, Severity, Source, merge

_CAUSE = Redistribute(
    before=("Shard(dim=1)",), after=("Replicate()",), asked_by="aten.topk.default", is_implicit=True
)


def _gather(**changes):
    facts = {
        "kind": CollectiveKind.ALL_GATHER,
        "output_bytes": 2 * 1024**2,
        "cause": _CAUSE,
        "owner": "layers.0.moe",
        "source": Source(file="moe.py", line=7),
    }
    return make_collective(**(facts | changes))


def test_implicit_gather_names_module_op_bytes_line_and_remedy():
    (finding,) = find_comm_problems(make_recording((_gather(),)))
    assert (finding.rule, finding.severity) == ("implicit-gather", Severity.WARNING)
    assert finding.subject == "layers.0.moe"
    assert finding.fact == (
        "aten.topk cannot run on its input as it is sharded, so DTensor inserted an implicit "
        "all-gather (Shard(dim=1) → Replicate()): 1 call, 2.00 MiB received"
    )
    assert finding.remedy.startswith("Give aten.topk inputs whose placements it can use")
    assert finding.source == Source(file="moe.py", line=7)
    assert finding.rank == 0


def test_implicit_all_to_all_has_a_finding_of_its_own():
    moved = replace(_CAUSE, after=("Shard(dim=0)",))
    exchange = _gather(kind=CollectiveKind.ALL_TO_ALL, cause=moved, order=1)
    gather, exchange_finding = find_comm_problems(make_recording((_gather(), exchange)))
    assert (gather.rule, exchange_finding.rule) == ("implicit-gather", "implicit-all-to-all")
    assert "implicit all-to-all (Shard(dim=1) → Shard(dim=0)): 1 call" in exchange_finding.fact


def test_layers_of_a_stack_share_a_finding():
    calls = tuple(_gather(owner=f"layers.{index}.moe", order=index) for index in range(32))
    (finding,) = find_comm_problems(make_recording(calls))
    assert finding.subject == "layers.*.moe"
    where = "32 calls, one in each of layers.0.moe … layers.31.moe"
    assert f"{where}, 64.0 MiB received" in finding.fact
    (finding,) = find_comm_problems(make_recording((*calls[:2], *calls[:1])))
    assert "3 calls, in layers.0.moe and layers.1.moe (2 modules), " in finding.fact


def test_large_gathers_are_reported_in_gibibytes():
    calls = tuple(_gather(output_bytes=2**30, order=index) for index in range(1500))
    (finding,) = find_comm_problems(make_recording(calls))
    assert finding.fact.endswith(": 1,500 calls, 1.46 TiB received")


def test_numbers_inside_words_are_not_layers():
    calls = tuple(_gather(owner=f"block{index}") for index in range(2))
    assert [f.subject for f in find_comm_problems(make_recording(calls))] == ["block0", "block1"]


def test_root_and_many_ranks_are_named():
    calls = tuple(_gather(owner="", rank=rank) for rank in range(4))
    (finding,) = find_comm_problems(make_recording(calls))
    assert finding.subject == "the root module"
    assert "4 calls on ranks 0-3" in finding.fact
    assert finding.rank is None


@pytest.mark.parametrize(
    "change",
    [
        {"cause": replace(_CAUSE, is_implicit=False)},
        {"cause": None},
        {"kind": CollectiveKind.ALL_REDUCE},
        {"output_bytes": 1024**2 - 1},
    ],
)
def test_explicit_and_small_redistributions_are_not_findings(change):
    assert find_comm_problems(make_recording((_gather(**change),))) == ()


def test_review_recomputes_its_findings_and_keeps_those_of_other_instruments():
    unrelated = Finding(rule="other", severity=Severity.INFO, subject="s", fact="f", remedy="r")
    parts = [
        make_recording((_gather(rank=rank),), world_size=2, ranks=(rank,), findings=(unrelated,))
        for rank in range(2)
    ]
    once = review(merge([review(part) for part in parts]))
    assert [finding.rule for finding in once.findings] == ["implicit-gather", "other"]
    assert review(once) == once


def test_gather_after_the_model_is_a_finding_outside_any_module():
    call = _gather(phase=Phase.OUTSIDE, owner=None, trigger=None)
    (finding,) = find_comm_problems(make_recording((call,)))
    assert finding.subject == "outside any module"
