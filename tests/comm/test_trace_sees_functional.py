"""Functional collectives are one collective each, whichever of their forms is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardscope import World, simulate, trace
from shardscope._torch.collectives.schema import OPS
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
    collective = only(t)
    assert collective.kind == kind
    sizes = (
        collective.num_tensors,
        collective.input_bytes,
        collective.output_bytes,
        collective.wire_bytes,
    )
    assert sizes == carried
    assert collective.dtype == "float32"
    return collective.op


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


class Passing(TorchDispatchMode):
    """A mode of the user's own that lets every op pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMS)
def test_form_under_a_dispatch_mode_is_the_same(world: World, form: str) -> None:
    with Passing(), Passing():
        assert check(*FORMS[form]) == f"_c10d_functional.{form}"


def test_line_is_the_callers_under_a_dispatch_mode_too(world: World) -> None:
    with Passing(), trace() as t:
        ops.all_reduce(ones(), "sum", name())
    assert only(t).source.text == 'ops.all_reduce(ones(), "sum", name())'


def test_op_that_a_dispatch_mode_answers_itself_is_not_issued(world: World) -> None:
    class Answering(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return args[0] if func is ops.all_reduce.default else func(*args, **(kwargs or {}))

    with Answering(), trace() as t:
        ops.all_reduce(ones(), "sum", name())
    assert t.recording.collectives == ()


def test_batch_of_sends_and_receives_is_seen_one_by_one(world: World) -> None:
    with trace() as t:
        ops.batch_p2p_ops(["isend", "irecv"], [2, 0], [0, 0], [ones(), ones(4)], name())
    assert facts(t, "kind", "peer", "input_bytes", "output_bytes", "op") == [
        (K.SEND, 2, 32, 0, "_c10d_functional.batch_p2p_ops"),
        (K.RECV, 0, 0, 16, "_c10d_functional.batch_p2p_ops"),
    ]


def fake_tensors() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


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
@pytest.mark.parametrize("make_mode", [nullcontext, Passing, fake_tensors])
def test_differentiable_form_is_one_collective_each_way(
    world: World, form: str, make_mode: Callable[[], Any]
) -> None:
    call, kinds = AUTOGRAD[form]
    with make_mode(), trace() as t:
        x = ones().requires_grad_()
        output = funcol.wait_tensor(call(x))
        # Not sum(): torch 2.11 refuses its gradient, which is an expanded number.
        output.backward(torch.ones_like(output))
    assert [kind for (kind,) in facts(t, "kind")] == kinds
    assert [phase for (phase,) in facts(t, "phase")] == ["outside", "backward"]
    assert t.recording.gaps == ()


# torch 2.13 renames some of these; the old names work in every version we support.
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
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
        torch.ops._dtensor.shard_dim_alltoall(torch.ones(4, 4), 0, 1, name())
    assert (only(t).kind, only(t).input_bytes, only(t).wire_bytes) == (K.ALL_TO_ALL, 64, 48)


def test_functions_can_be_scripted_and_traced_symbolically_inside(world: World) -> None:
    def reduce(x: torch.Tensor, group: str) -> torch.Tensor:
        return torch.ops._c10d_functional.all_reduce(x, "sum", group)

    with trace() as t:
        graph = torch.fx.symbolic_trace(reduce, concrete_args={"group": everyone().group_name})
        assert t.recording.collectives == ()
        graph(torch.ones(2), everyone().group_name)
    assert facts(t, "kind") == [("all_reduce",)]
    assert t.recording.gaps == ()
