"""Assertions about a step: what they run, what they hold it to, what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sample_recordings import make_collective, make_recording
from shardscope import ShardscopeError, memory, save, simulate, trace
from shardscope.contract import (
    BreachKind,
    Contract,
    Figure,
    Limit,
    check,
    record_contract,
    write_contract,
)
from shardscope.errors import ContractError
from shardscope.record import CollectiveKind, Redistribute, Severity
from shardscope.testing import (
    BreachError,
    assert_comm,
    assert_contract,
    assert_memory,
    assert_no_graph_breaks,
)
from small_models import MLP, Net, alone_on_gloo, batch, shard_net, split_mlp

TP = {"tp": 4}


class Stack(nn.Module):
    """Layers that each say an all-reduce in forward, and one in backward but for the first."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Chatty(Stack):
    """Says one all-reduce more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        dist.all_reduce(y.detach().clone())
        return y


def build(mesh: DeviceMesh, kind: type[nn.Module] = Stack) -> nn.Module:
    return split_mlp(kind(), mesh["tp"])


def build_on_meta(mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        model = Stack()
    return split_mlp(model, mesh["tp"])


def step(model: nn.Module) -> None:
    model(batch()).sum().backward()


def broken(assertion: Callable[[], None]) -> BreachError:
    with pytest.raises(BreachError) as raised:
        assertion()
    assert isinstance(raised.value, AssertionError)
    return raised.value


@pytest.mark.parametrize("model", [build, build_on_meta])
def test_a_step_within_its_limits_passes(model: Any) -> None:
    assert_comm(
        step,
        model=model,
        mesh=TP,
        phase="forward",
        all_reduce=3,
        all_gather=0,
        max_bytes="1KiB",
        per_module={"layers.*": {"all_reduce": 1, "bytes": 128}, "layers.*.up": {"count": 0}},
    )
    assert not dist.is_initialized()


def test_a_step_above_its_limits_fails_with_module_cause_and_line() -> None:
    error = broken(
        lambda: assert_comm(
            step, model=lambda mesh: build(mesh, Chatty), mesh=TP, phase="forward", all_reduce=3,
            per_module={"layers.*": {"all_reduce": 1}},
        )
    )  # fmt: skip
    (violation,) = error.breaches
    assert (violation.expected, violation.actual, violation.kind) == (
        "exactly 3",
        "4",
        BreachKind.TOO_MUCH,
    )
    text = str(error)
    assert "assert_comm(): 1 of 2 limits broken" in text
    assert "in the root module: call of torch.distributed.all_reduce" in text
    assert "test_assertions.py" in text
    assert "dist.all_reduce(y.detach().clone())" in text


def test_a_limit_per_module_fails_for_the_modules_that_break_it() -> None:
    error = broken(
        lambda: assert_comm(step, model=build, mesh=TP, per_module={"layers.*": {"all_reduce": 1}})
    )
    assert [violation.modules for violation in error.breaches] == [("layers.1", "layers.2")]
    assert "module    layers.1, layers.2" in str(error)


def test_a_world_that_is_there_is_used_and_so_are_traces_and_recordings(tmp_path: Path) -> None:
    with simulate(mesh={"dp": 2}) as world:
        net = shard_net(Net(), world.mesh)
        assert_comm(lambda: step(net), model=net, phase="forward", axis="dp", all_gather=3)
        with pytest.raises(ContractError, match="in a simulated world of"):
            assert_comm(step, model=net, mesh={"dp": 4}, all_gather=3)
        with trace(net) as t:
            step(net)
        assert_comm(t, axis="dp", reduce_scatter=3)
        assert_comm(t.recording, reduce_scatter=3, kind="all_gather", min_count=3)
        broken(lambda: assert_comm(t, reduce_scatter=2))
        path = write_contract(record_contract(t.recording), tmp_path / "shardscope.toml")
        assert_contract(step, path, model=net)


def test_a_real_process_group_is_used() -> None:
    with alone_on_gloo():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        assert_comm(lambda: dist.all_reduce(torch.ones(2)), all_reduce=1)
        assert_comm(lambda: dist.all_reduce(torch.ones(2)), mesh=mesh, max_bytes=8)


def test_a_traced_model_passes_its_own_contract_and_fails_with_more_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with simulate(mesh=TP) as world, trace(model := build(world.mesh)) as t:
        step(model)
    contract = record_contract(t.recording)
    assert check(contract, t.recording) == ()
    write_contract(contract, "shardscope.toml")
    assert_contract(t, "shardscope.toml")
    assert_contract(step, model=build, mesh=TP)
    error = broken(lambda: assert_contract(step, model=lambda mesh: build(mesh, Chatty), mesh=TP))
    assert "shardscope.toml: " in str(error)
    assert {violation.evidence[0].cause for violation in error.breaches} == {
        "call of torch.distributed.all_reduce"
    }


def test_a_contract_may_be_made_in_python_and_counts_findings_that_show_only_now() -> None:
    gather = make_collective(
        kind=CollectiveKind.ALL_GATHER,
        output_bytes=2**20,
        cause=Redistribute(
            before=("Shard(0)",), after=("Replicate",), asked_by="aten.mm", is_implicit=True
        ),
    )
    recording = make_recording((gather,))
    limit = Limit(figure=Figure.FINDINGS, severity=Severity.WARNING, most=0)
    error = broken(lambda: assert_contract(recording, Contract((limit,))))
    assert "assert_contract(): 1 of 1 limit broken" in str(error)
    assert "implicit-gather in the root module" in str(error)
    assert "Give aten.mm inputs whose placements it can use" in str(error)


def test_a_contract_on_memory_wants_a_recording_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "shardscope.toml"
    path.write_text("[contract]\npeak_memory = '1GiB'\n[[contract.comm]]\ncount = 0\n")
    model = MLP()
    with simulate(mesh=TP), trace(model) as t:
        step(model)
    error = broken(lambda: assert_contract(t, path))
    assert [violation.kind for violation in error.breaches] == [BreachKind.NOT_MEASURED]
    told = memory(model, lambda: step(model))
    assert_contract([t, told], path)
    assert_contract((t.recording, told.recording), path)


def test_memory_is_checked_against_its_peak_alone_and_in_a_world() -> None:
    model = MLP()
    assert_memory(lambda: step(model), model=model, max_peak="1GiB")
    assert_memory(
        step, model=build_on_meta, mesh=TP, max_peak=2**30,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    error = broken(lambda: assert_memory(step, model=build_on_meta, mesh=TP, max_peak="1KiB"))
    assert "peak memory\n  expected  at most 1 KiB\n" in str(error)
    assert "at the peak" in str(error)


def test_a_function_of_one_graph_passes_and_one_that_breaks_fails_with_its_line() -> None:
    def whole(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return x * factor

    def torn(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    assert_no_graph_breaks(whole, torch.ones(2), factor=3)
    error = broken(lambda: assert_no_graph_breaks(torn, torch.ones(2)))
    assert "graph breaks\n  expected  none\n  actual    1" in str(error)
    assert "torch._dynamo.graph_break()" in str(error)

    def raising(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    error = broken(lambda: assert_no_graph_breaks(raising, torch.ones(2)))
    assert error.breaches


def test_what_the_step_raises_is_raised_and_the_world_is_left() -> None:
    def fail(model: nn.Module) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        assert_comm(fail, model=build, mesh=TP, all_reduce=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: assert_comm(step, model=build, mesh=TP), "has no limit"),
        (lambda: assert_comm(step, model=build, all_reduce=1), "no world for the step to run in"),
        (lambda: assert_comm(step, model=build, mesh=TP, all_reduc=1), "Did you mean 'all_reduce'"),
        (lambda: assert_comm(step, mesh=TP, per_module={"a": {"al_reduce": 1}}), "Did you mean"),
        (lambda: assert_comm(step, mesh=TP, per_module={"a": 3}), "Make it a table"),
        (lambda: assert_comm(step, mesh=TP, all_reduce=1, phase="foward"), "'forward'"),
        (lambda: assert_comm(step, mesh=TP, max_bytes="64 elephants"), "64 elephants"),
        (lambda: assert_comm(MLP(), mesh=TP, all_reduce=1), "got MLP instead of a step"),
        (lambda: assert_comm(3, mesh=TP, all_reduce=1), "got int instead of a step"),
        (lambda: assert_comm(step, model=lambda mesh: 3, mesh=TP, all_reduce=1), "returned int"),
        (lambda: assert_memory(step, max_peak="much"), "max_peak is 'much'"),
        (lambda: assert_memory(step, max_peak=1, mesh=TP), "needs the model"),
        (lambda: assert_contract(step, "none.toml", mesh=TP), "There is no contract 'none.toml'"),
    ],
)  # fmt: skip
def test_a_call_that_makes_no_sense_says_so(call: Callable[[], None], sentence: str) -> None:
    with pytest.raises(ShardscopeError) as raised:
        call()
    assert sentence in str(raised.value)


def test_a_saved_recording_is_checked_against_a_contract_like_a_fresh_one(tmp_path: Path) -> None:
    with simulate(mesh=TP) as world, trace(model := build(world.mesh)) as t:
        step(model)
    from shardscope import load

    assert_comm(load(save(t.recording, tmp_path / "step.json")), all_reduce=5)
