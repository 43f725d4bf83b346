"""DDP's reducer, written in C++: which bucket it reduces, with which parameters, and when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from shardscope import Trace, World, trace
from shardscope.record import BucketReduce, Call, CollectiveKind, Phase
from small_models import MLP, batch, facts, gap_facts

K = CollectiveKind


def buckets(t: Trace) -> list[tuple[int | None, tuple[str, ...]]]:
    return [
        (call.cause.bucket, call.cause.parameters)
        for call in t.recording.collectives
        if isinstance(call.cause, BucketReduce)
    ]


def ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **options)


def step(model: nn.Module) -> None:
    model(batch()).sum().backward()
    model.zero_grad()


MLP_PARAMETERS = ("up.weight", "down.weight")


def test_one_bucket_holds_every_parameter_before_and_after_the_rebuild(world: World) -> None:
    model = ddp(MLP())
    traces = []
    for _ in range(3):
        with trace(model) as t:
            step(model)
        traces.append(t)
    for t in traces:
        ((index, parameters),) = buckets(t)
        assert index == 0
        assert sorted(parameters) == sorted(MLP_PARAMETERS)
        (reduction,) = [c for c in t.recording.collectives if c.phase == Phase.BACKWARD]
        assert (reduction.kind, reduction.owner, reduction.axis) == (K.ALL_REDUCE, "", "dp")
        assert reduction.input_bytes == 2 * 8 * 32 * 4
        assert t.recording.gaps == ()


def small_buckets(module: nn.Module, **options: Any) -> DistributedDataParallel:
    # One parameter a bucket: a bucket is full as soon as it holds anything.
    return ddp(module, bucket_cap_mb=1e-6, **options)


@pytest.mark.parametrize("num_steps_before", [1, 2])
def test_each_bucket_of_the_rebuilt_ones_names_its_parameters(
    world: World, num_steps_before: int
) -> None:
    model = small_buckets(nn.Sequential(MLP(), MLP()))
    for _ in range(num_steps_before):
        step(model)
    with trace(model) as t:
        step(model)
    reduced = [
        (call.cause.parameters, call.owner)
        for call in t.recording.collectives
        if isinstance(call.cause, BucketReduce)
    ]
    assert reduced == [
        (("1.down.weight",), "1.down"),
        (("1.up.weight",), "1.up"),
        (("0.down.weight",), "0.down"),
        (("0.up.weight",), "0.up"),
    ]
    assert [index for index, _ in buckets(t)] == [0, 1, 2, 3]


def test_buckets_of_equal_size_are_distinguished_over_steps(world: World) -> None:
    model = small_buckets(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]))
    for _ in range(2):
        step(model)
    with trace(model) as t:
        step(model)
        step(model)
    first, second = buckets(t)[: len(buckets(t)) // 2], buckets(t)[len(buckets(t)) // 2 :]
    assert first == second
    assert sorted(name for _, names in first for name in names) == [
        "0.weight",
        "1.weight",
        "2.weight",
        "3.weight",
    ]


def test_unused_parameters_are_reduced_too(world: World) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(8, 8, bias=False)
            self.unused = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = ddp(Partly(), find_unused_parameters=True)
    with trace(model) as t:
        step(model)
    assert (0, ("used.weight", "unused.weight")) in [
        (index, tuple(sorted(names, reverse=True))) for index, names in buckets(t)
    ]


def average(state, bucket):  # DDP checks annotations, and does not know them as strings
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "of the user's own": (average, "float32"),
    "torch's all-reduce": (default_hooks.allreduce_hook, "float32"),
    "compressing": (default_hooks.fp16_compress_hook, "float16"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hook_still_names_the_bucket(world: World, name: str) -> None:
    hook, dtype = HOOKS[name]
    model = ddp(MLP())
    model.register_comm_hook(None, hook)
    with trace(model) as t:
        step(model)
    ((_, parameters),) = buckets(t)
    assert sorted(parameters) == sorted(MLP_PARAMETERS)
    reduction = t.recording.collectives[-1]
    assert reduction.dtype == dtype
    assert reduction.phase == Phase.BACKWARD


def test_gradient_accumulation_reduces_once(world: World) -> None:
    model = ddp(MLP())
    with trace(model) as t:
        with model.no_sync():
            model(batch()).sum().backward()
            model(batch()).sum().backward()
        model(batch()).sum().backward()
    assert len(buckets(t)) == 1


def test_buckets_are_known_though_only_the_wrapped_model_was_given(world: World) -> None:
    net = MLP()
    model = ddp(net)
    for _ in range(3):
        with trace(net) as t:
            step(model)
        ((_, parameters),) = buckets(t)
        assert sorted(parameters) == sorted(MLP_PARAMETERS)


def test_buckets_are_known_though_no_model_was_given(world: World) -> None:
    model = ddp(MLP())
    for _ in range(3):
        with trace() as t:
            step(model)
        ((_, parameters),) = buckets(t)
        assert sorted(parameters) == ["MLP.down.weight", "MLP.up.weight"]


def test_two_data_parallel_models_name_their_own_parameters(world: World) -> None:
    models = {"a": ddp(MLP()), "b": ddp(MLP())}
    with trace(models) as t:
        (models["a"](batch()).sum() + models["b"](batch()).sum()).backward()
    assert sorted(sorted(names) for _, names in buckets(t)) == [
        ["a.down.weight", "a.up.weight"],
        ["b.down.weight", "b.up.weight"],
    ]


def test_buffers_are_broadcast_in_forward(world: World) -> None:
    model = ddp(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    with trace(model) as t:
        model(batch())
        model(batch())
    kinds = {(kind, phase) for kind, phase in facts(t, "kind", "phase")}
    assert kinds == {(K.BROADCAST, Phase.FORWARD)}


def test_buckets_reduced_at_the_end_of_a_static_graph_are_known(world: World) -> None:
    model = ddp(MLP(), static_graph=True, gradient_as_bucket_view=True)
    for _ in range(3):
        with trace(model) as t:
            step(model)
        ((index, parameters),) = buckets(t)
        assert (index, sorted(parameters)) == (0, sorted(MLP_PARAMETERS))
        assert t.recording.gaps == ()


def test_bucket_of_an_unwatched_forward_is_a_gap(world: World) -> None:
    model = ddp(MLP())
    loss = model(batch()).sum()
    with trace(model) as t:
        loss.backward()
    assert buckets(t) == [(None, ())]
    assert facts(t, "phase") == [(Phase.BACKWARD,)]
    assert gap_facts(t) == [
        "a bucket was reduced whose parameters are not known: they are read when a forward ends "
        "inside the trace"
    ]


def test_the_all_reduce_of_used_parameters_is_not_a_bucket(world: World) -> None:
    model = ddp(nn.Linear(1, 1), find_unused_parameters=True)  # two parameters, two elements
    with trace(model) as t:
        model(torch.ones(1, 1)).sum().backward()
    assert len(buckets(t)) == 1
    integers = [call for call in t.recording.collectives if call.dtype == "int32"]
    assert [call.cause for call in integers] == [
        Call(api="torch.nn.parallel.DistributedDataParallel")
    ]


def test_data_parallel_models_die_while_the_trace_is_open(world: World) -> None:
    with trace() as t:
        model = ddp(MLP())
        step(model)
        references = [weakref.ref(model), weakref.ref(model.module.up.weight)]
        del model
        gc.collect()
        assert [reference() for reference in references] == [None, None]
    assert len(buckets(t)) == 1


def test_users_own_reduction_of_a_gradient_is_no_bucket(world: World) -> None:
    linear = nn.Linear(8, 8, bias=False)
    linear.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    model = ddp(linear)
    with trace(model) as t:
        step(model)
    causes = [c.cause for c in t.recording.collectives if c.phase is Phase.BACKWARD]
    assert [type(cause) for cause in causes].count(BucketReduce) == 1
    assert Call(api="torch.distributed.all_reduce") in causes
