"""Symmetric-memory ops are known by name, and the table of ops agrees with torch's schemas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from shardscope import World, simulate, trace
from shardscope._torch.collectives import hooks as op_hooks
from shardscope._torch.collectives.schema import OPS, OpLayout, unread_ops
from shardscope.record import CollectiveKind
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
    "fused_all_gather_matmul": (
        lambda: symm_mem.fused_all_gather_matmul(torch.ones(2, 4), [torch.ones(4, 6)], 0, name()),
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
    call, kind, carried = SYMMETRIC[op]
    with FakeTensorMode(allow_non_fake_inputs=True), trace() as t:
        call()
    collective = only(t)
    assert (collective.op, collective.kind, collective.dtype) == (f"symm_mem.{op}", kind, "float32")
    sizes = (
        collective.num_tensors,
        collective.input_bytes,
        collective.output_bytes,
        collective.wire_bytes,
    )
    assert sizes == carried


_SAMPLES: dict[str, Callable[[], object]] = {
    "Tensor": ones,
    "Tensor[]": lambda: [ones()],
    "str": name,
    "int": lambda: 2,
    "bool": lambda: False,
    "List[bool]": lambda: [False],
    "List[int]": lambda: [0],
}


@pytest.mark.parametrize("op", OPS["symm_mem"])
def test_symmetric_memory_op_is_recorded_even_where_the_hardware_is_missing(
    world: World, op: str
) -> None:
    schema = getattr(symm_mem, op).default._schema
    arguments = [_sample(argument) for argument in schema.arguments if not argument.kwarg_only]
    large = {K.ALL_GATHER: OPS["symm_mem"][op].outputs, K.REDUCE_SCATTER: 0}
    if large.get(OPS["symm_mem"][op].kind) is not None:
        arguments[large[OPS["symm_mem"][op].kind]] = ones(32)
    # If torch cannot run it here, torch raises its own error.
    cannot_run = suppress(RuntimeError, AssertionError, IndexError)
    with FakeTensorMode(allow_non_fake_inputs=True), trace() as t, cannot_run:
        getattr(symm_mem, op)(*arguments)
    layout = OPS["symm_mem"][op]
    (collective,) = t.recording.collectives
    assert (collective.kind, collective.op, collective.group) == (
        layout.kind,
        f"symm_mem.{op}",
        "dp[0-3]",
    )
    assert collective.peer == (None if layout.peer is None else 2)
    assert collective.reduce_op == (None if layout.reduce_op is None else "sum")


def _sample(argument: Any) -> object:
    if argument.name in _REDUCTIONS:
        return "sum"
    kind = str(argument.type)
    if "Optional" in kind or kind.startswith("List[Opt"):
        return [] if kind.startswith("List") else None
    return _SAMPLES[kind.replace("List[Tensor]", "Tensor[]")]()


def test_omitted_arguments_have_their_defaults(world: World) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), trace() as t:
        for options in ({}, {"red_op": "avg"}):
            symm_mem.nccl_reduce_scatter_offset(ones(32), [ones()], name(), 0, **options)
    assert [op for (op,) in facts(t, "reduce_op")] == ["sum", "avg"]


def _rows() -> Iterator[Any]:
    for namespace, table in OPS.items():
        for op, layout in table.items():
            yield pytest.param(namespace, op, layout, id=f"{namespace}.{op}")


_GROUPS = ("process_group", "group_name")
_PEERS = ("root_rank", "root", "src", "dst")
_REDUCTIONS = ("reduce_op", "red_op")
_SPLITS = {"output_splits": "output_split_sizes", "input_splits": "input_split_sizes"}


@pytest.mark.parametrize(("namespace", "op", "layout"), list(_rows()))
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


def test_a_one_sided_transfer_is_a_gap(world: World) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), trace() as t, suppress(RuntimeError):
        symm_mem.nvshmem_put(ones(), 2)
    assert t.recording.collectives == ()
    (gap,) = t.recording.gaps
    assert (gap.place, gap.is_loss) == ("symm_mem.nvshmem_put", True)
    assert gap.fact.startswith("it was issued, but it is not a known collective")


def test_an_op_of_a_newer_torch_is_a_gap() -> None:
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("gossip_(Tensor x) -> Tensor")
    library.impl("gossip_", lambda x: x, "CPU")
    unread_ops.cache_clear()
    op_hooks._make_op_hooks.cache_clear()
    try:
        with simulate({"dp": 4}), trace() as t:
            torch.ops.c10d.gossip_(ones())
    finally:
        library._destroy()
        unread_ops.cache_clear()
        op_hooks._make_op_hooks.cache_clear()
    assert [(gap.place, gap.is_loss) for gap in t.recording.gaps] == [("c10d.gossip_", True)]


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "new_window"), reason=f"torch {torch.__version__} has no windows"
)
def test_a_window_is_a_gap_even_where_the_backend_has_none(world: World) -> None:
    with trace() as t, suppress(RuntimeError):
        everyone().new_window(ones())
    assert [(gap.place, gap.is_loss) for gap in t.recording.gaps] == [("c10d.new_window", True)]


def test_handle_of_a_real_group_reports_one_sided_transfers() -> None:
    handle = torch._C._distributed_c10d._SymmetricMemory
    before = vars(handle)["get_buffer"]
    with trace() as t, pytest.raises(TypeError):  # a CPU has no symmetric memory to get a handle of
        handle.get_buffer(None, 0, (1,), torch.float32)
    assert [(gap.place, gap.is_loss) for gap in t.recording.gaps] == [("symm_mem.get_buffer", True)]
    assert vars(handle)["get_buffer"] is before


def test_call_of_a_package_that_sends_without_torch_is_a_gap_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the packages: the names of a class, its module and its methods are recognised."""

    class Buffer:
        def dispatch(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    package = ModuleType("deep_ep")
    package.Buffer = Buffer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    with trace() as t:
        result = Buffer().dispatch(ones())
    assert result.tolist() == [2.0] * 8
    (gap,) = t.recording.gaps
    assert gap.place == "deep_ep.Buffer.dispatch"
    assert "test_trace_sees_symmetric_memory.py:" in gap.fact
