"""Functional collectives are one collective each, whichever of their forms is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses import FakeTensorMode

from shardscope import World, simulate, trace
from shardscope._torch.calls import OPS, OpLayout
from shardscope.record import Call, CollectiveKind
from small_models import everyone, facts, only

K = CollectiveKind
ops = torch.ops._c10d_functional
autograd_ops = torch.ops._c10d_functional_autograd
symm_mem = torch.ops.symm_mem


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"dp": 4}, rank=1) as world:
        yield world


def name() -> str:
    return everyone().group_name


def ones(size: int = 8) -> torch.Tensor:
    return torch.ones(size)


FORMS: dict[str, tuple[Callable[[], object], CollectiveKind, tuple[int, int, int, int]]] = {
    # call, kind, (num_tensors, input_bytes, output_bytes, wire_bytes) on 4 ranks
    "all_reduce": (lambda: ops.all_reduce(ones(), "sum", name()), K.ALL_REDUCE, (1, 32, 32, 48)),
    "all_reduce_": (lambda: ops.all_reduce_(ones(), "sum", name()), K.ALL_REDUCE, (1, 32, 32, 48)),
    "all_reduce_coalesced": (
        lambda: ops.all_reduce_coalesced([ones(), ones(4)], "sum", name()),
        K.ALL_REDUCE,
        (2, 48, 48, 72),
    ),
    "all_reduce_coalesced_": (
        lambda: ops.all_reduce_coalesced_([ones(), ones(4)], "sum", name()),
        K.ALL_REDUCE,
        (2, 48, 48, 72),
    ),
    "all_gather_into_tensor": (
        lambda: ops.all_gather_into_tensor(ones(), 4, name()),
        K.ALL_GATHER,
        (1, 32, 128, 96),
    ),
    "all_gather_into_tensor_out": (
        lambda: ops.all_gather_into_tensor_out(ones(), 4, name(), out=ones(32)),
        K.ALL_GATHER,
        (1, 32, 128, 96),
    ),
    "all_gather_into_tensor_coalesced": (
        lambda: ops.all_gather_into_tensor_coalesced([ones(), ones(4)], 4, name()),
        K.ALL_GATHER,
        (2, 48, 192, 144),
    ),
    "reduce_scatter_tensor": (
        lambda: ops.reduce_scatter_tensor(ones(32), "sum", 4, name()),
        K.REDUCE_SCATTER,
        (1, 128, 32, 96),
    ),
    "reduce_scatter_tensor_out": (
        lambda: ops.reduce_scatter_tensor_out(ones(32), "sum", 4, name(), out=ones()),
        K.REDUCE_SCATTER,
        (1, 128, 32, 96),
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda: ops.reduce_scatter_tensor_coalesced([ones(32), ones(16)], "sum", 4, name()),
        K.REDUCE_SCATTER,
        (2, 192, 48, 144),
    ),
    "all_to_all_single": (
        lambda: ops.all_to_all_single(ones(), [2, 2, 2, 2], [2, 2, 2, 2], name()),
        K.ALL_TO_ALL,
        (1, 32, 32, 24),
    ),
    "broadcast": (lambda: ops.broadcast(ones(), 2, name()), K.BROADCAST, (1, 32, 32, 32)),
    "broadcast_": (lambda: ops.broadcast_(ones(), 2, name()), K.BROADCAST, (1, 32, 32, 32)),
    "isend": (lambda: ops.isend(ones(), 2, 0, name()), K.SEND, (1, 32, 0, 32)),
    "irecv": (lambda: ops.irecv(ones(), 2, 0, name()), K.RECV, (1, 0, 32, 0)),
}


def check(call: Callable[[], object], kind: CollectiveKind, carried: tuple[int, ...]) -> str:
    with trace() as t:
        call()
    seen = only(t)
    assert seen.kind == kind
    sizes = (seen.num_tensors, seen.input_bytes, seen.output_bytes, seen.wire_bytes)
    assert sizes == carried
    assert seen.dtype == "float32"
    return seen.op


@pytest.mark.parametrize("form", FORMS)
def test_form_is_one_collective_of_known_size(world: World, form: str) -> None:
    assert check(*FORMS[form]) == f"_c10d_functional.{form}"


@pytest.mark.parametrize("form", FORMS)
def test_form_on_fake_tensors_is_the_same(world: World, form: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert check(*FORMS[form]) == f"_c10d_functional.{form}"


@pytest.mark.parametrize("form", FORMS)
def test_form_on_meta_is_the_same(world: World, form: str) -> None:
    with torch.device("meta"):
        assert check(*FORMS[form]) == f"_c10d_functional.{form}"


def test_every_form_in_the_table_is_tried() -> None:
    assert {*FORMS, "batch_p2p_ops"} == set(OPS["_c10d_functional"])


def test_overload_and_packet_are_both_seen(world: World) -> None:
    with trace() as t:
        ops.all_reduce(ones(), "sum", name())
        ops.all_reduce.default(ones(), "sum", name())
        ops.all_reduce(input=ones(), reduce_op="max", group_name=name())
        ops.all_reduce.default(ones(), group_name=name(), reduce_op="min")
    assert facts(t, "op", "reduce_op", "input_bytes") == [
        ("_c10d_functional.all_reduce", "sum", 32),
        ("_c10d_functional.all_reduce", "sum", 32),
        ("_c10d_functional.all_reduce", "max", 32),
        ("_c10d_functional.all_reduce", "min", 32),
    ]


def test_batch_of_sends_and_receives_is_seen_one_by_one(world: World) -> None:
    with trace() as t:
        ops.batch_p2p_ops(["isend", "irecv"], [2, 0], [0, 0], [ones(), ones(4)], name())
    assert facts(t, "kind", "peer", "input_bytes", "output_bytes", "op") == [
        (K.SEND, 2, 32, 0, "_c10d_functional.batch_p2p_ops"),
        (K.RECV, 0, 0, 16, "_c10d_functional.batch_p2p_ops"),
    ]


AUTOGRAD: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[CollectiveKind]]] = {
    "all_gather_into_tensor": (
        lambda x: autograd_ops.all_gather_into_tensor(x, 4, name()),
        [K.ALL_GATHER, K.REDUCE_SCATTER],
    ),
    "reduce_scatter_tensor": (
        lambda x: autograd_ops.reduce_scatter_tensor(x, "sum", 4, name()),
        [K.REDUCE_SCATTER, K.ALL_GATHER],
    ),
    "all_to_all_single": (
        lambda x: autograd_ops.all_to_all_single(x, [2, 2, 2, 2], [2, 2, 2, 2], name()),
        [K.ALL_TO_ALL, K.ALL_TO_ALL],
    ),
}


@pytest.mark.parametrize("form", AUTOGRAD)
def test_differentiable_form_is_one_collective_each_way(world: World, form: str) -> None:
    call, kinds = AUTOGRAD[form]
    x = ones().requires_grad_()
    with trace() as t:
        funcol.wait_tensor(call(x)).sum().backward()
    assert [kind for (kind,) in facts(t, "kind")] == kinds
    assert [phase for (phase,) in facts(t, "phase")] == ["outside", "backward"]
    assert t.recording.gaps == ()


def test_public_functions_name_themselves_as_the_cause(world: World) -> None:
    with trace() as t:
        funcol.all_reduce(ones(), "sum", everyone())
        funcol.all_gather_tensor(ones(), 0, everyone())
        funcol.reduce_scatter_tensor(ones(), "avg", 0, everyone())
    assert [cause for (cause,) in facts(t, "cause")] == [
        Call(api="torch.distributed._functional_collectives.all_reduce"),
        Call(api="torch.distributed._functional_collectives.all_gather_tensor"),
        Call(api="torch.distributed._functional_collectives.reduce_scatter_tensor"),
    ]
    assert [op for (op,) in facts(t, "reduce_op")] == ["sum", None, "avg"]


def test_sharding_dim_change_is_an_all_to_all(world: World) -> None:
    with trace() as t:
        torch.ops._dtensor.shard_dim_alltoall(torch.ones(8, 2), 0, 1, name())
    assert (only(t).kind, only(t).input_bytes, only(t).wire_bytes) == (K.ALL_TO_ALL, 64, 48)


SYMMETRIC: dict[str, tuple[Callable[[], object], CollectiveKind, tuple[int, int, int, int]]] = {
    "one_shot_all_reduce": (
        lambda: symm_mem.one_shot_all_reduce(ones(), "sum", name()),
        K.ALL_REDUCE,
        (1, 32, 32, 48),
    ),
    "one_shot_all_reduce_copy": (
        lambda: symm_mem.one_shot_all_reduce_copy(ones(64), ones(), "sum", name()),
        K.ALL_REDUCE,
        (1, 32, 32, 48),
    ),
    "two_shot_all_reduce_": (
        lambda: symm_mem.two_shot_all_reduce_(ones(), "sum", name()),
        K.ALL_REDUCE,
        (1, 32, 32, 48),
    ),
    "fused_all_gather_matmul": (
        lambda: symm_mem.fused_all_gather_matmul(
            torch.ones(2, 4), [torch.ones(4, 6)], 0, name()
        ),
        K.ALL_GATHER,
        (1, 32, 128, 96),
    ),
    "fused_matmul_reduce_scatter": (  # the product, 8 × 6, is what is reduced
        lambda: symm_mem.fused_matmul_reduce_scatter(
            torch.ones(8, 4), torch.ones(4, 6), "sum", 0, name()
        ),
        K.REDUCE_SCATTER,
        (1, 192, 48, 144),
    ),
    "_low_contention_all_gather": (
        lambda: symm_mem._low_contention_all_gather(ones(), name()),
        K.ALL_GATHER,
        (1, 32, 128, 96),
    ),
    "_low_contention_reduce_scatter": (
        lambda: symm_mem._low_contention_reduce_scatter(ones(32), "avg", name()),
        K.REDUCE_SCATTER,
        (1, 128, 32, 96),
    ),
}


@pytest.mark.parametrize("op", SYMMETRIC)
def test_symmetric_memory_op_is_recognised_by_name(world: World, op: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert check(*SYMMETRIC[op]) == f"symm_mem.{op}"


def _rows() -> Iterator[Any]:
    for namespace, table in OPS.items():
        for op, layout in table.items():
            yield pytest.param(namespace, op, layout, id=f"{namespace}.{op}")


_GROUPS = ("process_group", "group_name")
_PEERS = ("root_rank", "root", "src", "dst")
_REDUCTIONS = ("reduce_op", "red_op")
_SPLITS = {"output_splits": "output_split_sizes", "input_splits": "input_split_sizes"}


@pytest.mark.parametrize(("namespace", "op", "layout"), _rows())
def test_table_agrees_with_the_schema(namespace: str, op: str, layout: OpLayout) -> None:
    packet = getattr(getattr(torch.ops, namespace), op)
    arguments = packet.default._schema.arguments
    names = [argument.name for argument in arguments]
    assert packet.overloads() == ["default"]
    assert names[layout.group] in _GROUPS
    for position in (layout.inputs, layout.outputs):
        if position is not None:
            assert "Tensor" in str(arguments[position].type)
    if layout.outputs is not None and layout.outputs != layout.inputs:
        assert names[layout.outputs].startswith(("out", "tensor"))
    if layout.inputs is not None and layout.outputs is not None and layout.inputs > 0:
        assert names[layout.inputs].startswith(("input", "local_input"))
    has_reduction = [n for n in names if n in _REDUCTIONS]
    assert has_reduction == ([] if layout.reduce_op is None else [names[layout.reduce_op]])
    has_peer = [n for n in names if n in _PEERS]
    assert has_peer == ([] if layout.peer is None else [names[layout.peer]])
    for field, argument in _SPLITS.items():
        position = getattr(layout, field)
        assert (argument in names) == (position is not None)
        assert position is None or names[position] == argument


def test_kind_agrees_with_the_name_of_every_op() -> None:
    words = {
        K.ALL_REDUCE: ("allreduce", "all_reduce"),
        K.ALL_GATHER: ("allgather", "all_gather"),
        K.REDUCE_SCATTER: ("reduce_scatter",),
        K.ALL_TO_ALL: ("alltoall", "all_to_all"),
        K.BARRIER: ("barrier",),
        K.BROADCAST: ("broadcast",),
        K.REDUCE: ("reduce",),
        K.GATHER: ("gather",),
        K.SCATTER: ("scatter",),
        K.SEND: ("send", "batch_p2p_ops"),
        K.RECV: ("recv",),
    }
    wrong = [
        f"{namespace}.{op}"
        for namespace, table in OPS.items()
        for op, layout in table.items()
        if not any(word in op for word in words[layout.kind])
    ]
    assert wrong == []


def test_every_collective_that_torch_registers_is_in_the_table() -> None:
    registered = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(("c10d::", "_c10d_functional::", "_c10d_functional_autograd::"))
    }
    known = {f"{namespace}::{op}" for namespace, table in OPS.items() for op in table}
    assert registered - known == {
        "c10d::check_for_nan",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    }
    assert dist.is_available()
