"""An audit names the options of FSDP2 groups that differ from torch's default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from older_torch import IS_OLDER, TORCH
from shardscope import Recording, World, audit, diff, show, simulate
from shardscope.record import Mark, MarkKind


def sharded(world: World, **arguments: Any) -> Any:
    return fully_shard(nn.Linear(8, 8), mesh=world.mesh["dp"], **arguments)


def set_option(name: str, *values: object) -> Callable[[World], Any]:
    def make(world: World) -> Any:
        model = sharded(world)
        getattr(model, name)(*values)
        return model

    return make


def reduce_twice(tensor: torch.Tensor) -> None:
    """A hook at an all-reduce."""


def with_hook(world: World) -> Any:
    model = fully_shard(nn.Linear(8, 8), mesh=world.mesh)
    model.set_all_reduce_hook(reduce_twice)
    return model


SINCE_13 = pytest.mark.skipif(IS_OLDER, reason="torch has this option since 2.13")
OPTIONS: list[Any] = [
    pytest.param(sharded, (), id="defaults"),
    pytest.param(
        set_option("set_gradient_divide_factor", 1.0), ("gradient_divide_factor=1.0",), id="divide"
    ),
    pytest.param(
        set_option("set_reshard_after_backward", False),
        ("reshard_after_backward=False",),
        id="reshard",
    ),
    pytest.param(
        set_option("set_requires_gradient_sync", False),
        ("requires_gradient_sync=False",),
        id="sync",
    ),
    pytest.param(
        set_option("set_requires_all_reduce", False), ("requires_all_reduce=False",), id="reduce"
    ),
    pytest.param(
        set_option("set_unshard_in_backward", False), ("unshard_in_backward=False",), id="unshard"
    ),
    pytest.param(
        set_option("set_force_sum_reduction_for_comms", True),
        ("force_sum_reduction_for_comms=True",),
        id="sum",
    ),
    pytest.param(
        set_option("set_reduce_scatter_unused_params", True),
        ("reduce_scatter_unused_params=True",),
        marks=SINCE_13,
        id="unused",
    ),
    pytest.param(
        set_option("set_symm_mem_for_comm"),
        ("symm_mem_for_comm=NCCL",),
        marks=SINCE_13,
        id="symmetric memory",
    ),
    pytest.param(
        lambda world: sharded(
            world,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        ),
        ("param_dtype=bfloat16", "reduce_dtype=float32", "cast_forward_inputs=False"),
        id="mixed precision",
    ),
    pytest.param(
        lambda world: sharded(world, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        ("offload_policy=CPUOffloadPolicy(pin_memory=False)",),
        id="offload",
    ),
    pytest.param(
        lambda world: sharded(
            world, shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None
        ),
        ("shard_placement_fn=Shard(1) for 1 of 2",),
        id="placement",
    ),
    pytest.param(with_hook, ("all_reduce_hook=reduce_twice",), id="hook"),
]


def fsdp_mark(recording: Recording) -> Mark:
    (mark,) = (
        mark
        for module in recording.modules
        for mark in module.marks
        if mark.kind is MarkKind.FULLY_SHARD
    )
    return mark


@pytest.mark.parametrize(("make", "options"), OPTIONS)
def test_only_options_that_differ_from_the_default_are_listed(
    make: Callable[[World], Any], options: tuple[str, ...]
) -> None:
    with simulate({"replicate": 2, "dp": 4}, device="cuda") as world:
        assert fsdp_mark(audit(make(world))).options == options


@pytest.mark.skipif(TORCH < (2, 13), reason="fully_shard takes dp_mesh_dims since torch 2.13")
def test_dims_of_a_mesh_that_fsdp_shards_over_are_listed() -> None:
    from torch.distributed.fsdp import DataParallelMeshDims

    with simulate({"dp": 4, "tp": 2}) as world:
        model = nn.Linear(8, 8, bias=False)
        weight = distribute_tensor(model.weight, world.mesh, [Replicate(), Shard(0)])
        model.weight = nn.Parameter(weight)
        fully_shard(model, mesh=world.mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        mark = fsdp_mark(audit(model))
    assert mark.options == ("dp_mesh_dims=shard dp, replicate None",)


def test_options_are_printed_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with simulate({"dp": 4}) as world:
        before, after = nn.Linear(8, 8), nn.Linear(8, 8)
        for model in (before, after):
            fully_shard(model, mesh=world.mesh)
        after.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        recordings = audit(before), audit(after)
    show(recordings[1])
    assert "reshards after forward, gradient_divide_factor=1.0" in " ".join(
        capsys.readouterr().out.split()
    )
    assert "gradient_divide_factor=1.0" in recordings[1].html()
    changes = str(diff(*recordings))
    assert "reshards after forward over dp, gradient_divide_factor=1.0" in changes
