"""Collectives of spmd_types have the call, its types before and after, and its axis as cause."""

from __future__ import annotations

from pathlib import Path

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch

from shardscope import load, simulate, trace
from shardscope.contract.collective_totals import classify_cause
from shardscope.record import Collective, Phase, SpmdCall, describe_cause
from shardscope.report.export.csv import render_csv
from spmd_models import TypedBlock

# spmd_types 0.3.1 calls functions that torch 2.13 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")

FORWARD = [
    "spmd_types redistribute S(0) → R on tp",
    "spmd_types reduce_scatter P → S(0) on tp",
    "spmd_types all_reduce V → R on tp",
]
BACKWARD = [
    "spmd_types all_reduce P → R on tp, backward of all_reduce",
    "spmd_types all_reduce P → I on tp, backward of convert",
    "spmd_types all_gather S(0) → R on tp, backward of reduce_scatter",
    "spmd_types reduce_scatter P → S(0) on tp, backward of all_gather",
]


def run_typed(*, is_checked: bool = False) -> tuple[Collective, ...]:
    with simulate({"dp": 2, "tp": 4}) as world:
        groups = world.mesh.get_group("tp"), world.mesh.get_group("dp")
        model = torch.nn.Sequential(TypedBlock(*groups, dim=16))
        x = torch.ones(2, 16, requires_grad=True)
        spmd.assert_type(x, {groups[0]: spmd.S(0), groups[1]: spmd.R})
        with trace(model) as t:
            if is_checked:
                with spmd.set_current_mesh(world.mesh), spmd.checker.typecheck():
                    loss = model(x).sum()
            else:
                loss = model(x).sum()
            loss.backward()
    return t.recording.collectives


def test_forward_and_backward_name_the_call_its_types_and_its_axis() -> None:
    collectives = run_typed()
    words = [(call.phase, describe_cause(call.cause)) for call in collectives]
    assert words == [
        *((Phase.FORWARD, cause) for cause in FORWARD),
        *((Phase.BACKWARD, cause) for cause in BACKWARD),
    ]
    assert {call.owner for call in collectives} == {"0"}
    sources = [call.source for call in collectives if call.source is not None]
    assert [(Path(source.file).name, source.text[:23]) for source in sources] == [
        ("spmd_models.py", "x = spmd.redistribute(x"),
        ("spmd_models.py", "y = spmd.reduce_scatter"),
        ("spmd_models.py", "norm = spmd.all_reduce("),
        *[("test_trace_spmd_types.py", "loss.backward()")] * 4,
    ]


def test_types_are_read_while_spmd_types_checks_them() -> None:
    assert [describe_cause(call.cause) for call in run_typed(is_checked=True)] == [
        *FORWARD,
        *BACKWARD,
    ]


def test_stacked_and_uneven_collectives_are_attributed_too() -> None:
    with simulate({"tp": 4}) as world:
        tp = world.mesh.get_group("tp")
        x = torch.ones(4, 4, requires_grad=True)
        with trace() as t:
            spmd.all_gather(x, tp, src=spmd.V, dst=spmd.R).sum().backward()
            spmd.all_to_all(x, tp, src=spmd.S(0), dst=spmd.S(1))
            spmd.all_gather(x, tp, src=spmd.S(0), dst=spmd.I, split_sizes=[4] * 4)
            spmd.unshard(x, tp, src=spmd.S(0), dst=spmd.R)
    assert [describe_cause(call.cause) for call in t.recording.collectives] == [
        "spmd_types all_gather V → R on tp",
        "spmd_types reduce_scatter P → V on tp, backward of all_gather",
        "spmd_types all_to_all S(0) → S(1) on tp",
        "spmd_types all_gather S(0) → I on tp",
        "spmd_types unshard S(0) → R on tp",
    ]


def test_plain_collectives_of_the_same_program_keep_their_own_cause() -> None:
    with simulate({"tp": 4}) as world, trace() as t:
        torch.distributed.all_reduce(torch.ones(4), group=world.mesh.get_group("tp"))
    (call,) = t.recording.collectives
    assert describe_cause(call.cause) == "call of torch.distributed.all_reduce"


def test_cause_is_saved_exported_and_known_to_contracts(tmp_path: Path) -> None:
    with simulate({"tp": 4}) as world, trace() as t:
        tp = world.mesh.get_group("tp")
        spmd.all_reduce(torch.ones(4), tp, src=spmd.P, dst=spmd.R)
    t.save(tmp_path / "typed.json.gz")
    (call,) = load(tmp_path / "typed.json.gz").collectives
    assert call.cause == SpmdCall(function="all_reduce", axis="tp", before="P", after="R")
    assert classify_cause(call.cause) == ("spmd_types",)
    assert "spmd_types,all_reduce,P,R" in render_csv(t.recording)
