"""Why a collective was issued: the redistribution, the shard, the bucket or the call."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardscope import World, load, simulate, trace
from shardscope.record import (
    Call,
    CollectiveKind,
    FullyShard,
    Phase,
    Redistribute,
)
from small_models import MLP, Net, batch, everyone, facts, gap_facts, only, shard_net, split_mlp

K = CollectiveKind


def test_explicit_redistribution_names_placements_and_call(world: World) -> None:
    tensor = distribute_tensor(torch.ones(8, 8), world.mesh, [Shard(0)])
    with trace() as t:
        tensor.redistribute(placements=[Replicate()])
    assert only(t).cause == Redistribute(
        before=("Shard(0)",),
        after=("Replicate",),
        asked_by="DTensor.redistribute",
        is_implicit=False,
    )
    assert only(t).source.text == "tensor.redistribute(placements=[Replicate()])"
    assert (only(t).kind, only(t).input_bytes, only(t).output_bytes) == (K.ALL_GATHER, 64, 256)


def test_full_tensor_names_itself(world: World) -> None:
    tensor = DTensor.from_local(torch.ones(8), world.mesh, [Partial()])
    with trace() as t:
        tensor.full_tensor()
    assert only(t).cause.asked_by == "DTensor.full_tensor"
    assert only(t).cause.before == ("Partial(sum)",)
    assert only(t).reduce_op == "sum"


def test_change_of_sharded_dim_on_a_cpu_mesh_is_a_gather(world: World) -> None:
    tensor = distribute_tensor(torch.ones(8, 8), world.mesh, [Shard(0)])
    with trace() as t:
        tensor.redistribute(placements=[Shard(1)])  # gloo has no all-to-all, so DTensor uses none
    (call,) = t.recording.collectives
    assert (call.kind, call.input_bytes, call.wire_bytes) == (K.ALL_GATHER, 64, 192)
    assert (call.cause.before, call.cause.after) == (("Shard(0)",), ("Shard(1)",))
    (fact,) = gap_facts(t)
    assert 'device="cuda"' in fact


def test_implicit_redistribution_names_the_op_that_asked(world: World) -> None:
    tensor = distribute_tensor(torch.ones(8, 8), world.mesh, [Shard(1)])
    with trace() as t:
        torch.sort(tensor, dim=1)
    cause = only(t).cause
    assert (cause.is_implicit, cause.asked_by) == (True, "aten.sort.default")
    assert (cause.before, cause.after) == (("Shard(1)",), ("Replicate",))


def test_two_axes_of_a_mesh_are_two_placements() -> None:
    with simulate({"dp": 2, "tp": 4}, rank=0) as world:
        tensor = distribute_tensor(torch.ones(8, 8), world.mesh, [Shard(0), Shard(1)])
        with trace() as t:
            tensor.redistribute(placements=[Replicate(), Shard(1)])
    assert only(t).cause.before == ("Shard(0)", "Shard(1)")
    assert only(t).cause.after == ("Replicate", "Shard(1)")
    assert (only(t).axis, only(t).num_ranks) == ("dp", 2)


def test_a_tensor_parallel_style_is_named_as_the_cause(world: World) -> None:
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False))
    parallelize_module(model, world.mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with trace(model) as t:
        model(batch().requires_grad_()).sum().backward()
    forward, backward = t.recording.collectives
    assert forward.cause == Redistribute(
        before=("Partial(sum)",),
        after=("Replicate",),
        asked_by="RowwiseParallel",
        is_implicit=False,
    )
    assert isinstance(backward.cause, Redistribute)
    assert (backward.cause.before, backward.cause.after) == (("Partial(sum)",), ("Replicate",))
    assert backward.cause.is_implicit is False


def test_fully_shard_says_what_it_does_and_for_how_many_parameters(world: World) -> None:
    net = shard_net(Net(depth=1), world.mesh)
    with trace(net) as t:
        net(batch()).sum().backward()
    causes = [cause for cause, kind in facts(t, "cause", "kind") if kind != K.ALL_REDUCE]
    assert set(causes) == {
        FullyShard(action="unshard", num_parameters=2),
        FullyShard(action="reduce", num_parameters=2),
    }


def test_collectives_of_modules_sharded_together_belong_to_what_has_them_all(world: World) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
    fully_shard([net[1][0], net[1][1]], mesh=world.mesh)
    fully_shard(net, mesh=world.mesh)
    with trace(net) as t:
        net(batch()).sum().backward()
    owners = {(cause.num_parameters, owner) for cause, owner in facts(t, "cause", "owner")}
    assert owners == {(2, ""), (4, "1")}


def test_gradients_that_tensor_parallelism_reduces_are_not_fsdps() -> None:
    """FSDP calls DTensor's redistribution, over an axis that is not FSDP's."""
    with simulate({"dp": 2, "tp": 2}) as world:
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU())
        plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
        parallelize_module(model, world.mesh["tp"], plan)
        fully_shard(model, mesh=world.mesh["dp"])
        with trace(model) as t:
            model(torch.randn(2, 4, 8)).sum().backward()
    reductions = [
        collective for collective in t.recording.collectives if collective.kind is K.ALL_REDUCE
    ]
    assert {(collective.axis, collective.owner) for collective in reductions} == {("tp", "0")}
    assert {collective.cause for collective in reductions} == {
        Redistribute(
            before=("Partial(sum)",),
            after=("Replicate",),
            asked_by="parameter gradient",
            is_implicit=False,
        )
    }


def test_fully_shard_in_mixed_precision_sends_what_it_says(world: World) -> None:
    model = nn.Linear(8, 8, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    with trace(model) as t:
        model(batch()).sum().backward()
    gather, reduction = t.recording.collectives
    assert (gather.dtype, gather.input_bytes, gather.output_bytes) == ("bfloat16", 32, 128)
    assert (reduction.dtype, reduction.input_bytes, reduction.output_bytes) == ("float32", 256, 64)
    assert reduction.reduce_op in ("avg", "sum")


def test_explicit_unshard_belongs_to_the_module_asked(world: World) -> None:
    net = shard_net(Net(depth=1), world.mesh)
    net(batch())  # FSDP sets itself up in its first forward
    net.layers[0].reshard()
    with trace(net) as t:
        net.layers[0].unshard()
    assert facts(t, "owner", "trigger", "phase") == [("layers.0", None, Phase.OUTSIDE)]


def test_plain_call_in_a_hook_names_the_call(world: World) -> None:
    model = nn.Linear(8, 8, bias=False)
    model.weight.register_hook(lambda grad: dist.all_reduce(grad) and None)
    with trace(model) as t:
        model(batch()).sum().backward()
    assert only(t).cause == Call(api="torch.distributed.all_reduce")
    assert only(t).owner == ""


def test_split_model_on_fake_tensors_has_the_same_causes(world: World) -> None:
    with torch.device("meta"):
        model = MLP()
    split_mlp(model, world.mesh)
    world.materialize(model)
    with trace(model) as t:
        model(batch())
    assert only(t).cause.asked_by == "RowwiseParallel"


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_line_of_a_deprecated_function_is_its_callers(world: World) -> None:
    with trace() as t:
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(1))  # here
    ((source,),) = facts(t, "source")
    assert source.text.endswith("# here")


def test_methods_of_a_group_are_calls_of_their_ops(world: World) -> None:
    linear = nn.Linear(8, 8, bias=False)
    linear.weight.register_post_accumulate_grad_hook(
        lambda p: print(everyone().allreduce([p.grad]).wait())
    )
    with trace(linear) as t:
        everyone().barrier().wait()
        linear(batch()).sum().backward()
    assert facts(t, "cause", "owner") == [
        (Call(api="torch.ops.c10d.barrier"), None),
        (Call(api="torch.ops.c10d.allreduce_"), ""),
    ]
    assert t.recording.gaps == ()


def test_an_exception_of_a_signal_handler_is_raised_in_the_program(world: World) -> None:
    class Timeout(Exception):  # noqa: N818
        pass

    def handler(*_: object) -> None:
        raise Timeout

    recorder_module = importlib.import_module("shardscope.comm.recorder")
    read_stack = recorder_module.read_stack

    def interrupted(frame: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return read_stack(frame)

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with (
            mock.patch.object(recorder_module, "read_stack", interrupted),
            trace() as t,
            pytest.raises(Timeout),
        ):
            dist.barrier()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert t.recording.gaps == ()


def test_deleted_working_directory_costs_nothing(world: World, tmp_path: Path) -> None:
    before = os.getcwd()
    folder = tmp_path / "gone"
    folder.mkdir()
    os.chdir(folder)
    try:
        folder.rmdir()
        with trace() as t:
            exec(compile("dist.barrier()", "/elsewhere/program.py", "exec"), {"dist": dist})
        ((source,),) = facts(t, "source")
    finally:
        os.chdir(before)
    assert source.file == "/elsewhere/program.py"
    assert t.recording.gaps == ()


def test_path_that_is_not_utf8_is_written_out(world: World, tmp_path: Path) -> None:
    with trace() as t:
        exec(compile("dist.barrier()", "/tmp-\udcff.py", "exec"), {"dist": dist})
    ((source,),) = facts(t, "source")
    assert source.file == "/tmp-\\udcff.py"
    assert load(t.save(tmp_path / "run.json")) == t.recording
