"""Layouts of collective ops: torch has each op, with its arguments at the positions listed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.distributed.tensor

from shardscope._torch.collectives.hooks import _OpHook
from shardscope._torch.collectives.schema import (
    BATCH,
    OPS,
    OpLayout,
    process_group,
    read_call,
    reduce_op_name,
    split_batch,
    tensors_in,
    unread_ops,
)
from shardscope.record import CollectiveKind
from shardscope.world import simulate

ALL_OPS = [
    (namespace, name, layout) for namespace, ops in OPS.items() for name, layout in ops.items()
]
READ = {
    "group": ("process_group", "group_name", "group"),
    "reduce_op": ("reduce_op", "red_op"),
    "peer": ("root", "root_rank", "src", "dst", "peer"),
    "output_splits": ("output_split_sizes",),
    "input_splits": ("input_split_sizes",),
}


@pytest.mark.parametrize(
    ("namespace", "name", "layout"), ALL_OPS, ids=[f"{space}.{name}" for space, name, _ in ALL_OPS]
)
def test_op_arguments_are_at_the_positions_of_the_layout(
    namespace: str, name: str, layout: OpLayout
) -> None:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    assert packet is not None, (
        f"torch has no op {namespace}::{name} any more; the table in schema.py needs it to see "
        f"{layout.kind} collectives issued that way."
    )
    arguments = packet.default._schema.arguments
    for part, names in READ.items():
        position = getattr(layout, part)
        if position is not None:
            argument = arguments[position].name
            assert any(argument.startswith(prefix) for prefix in names), (
                f"{namespace}::{name} has {argument!r} at {position}, where schema.py looks "
                f"for its {part.replace('_', ' ')}."
            )
    for position in (layout.inputs, layout.outputs):
        if position is not None:
            assert "Tensor" in str(arguments[position].type)


# They name no group, and the target rank does not take part.
ONE_SIDED = {
    "_barrier",
    "get_remote_tensors",
    "memcpy_to_multicast_",
    "nccl_get",
    "nccl_get_out",
    "nccl_put",
    "nccl_put_signal",
    "nccl_put_with_signal",
    "nvshmem_get",
    "nvshmem_get_out",
    "nvshmem_put",
    "nvshmem_put_with_signal",
}


@pytest.mark.parametrize("namespace", OPS)
def test_every_collective_op_of_torch_has_a_layout(namespace: str) -> None:
    assert set(unread_ops(namespace)) <= ONE_SIDED


def test_an_op_hook_hashes_like_the_callable_it_replaces() -> None:
    op = torch.ops._c10d_functional.all_reduce.default
    hook = _OpHook("op", OPS["_c10d_functional"]["all_reduce"], op._schema, op._op)
    assert hash(op) == hash(op._op), (
        "torch no longer hashes ops by `_op`; hooks.py needs it, for its stand-in must "
        "hash like what it stands for."
    )
    assert hash(hook) == hash(op._op)
    assert hook == op._op


def test_process_group_accepts_a_group_a_boxed_group_or_a_name() -> None:
    with simulate(mesh={"dp": 2}) as world:
        group = world.mesh.get_group()
        assert process_group(group) is group
        assert process_group(group.group_name) is group
        assert process_group(group.boxed()) is group


def test_tensors_in_flattens_lists() -> None:
    first, second = torch.ones(1), torch.ones(2)
    assert tensors_in(first) == [first]
    assert [id(t) for t in tensors_in([first, second])] == [id(first), id(second)]
    assert [id(t) for t in tensors_in([[first], [second]])] == [id(first), id(second)]
    assert tensors_in([]) == []
    assert tensors_in([[]]) == []


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "avg"),
        (dist.ReduceOp(dist.ReduceOp.MAX), "max"),
        ("AVG", "avg"),
        (None, None),
    ],
)
def test_reduce_op_name(value: object, name: str | None) -> None:
    assert reduce_op_name(value) == name


def test_a_functional_batch_is_split_into_sends_and_receives() -> None:
    with simulate(mesh={"dp": 2}) as world:
        group = world.mesh.get_group().group_name
        tensors = [torch.ones(1), torch.ones(2)]
        batch = (["isend", "irecv"], [1, 1], [0, 0], tensors, group)
        calls = [read_call("batch", layout, args) for layout, args in split_batch(batch)]
    assert [call.kind for call in calls] == [CollectiveKind.SEND, CollectiveKind.RECV]
    assert [call.peer for call in calls] == [1, 1]
    assert calls[0].inputs[0] is tensors[0]
    assert calls[1].outputs is not None
    assert calls[1].outputs[0] is tensors[1]
    assert BATCH.kind is CollectiveKind.SEND
