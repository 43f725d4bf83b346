"""Errors inside the tracer become gaps, and the step continues."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope import Trace, World, simulate, trace
from shardscope.attribution import call_sites as stack
from shardscope.attribution import module_calls as buckets
from shardscope.attribution import module_calls as calls
from shardscope.attribution import module_names as names
from shardscope.attribution import program_records as inventory
from shardscope.comm import collective_facts, notes, recorder
from shardscope.record import CollectiveKind
from small_models import Block, Net, batch, facts, gap_facts, gaps, shard_net


def broken(*_: object, **__: object) -> NoReturn:
    raise LookupError("torch moved it")


def run_step(model: nn.Module) -> Trace:
    """A step whose result is checked, traced."""
    x = batch().requires_grad_()
    with trace(model) as t:
        model(x).sum().backward()
    assert x.grad is not None
    assert t.recording.run.world_size == 4
    return t


BREAKAGES: dict[str, tuple[Any, str]] = {
    "reading the stack": (recorder, "read_stack"),
    "reading the payload": (notes, "read_payload"),
    "finding the cause": (notes, "find_cause"),
    "finding the phase": (notes, "find_phase"),
    "finding the node": (notes, "current_node"),
    "describing a group": (collective_facts, "group_label"),
    "reading the source line": (stack, "_source_at"),
    "making the record": (notes, "Collective"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_step_goes_on_when_a_collective_is_not_understood(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    holder, attribute = BREAKAGES[name]
    assert hasattr(holder, attribute)
    monkeypatch.setattr(holder, attribute, broken)
    # A group that the mesh does not name, so that describing it takes every road.
    group = dist.new_group([0, 1])
    model = Block()
    model.register_forward_hook(lambda *_: dist.barrier(group))
    t = run_step(model)
    facts_of_gaps = gap_facts(t)
    assert any("it was issued but not understood" in fact for fact in facts_of_gaps)
    assert any("LookupError('torch moved it')" in fact for fact in facts_of_gaps)
    assert {gap.rank for gap in gaps(t)} == {0}
    assert {gap.place for gap in gaps(t)} <= {"_c10d_functional.all_reduce", "c10d.barrier"}


def test_step_goes_on_when_a_module_cannot_be_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names.ModuleNames, "find", broken)
    model = Block()
    with trace() as t:
        model(torch.ones(4, 8)).sum().backward()
    assert gap_facts(t) == ["a module could not be named (LookupError('torch moved it'))"] * 3
    assert [gap.place for gap in gaps(t)] == ["Block", "Linear", "Sum"]
    assert facts(t, "phase", "owner") == [("forward", None), ("backward", None)]


def test_step_goes_on_when_modules_cannot_be_described(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "describe_parameter", broken)
    t = run_step(Block())
    assert gap_facts(t) == ["a module could not be described (LookupError('torch moved it'))"]
    assert gaps(t)[0].place == "linear"
    assert [module.name for module in t.recording.modules] == ["", "sum"]
    assert facts(t, "owner") == [("sum",), ("sum",)]


def test_step_goes_on_when_shards_cannot_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "sharded_parameters", broken)
    t = run_step(Block())
    assert gap_facts(t) == ["its shards could not be read (LookupError('torch moved it'))"]
    assert len(t.recording.modules) == 3


def test_step_goes_on_when_meshes_cannot_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.attribution.program_records.meshes_of", broken)
    t = run_step(Block())
    assert gap_facts(t) == ["the model's meshes could not be read (LookupError('torch moved it'))"]
    assert len(t.recording.collectives) == 2


def test_step_goes_on_when_buckets_cannot_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "read_buckets", broken)
    t = run_step(DistributedDataParallel(nn.Linear(8, 8)))
    assert gap_facts(t)[0] == "its buckets could not be read (torch moved it)"
    assert gap_facts(t)[1].startswith("a bucket was reduced whose parameters are not known")
    kinds = [kind for kind, phase in facts(t, "kind", "phase") if phase == "backward"]
    assert kinds == [CollectiveKind.ALL_REDUCE]


def test_step_goes_on_when_shard_owners_cannot_be_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_facts, "param_group_modules", broken)
    t = run_step(shard_net(Net(depth=1), world.mesh))
    assert [kind for (kind,) in facts(t, "kind")] == ["all_reduce", "all_reduce"]
    assert {gap.place for gap in gaps(t)} == {
        "c10d._allgather_base_",
        "c10d._reduce_scatter_base_",
    }


def test_step_goes_on_when_the_number_of_autograd_nodes_is_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trace(model := Block())
    with t:
        monkeypatch.setattr(calls.ModuleCalls, "creator_of", broken)
        model(batch()).sum().backward()
    assert any("torch moved it" in fact for fact in gap_facts(t))


def test_step_goes_on_when_findings_cannot_be_worked_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = run_step(Block())
    monkeypatch.setattr("shardscope.comm.trace_session.find_comm_problems", broken)
    assert len(t.recording.collectives) == 2
    assert [gap.place for gap in gaps(t)] == ["findings"]


def test_failing_disk_is_a_gap_and_the_step_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model = Block()
    with trace(model, stream=tmp_path / "run.jsonl") as t:
        monkeypatch.setattr("shardscope.record.append_file.os.write", _full)
        model(batch()).sum().backward()
        monkeypatch.undo()
    assert len(t.recording.collectives) == 2
    assert [gap.place for gap in gaps(t)] == ["stream"]
    assert "No space left on device" in gap_facts(t)[0]


def _full(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_module_with_hostile_attributes_is_no_problem(world: World) -> None:
    class Hostile(Block):
        def __getattr__(self, name: str) -> Any:
            if name in ("weight", "module", "reducer", "_get_fsdp_state"):
                raise RuntimeError("hands off")
            return super().__getattr__(name)

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no comparing")

        __hash__ = nn.Module.__hash__  # torch itself needs it

        def __repr__(self) -> str:
            raise RuntimeError("no printing")

        def __bool__(self) -> bool:
            raise RuntimeError("no asking")

    t = run_step(Hostile())
    assert facts(t, "owner") == [("sum",), ("sum",)]
    assert gaps(t) == ()


def test_nothing_is_printed(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    run_step(Block())
    assert capfd.readouterr() == ("", "")


def test_module_that_holds_itself_is_no_problem(world: World) -> None:
    model = Block()
    model.linear.parent = model
    t = run_step(model)
    assert [module.name for module in t.recording.modules] == ["", "linear", "sum"]
    assert facts(t, "owner") == [("sum",), ("sum",)]
    assert gaps(t) == ()


def test_exception_that_cannot_say_what_it_is_stays_the_one_raised(world: World) -> None:
    class MuteError(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no words")

    with pytest.raises(MuteError), trace(Block()) as t:
        raise MuteError
    assert gap_facts(t) == ["it ended early with MuteError"]
    assert len(t.recording.modules) == 3


def test_program_without_arguments_is_no_problem(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert run_step(Block()).recording.run.command == ""


def test_mesh_of_a_world_that_has_ended_is_a_gap() -> None:
    with simulate({"dp": 4}) as world:
        net = shard_net(Net(depth=1), world.mesh)
    with trace(net) as t:
        pass
    assert {gap.place for gap in gaps(t)} == {"mesh"}
