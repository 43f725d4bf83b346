"""Symmetric memory in a simulated CUDA world: it works without data, or stops with a sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from older_torch import IS_OLDER
from shardscope import World, simulate, trace
from shardscope.errors import WorldError
from shardscope.record import CollectiveKind as K
from small_models import facts

ops = torch.ops.symm_mem

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"tp": 4}, rank=1, device="cuda") as world:
        yield world


def make_buffer(world: World) -> tuple[torch.Tensor, symm_mem._SymmetricMemory, str]:
    group = world.mesh.get_group("tp")
    tensor = symm_mem.empty(16, 8, device="cuda")
    return tensor, symm_mem.rendezvous(tensor, group), group.group_name


def test_buffers_and_handles_have_the_shapes_of_real_ones(world: World) -> None:
    tensor, handle, name = make_buffer(world)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (1, 4, 16 * 8 * 4)
    assert tensor.device.type == "cuda"
    peer = handle.get_buffer(2, (8, 8), torch.bfloat16, 16)
    assert (peer.shape, peer.dtype, peer.device) == ((8, 8), torch.bfloat16, tensor.device)
    assert handle.get_remote_tensor(3, (16, 8), torch.float32).shape == (16, 8)
    assert handle.get_signal_pad(0).dtype is torch.uint32
    assert symm_mem.get_symm_mem_workspace(name, min_size=4096).buffer_size == 4096
    if hasattr(symm_mem, "is_symm_mem_tensor"):  # torch 2.11 does not have it
        assert symm_mem.is_symm_mem_tensor(tensor)
    assert not hasattr(handle, "shape")


def test_collectives_on_symmetric_memory_run_and_are_recorded(world: World) -> None:
    x, _, name = make_buffer(world)
    out, gathered, scattered = torch.empty_like(x), x.new_empty(64, 8), x.new_empty(4, 8)
    with trace() as t:
        shapes = [
            ops.one_shot_all_reduce(x, "sum", name).shape,
            ops.one_shot_all_reduce_out(x, "sum", name, out).shape,
            ops.two_shot_all_reduce_(x, "sum", name).shape,
            ops.multimem_all_reduce_(x, "sum", name).shape,
            ops.multimem_one_shot_all_reduce(x, "sum", name).shape,
            ops.multimem_all_gather_out(x, name, gathered).shape,
            ops.reduce_scatter_out(x, name, False, scattered).shape,
            ops.nvshmem_broadcast(x, 0, name).shape,
        ]
    assert shapes == [(16, 8)] * 5 + [(64, 8), (4, 8), (16, 8)]
    kinds = [K.ALL_REDUCE] * 5 + [K.ALL_GATHER, K.REDUCE_SCATTER, K.BROADCAST]
    assert facts(t, "kind", "axis") == [(kind, "tp") for kind in kinds]
    assert t.recording.gaps == ()


def test_one_sided_transfer_is_a_gap_that_names_the_call_and_the_line(world: World) -> None:
    _, handle, _ = make_buffer(world)
    with trace() as t:
        handle.get_buffer(2, (16, 8), torch.float32)
        handle.put_signal(2)
        handle.wait_signal(2)
        handle.barrier()
    gaps = t.recording.gaps
    calls = ["get_buffer", "put_signal", "wait_signal", "barrier"]
    assert [gap.place for gap in gaps] == [f"symm_mem.{call}" for call in calls]
    line = test_one_sided_transfer_is_a_gap_that_names_the_call_and_the_line.__code__.co_firstlineno
    assert [gap.fact.rpartition(":")[2] for gap in gaps] == [f"{line + n})" for n in range(3, 7)]
    assert all(gap.is_loss and "test_symmetric_memory.py:" in gap.fact for gap in gaps)


def test_addresses_and_parts_beyond_the_buffer_are_refused_with_a_sentence(world: World) -> None:
    _, handle, _ = make_buffer(world)
    with pytest.raises(WorldError, match=r"^buffer_ptrs_dev of a symmetric-memory buffer was used"):
        _ = handle.buffer_ptrs_dev
    with pytest.raises(WorldError, match=r"for 1,024 bytes at byte 0 of a .* buffer of 512 bytes"):
        handle.get_buffer(0, (32, 8), torch.float32)
    with pytest.raises(WorldError, match=r"^torch\.cuda\.nccl\.all_reduce\(\) was called in a sim"):
        torch.cuda.nccl.all_reduce([torch.empty(1, device="cuda")])


def test_raw_nccl_call_is_a_gap_as_well(world: World) -> None:
    with trace() as t, pytest.raises(WorldError):
        torch.cuda.nccl.all_reduce([torch.empty(1, device="cuda")])
    assert [gap.place for gap in t.recording.gaps] == ["torch.cuda.nccl.all_reduce"]


@pytest.mark.skipif(IS_OLDER, reason="FSDP2 has set_symm_mem_for_comm since torch 2.13")
def test_fsdp_with_symmetric_memory_has_the_collectives_of_fsdp(world: World) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    for module in (*model, model):
        fully_shard(module, mesh=world.mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_symm_mem_for_comm()
    with trace(model) as t:
        model(torch.ones(4, 8, device="cuda")).sum().backward()
    kinds = [kind for (kind,) in facts(t, "kind")]
    assert kinds.count(K.ALL_GATHER) == 4
    assert kinds.count(K.REDUCE_SCATTER) == 2
    assert t.recording.gaps == ()


def test_function_is_compiled_where_torch_looks_through_context_managers(world: World) -> None:
    """Dynamo reads `__wrapped__` of every context manager of torch.cuda when it first compiles."""
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert compiled(torch.ones(4, device="cuda")).shape == (4,)
    assert hasattr(torch.cuda.use_mem_pool, "__wrapped__")


def test_torch_is_restored_after_the_world() -> None:
    before = symm_mem._SymmetricMemory, torch.cuda.nccl.all_reduce, symm_mem.get_mem_pool
    with simulate({"tp": 2}, device="cuda"), trace():
        assert symm_mem._SymmetricMemory is not before[0]
    assert before == (
        symm_mem._SymmetricMemory,
        torch.cuda.nccl.all_reduce,
        symm_mem.get_mem_pool,
    )
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(
        "symm_mem::two_shot_all_reduce_", "Meta"
    )
