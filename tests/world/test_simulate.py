"""`simulate()`: the world it makes, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    _random,
    distribute_tensor,
)

from shardscope import simulate, trace
from shardscope.errors import CollectiveError, WorldError
from shardscope.world import current_world

OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_the_mesh_has_the_axes_asked_for_and_the_rank_its_place(rank: int) -> None:
    with simulate(mesh={"dp": 2, "tp": 4}, rank=rank) as world:
        assert world.axes == {"dp": 2, "tp": 4}
        assert (world.rank, world.size) == (rank, 8)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 8)
        assert world.mesh.mesh_dim_names == ("dp", "tp")
        assert world.mesh.shape == (2, 4)
        assert list(world.mesh.get_coordinate() or ()) == [rank // 4, rank % 4]
        assert dist.get_process_group_ranks(world.mesh.get_group("dp")) == [rank % 4, rank % 4 + 4]
        assert repr(world) == f"World(dp=2, tp=4; rank {rank} of 8)"
        assert current_world() is world
    assert current_world() is None


def test_rank_0_is_the_default() -> None:
    with simulate(mesh={"dp": 3}) as world:
        assert (world.rank, dist.get_rank(), dist.get_backend()) == (0, 0, "gloo")


def test_a_world_of_one_rank_works() -> None:
    with simulate(mesh={"dp": 1}) as world, trace() as t:
        dist.all_reduce(torch.ones(4))
        assert world.size == 1
    assert t.recording.run.world_size == 1
    assert [c.wire_bytes for c in t.recording.collectives] == [0]


def test_a_world_of_16384_ranks_works() -> None:
    with simulate(mesh={"dp": 1024, "tp": 16}, rank=16_383) as world:
        local = distribute_tensor(torch.ones(1024, 16), world.mesh, [Shard(0), Shard(1)])
        with trace() as t:
            replicated = local.redistribute(placements=[Replicate(), Replicate()])
        assert local.to_local().shape == (1, 1)
        assert replicated.to_local().shape == (1024, 16)
    assert t.recording.run.world_size == 16_384
    assert {(c.axis, c.num_ranks) for c in t.recording.collectives} == {("dp", 1024), ("tp", 16)}


@pytest.mark.parametrize("mesh", [{}, None, [("dp", 2)], 8])
def test_a_mesh_without_axes_is_refused_with_an_example(mesh: Any) -> None:
    with (
        pytest.raises(WorldError, match=r"names no axis\. Give axis names.*\"dp\": 8, \"tp\": 4"),
        simulate(mesh=mesh),
    ):
        pytest.fail("the world was entered")


@pytest.mark.parametrize("size", [0, -2, 1.5, "4", True, None])
def test_a_bad_axis_size_is_refused(size: Any) -> None:
    sentence = "got the size .* for axis 'tp'. An axis has a whole number of ranks, at least one"
    with (
        pytest.raises(WorldError, match=sentence),
        simulate(mesh={"dp": 2, "tp": size}),
    ):
        pytest.fail("the world was entered")


@pytest.mark.parametrize("name", ["", 3])
def test_a_bad_axis_name_is_refused(name: Any) -> None:
    with (
        pytest.raises(WorldError, match=r"got the axis name .*\. Axis names are strings"),
        simulate(mesh={name: 2}),
    ):
        pytest.fail("the world was entered")


@pytest.mark.parametrize("rank", [-1, 8, 2.0, "0", True, None])
def test_a_rank_outside_the_mesh_is_refused(rank: Any) -> None:
    sentence = r"but the mesh dp=2 × tp=4 has ranks 0 to 7\. Choose one of those"
    with (
        pytest.raises(WorldError, match=sentence),
        simulate(mesh={"dp": 2, "tp": 4}, rank=rank),
    ):
        pytest.fail("the world was entered")


def test_a_world_inside_a_world_is_refused_and_the_outer_one_stays() -> None:
    with simulate(mesh={"dp": 2}) as world:
        sentence = r"inside another simulated world \(World\(dp=2; rank 0 of 2\)\)\. Leave that one"
        with pytest.raises(WorldError, match=sentence), simulate(mesh={"tp": 4}):
            pytest.fail("the world was entered")
        assert current_world() is world
        assert dist.get_world_size() == 2


def test_a_process_that_has_a_group_is_refused_and_keeps_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sentence = r"this one has one \(gloo, 1 ranks\)\. Call torch.distributed.destroy"
        with pytest.raises(WorldError, match=sentence), simulate(mesh={"dp": 2}):
            pytest.fail("the world was entered")
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def snapshot() -> dict[str, Any]:
    """Everything of torch's that a world may change."""
    functional = torch.ops._c10d_functional.all_reduce
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    return {
        "is initialized": dist.is_initialized(),
        "object collectives": [
            inspect.unwrap(getattr(dist, name)).__code__ for name in OBJECT_COLLECTIVES
        ],
        "object collectives' bodies": [
            inspect.getclosurevars(getattr(dist, name)).nonlocals["func"]
            for name in OBJECT_COLLECTIVES
        ],
        "making of groups": distributed_c10d._new_process_group_helper,
        "making of meshes": dist.device_mesh.DeviceMesh.__init__,
        "exception hook": sys.excepthook,
        "kernels": {
            (name, key): torch._C._dispatch_dump(f"c10d::{name}").count("[kernel]")
            + torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key)
            for name in ("allreduce_", "allgather_", "alltoall_", "allreduce_coalesced_", "send")
            for key in ("CPU", "Meta")
        },
        "kernel owners": torch._C._dispatch_dump("c10d::allreduce_"),
        "functional ops": (functional._op, functional.default._op),
        "module call": nn.Module.__call__,
        "stage methods": {
            name: getattr(PipelineStage, name, None)  # older versions do not vote
            for name in ("_warmup_forward_vote", "_warmup_backward_result", "_recv_meta")
        },
        "modes": torch._C._len_torch_dispatch_stack(),
        "rng tracker": _random._rng_tracker,
        "log filters": list(logger.filters),
        "random state": torch.get_rng_state().tolist(),
        "new tensors": type(torch.empty(1)),
    }


def use_everything() -> None:
    with simulate(mesh={"dp": 2, "tp": 2}, rank=3) as world:
        dist.all_gather_object([None] * 4, "x")
        model = world.materialize(nn.Linear(4, 4, device="meta"))
        placed = distribute_tensor(torch.ones(4, 4), world.mesh["tp"], [Shard(0)])
        with trace(model):
            dist.all_reduce(model(torch.ones(2, 4)))
            placed.full_tensor()


def fail_inside() -> None:
    def fail() -> None:
        with simulate(mesh={"dp": 2}) as world:
            world.materialize(nn.Linear(4, 4, device="meta"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def be_refused_inside() -> None:
    def send_nowhere() -> None:
        with simulate(mesh={"dp": 2}) as world:
            world.materialize(nn.Linear(4, 4, device="meta"))
            dist.send(torch.ones(1), dst=9)

    with pytest.raises(CollectiveError):
        send_nowhere()


def stop_inside() -> None:
    def stop() -> None:
        with simulate(mesh={"dp": 2}), trace():
            dist.all_reduce(torch.ones(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()


def seed_dtensors() -> None:
    with simulate(mesh={"dp": 2}):
        # What DTensor does on the first random op of an accelerator's mesh.
        _random._rng_tracker = _random.OffsetBasedRNGTracker.__new__(_random.OffsetBasedRNGTracker)


def enter_with_an_invalid_rank() -> None:
    with pytest.raises(WorldError), simulate(mesh={"dp": 2}, rank=2):
        pytest.fail("the world was entered")


def fail_to_make_a_mesh() -> None:
    with (
        mock.patch.object(dist.device_mesh.DeviceMesh, "__init__", side_effect=ArithmeticError),
        pytest.raises(ArithmeticError),
        simulate(mesh={"dp": 2}),
    ):
        pytest.fail("the world was entered")


@pytest.mark.parametrize(
    "leave",
    [
        use_everything,
        fail_inside,
        be_refused_inside,
        stop_inside,
        seed_dtensors,
        enter_with_an_invalid_rank,
        fail_to_make_a_mesh,
    ],
)
def test_leaving_a_world_puts_everything_back(leave: Callable[[], None]) -> None:
    before = snapshot()
    leave()
    after = snapshot()
    assert {key: after[key] for key in before} == before
    assert current_world() is None


def test_a_group_left_open_by_the_program_inside_is_closed() -> None:
    with simulate(mesh={"dp": 4}):
        dist.new_group([0, 1])
    assert not dist.is_initialized()
    with simulate(mesh={"dp": 2}):
        assert dist.get_world_size() == 2


def test_a_program_may_destroy_the_group_itself() -> None:
    with simulate(mesh={"dp": 4}):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_worlds_of_other_ranks_and_sizes_follow_one_another() -> None:
    worlds = []
    for size in (2, 8, 3, 1024):
        for rank in (0, size - 1):
            with simulate(mesh={"dp": size}, rank=rank) as world:
                world.materialize(nn.Linear(2, 2, device="meta"))
                with trace() as t:
                    dist.all_reduce(torch.ones(2))
                (group,) = t.recording.groups
                worlds.append((dist.get_rank(), group.num_ranks))
    assert worlds == [(rank, size) for size in (2, 8, 3, 1024) for rank in (0, size - 1)]


def shapes_on(rank: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    with simulate(mesh={"tp": 4}, rank=rank) as world:
        by_row = distribute_tensor(torch.ones(10, 6), world.mesh, [Shard(0)])
        by_column = by_row.redistribute(placements=[Shard(1)])
        doubled = by_row + by_row
        return (
            tuple(by_row.to_local().shape),
            tuple(by_column.to_local().shape),
            tuple(doubled.redistribute(placements=[Shard(1)]).to_local().shape),
        )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 2, 3, 2)])
def test_uneven_shards_have_each_ranks_own_shape(order: tuple[int, ...]) -> None:
    rows, columns = (3, 3, 3, 1), (2, 2, 2, 0)
    for rank in order:
        expected = (10, columns[rank])
        assert shapes_on(rank) == ((rows[rank], 6), expected, expected)


def test_uneven_shards_of_a_model_have_each_ranks_own_shape() -> None:
    rows = []
    for rank in range(4):
        with simulate(mesh={"tp": 4}, rank=rank) as world:
            linear = nn.Linear(6, 10, bias=False, device="meta")
            linear.weight = nn.Parameter(distribute_tensor(linear.weight, world.mesh, [Shard(0)]))
            world.materialize(linear)
            output = linear(DTensor.from_local(torch.ones(2, 6), world.mesh))
            assert isinstance(output, DTensor)
            assert output.shape == (2, 10)
            rows.append((output.to_local().shape[1], output.full_tensor().shape[1]))
    assert rows == [(3, 10), (3, 10), (3, 10), (1, 10)]


def test_new_tensors_are_real_until_something_is_materialized() -> None:
    with simulate(mesh={"dp": 2}) as world:
        assert torch.ones(3).sum().item() == 3
        world.materialize(nn.Linear(2, 2, device="meta"))
        assert isinstance(torch.ones(3), FakeTensor)
    assert torch.ones(3).sum().item() == 3


def test_further_groups_of_a_real_backend_are_simulated_too() -> None:
    with simulate(mesh={"dp": 4}, rank=1), trace() as t:
        group = dist.new_group([0, 1], backend="gloo")
        dist.all_reduce(torch.ones(1), group=group)
    assert [call.group for call in t.recording.collectives] == ["group[0-1]"]


@pytest.mark.parametrize("device", ["nowhere", "meta", None])
def test_device_that_cannot_be_simulated_is_refused(device: Any) -> None:
    with pytest.raises(WorldError, match="cannot simulate"), simulate({"dp": 2}, device=device):
        pytest.fail("the world was entered")


def test_device_may_be_torchs_own_object() -> None:
    with simulate({"dp": 2}, device=torch.device("cpu")) as world:
        assert world.mesh.device_type == "cpu"


def test_sizes_and_ranks_may_be_numpy_integers() -> None:
    numpy = pytest.importorskip("numpy")
    with simulate({"dp": numpy.int64(4)}, rank=numpy.int32(3)) as world:
        assert (world.size, world.rank, dist.get_rank()) == (4, 3, 3)


def test_world_too_large_to_record_is_refused() -> None:
    with (
        pytest.raises(WorldError, match=r"1,099,511,627,776 ranks .* at most 1,048,576"),
        simulate({"dp": 2**20, "tp": 2**20}),
    ):
        pytest.fail("the world was entered")


def test_materialize_after_the_world_has_ended_is_refused() -> None:
    with simulate({"dp": 4}) as world:
        pass
    with pytest.raises(WorldError, match=r"after its .* block had ended"):
        world.materialize(nn.Linear(2, 2))
    assert type(torch.ones(2)) is torch.Tensor


@pytest.mark.parametrize("model", [None, "model", [nn.Linear(1, 1)], nn.Linear])
def test_materialize_wants_a_module(model: Any) -> None:
    with simulate({"dp": 4}) as world, pytest.raises(WorldError, match="is not a module"):
        world.materialize(model)


def test_models_may_be_built_and_materialized_one_after_the_other() -> None:
    with simulate({"dp": 4}) as world:
        for _ in range(2):
            model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.BatchNorm1d(4, device="meta"))
            model[0].bias.requires_grad_(False)
            world.materialize(model)
            assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
            assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
            model(torch.ones(2, 4)).sum().backward()


def test_asking_for_data_that_is_not_there_is_explained() -> None:
    with pytest.raises(RuntimeError) as raised, simulate({"dp": 4}) as world:
        world.materialize(nn.Linear(2, 2, device="meta"))(torch.ones(1, 2)).sum().item()
    assert "tensors have no data after materialize()" in raised.value.__notes__[0]


def test_worlds_of_several_threads_do_not_interfere() -> None:
    outcomes: list[str] = []

    def visit() -> None:
        for _ in range(20):
            try:
                with simulate({"dp": 2}):
                    dist.barrier()
                outcomes.append("visited")
            except WorldError as error:
                outcomes.append(str(error))

    threads = [threading.Thread(target=visit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 60
    assert {o.split("(")[0] for o in outcomes} <= {"visited", "simulate"}
    assert "visited" in outcomes
    assert not dist.is_initialized()
    with simulate({"dp": 2}):
        dist.barrier()


def test_meshes_can_be_made_after_materialize() -> None:
    before = vars(DeviceMesh)["mesh"]
    with simulate({"dp": 2, "tp": 2}, rank=3) as world:
        world.materialize(nn.Linear(2, 2, device="meta"))
        assert world.mesh["tp"].mesh.tolist() == [2, 3]
        assert world.mesh[("dp", "tp")]._flatten("all").size() == 4
        mesh = init_device_mesh("cpu", (4,))
        assert mesh.get_local_rank() == 3
        assert DeviceMesh("cpu", [0, 1, 2, 3]).size() == 4
        fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert type(torch.ones(1)) is FakeTensor
    assert vars(DeviceMesh)["mesh"] is before


def test_models_that_share_a_parameter_share_it_still() -> None:
    with torch.device("meta"):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with simulate({"dp": 2}) as world:
        world.materialize(first)
        world.materialize(second)
        assert first.weight is second.weight
        assert first.bias is not second.bias


def test_a_world_with_torch_distributed_debug_detail_does_not_wait_for_other_ranks() -> None:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with simulate({"dp": 4}) as world:
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2), group=world.mesh.get_group("dp"))
            assert dist.get_debug_level() == dist.DebugLevel.INFO
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        dist.set_debug_level(level)
