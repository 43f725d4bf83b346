"""Threaded ranks: their collectives exchange data, and no process state is left changed."""

from __future__ import annotations

import random
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import eval_frame
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from shardscope.errors import CollectiveError, RankError, WorldError
from shardscope.world.threaded_ranks import run_ranks_in_threads


def on_two(function):
    return run_ranks_in_threads({"tp": 2}, function)


def value(rank: int, size: int = 2) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 10 * rank


def all_reduce(op):
    def collective(rank):
        tensor = value(rank)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    return collective


def all_gather(rank):
    parts = [torch.empty(2), torch.empty(2)]
    dist.all_gather(parts, value(rank))
    return torch.cat(parts).tolist()


def all_gather_into_tensor(rank):
    full = torch.empty(4)
    dist.all_gather_into_tensor(full, value(rank))
    return full.tolist()


def reduce_scatter(rank):
    own = torch.empty(1)
    dist.reduce_scatter(own, list(value(rank).chunk(2)))
    return own.tolist()


def reduce_scatter_tensor(rank):
    own = torch.empty(1)
    dist.reduce_scatter_tensor(own, value(rank))
    return own.tolist()


def broadcast(rank):
    tensor = value(rank)
    dist.broadcast(tensor, src=1)
    return tensor.tolist()


def reduce(rank):
    tensor = value(rank)
    dist.reduce(tensor, dst=1)
    return tensor.tolist()


def gather(rank):
    parts = [torch.empty(2), torch.empty(2)] if rank == 1 else None
    dist.gather(value(rank), parts, dst=1)
    return parts and torch.cat(parts).tolist()


def scatter(rank):
    own = torch.empty(1)
    dist.scatter(own, list(value(rank).chunk(2)) if rank == 1 else None, src=1)
    return own.tolist()


def all_to_all(rank):
    got = [torch.empty(1), torch.empty(1)]
    dist.all_to_all(got, list(value(rank).chunk(2)))
    return torch.cat(got).tolist()


def all_to_all_uneven(rank):
    sizes = ([1, 2], [2, 3])[rank]  # what rank sends; it receives one more from itself or less
    received = ([1, 2], [2, 3])[rank]
    got = torch.empty(sum(received))
    dist.all_to_all_single(got, value(rank, sum(sizes)), received, sizes)
    return got.tolist()


def objects(rank):
    got = [None, None]
    dist.all_gather_object(got, {"rank": rank})
    return got


def barrier(rank):
    dist.barrier()
    return rank


def gather_single(rank):
    gathered = torch.empty(4) if rank == 1 else None
    dist.gather_single(value(rank), gathered, dst=1)
    return None if gathered is None else gathered.tolist()


def pairs(rank):
    got = torch.empty(2)
    ops = [
        dist.P2POp(dist.irecv, got, 1 - rank),
        dist.P2POp(dist.isend, value(rank), 1 - rank),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got.tolist()


def send_and_receive(rank):
    tensor = value(0)
    if rank == 0:
        dist.send(tensor, 1)
        return None
    got = torch.empty(2)
    sender = dist.recv(got)
    return [sender, got.tolist()]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("collective", "wanted"),
    [
        (all_reduce(dist.ReduceOp.SUM), [[10, 12], [10, 12]]),
        (all_reduce(dist.ReduceOp.AVG), [[5, 6], [5, 6]]),
        (all_reduce(dist._make_nccl_premul_sum(0.5)), [[5, 6], [5, 6]]),
        (all_reduce(dist._make_nccl_premul_sum(torch.tensor([0.5]))), [[5, 6], [5, 6]]),
        (all_reduce(dist.ReduceOp.MAX), [[10, 11], [10, 11]]),
        (all_reduce(dist.ReduceOp.MIN), [[0, 1], [0, 1]]),
        (all_reduce(dist.ReduceOp.PRODUCT), [[0, 11], [0, 11]]),
        (all_gather, [[0, 1, 10, 11]] * 2),
        (all_gather_into_tensor, [[0, 1, 10, 11]] * 2),
        (reduce_scatter, [[10], [12]]),
        (reduce_scatter_tensor, [[10], [12]]),
        (broadcast, [[10, 11]] * 2),
        (reduce, [[0, 1], [10, 12]]),
        (gather, [None, [0, 1, 10, 11]]),
        (scatter, [[10], [11]]),
        (all_to_all, [[0, 10], [1, 11]]),
        (all_to_all_uneven, [[0, 10, 11], [1, 2, 12, 13, 14]]),
        (objects, [[{"rank": 0}, {"rank": 1}]] * 2),
        (barrier, [0, 1]),
        (gather_single, [None, [0, 1, 10, 11]]),
        (pairs, [[10, 11], [0, 1]]),
        (send_and_receive, [None, [0, [0, 1]]]),
    ],
)
def test_collectives_do_what_their_names_say(collective, wanted):
    assert on_two(lambda rank, _: collective(rank)) == wanted


def test_a_mesh_of_two_axes_has_the_groups_of_its_axes():
    def function(rank, mesh):
        tensor = torch.tensor([float(rank)])
        sums = []
        for axis in ("dp", "tp"):
            part = tensor.clone()
            dist.all_reduce(part, group=mesh.get_group(axis))
            sums.append(part.item())
        return [*sums, list(mesh.get_coordinate())]

    assert run_ranks_in_threads({"dp": 2, "tp": 2}, function) == [
        [2.0, 1.0, [0, 0]],
        [4.0, 1.0, [0, 1]],
        [2.0, 5.0, [1, 0]],
        [4.0, 5.0, [1, 1]],
    ]


def test_groups_of_other_backends_are_threaded_too():
    def function(rank, _):
        group = dist.new_group([0, 1], backend="gloo")
        tensor = torch.tensor([1.0])
        dist.all_reduce(tensor, group=group)
        return tensor.item()

    assert on_two(function) == [2.0, 2.0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_tensors_are_sharded_and_gathered(num_ranks):
    full = torch.arange(14.0).reshape(7, 2)

    def function(_, mesh):
        sharded = distribute_tensor(full, mesh, [Shard(0)])
        assert isinstance(sharded, DTensor)
        return sharded.to_local().shape[0], sharded.redistribute(
            placements=[Replicate()]
        ).to_local()

    results = run_ranks_in_threads({"tp": num_ranks}, function)
    assert sum(size for size, _ in results) == 7
    assert all(torch.equal(got, full) for _, got in results)


def test_ranks_of_successive_meshes_are_not_confused():
    full = torch.arange(7.0)
    for num_ranks in (2, 4, 3, 2):
        sizes = run_ranks_in_threads(
            {"tp": num_ranks},
            lambda _, mesh: distribute_tensor(full, mesh, [Shard(0)]).to_local().tolist(),
        )
        assert [value for shard in sizes for value in shard] == full.tolist()


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 5))


def tensor_parallel(model, mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


def both(model, mesh):
    return fully_shard(tensor_parallel(model, mesh), mesh=mesh["dp"])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("axes", "parallelize"),
    [
        ({"tp": 2}, tensor_parallel),
        ({"dp": 2}, lambda model, mesh: fully_shard(model, mesh=mesh)),
        ({"dp": 2, "tp": 2}, both),
        ({"dp": 2}, lambda model, _: DistributedDataParallel(model)),
    ],
)
def test_torchs_own_parallelisms_train_as_on_one_device(axes, parallelize):
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    single = make_model()
    single(x).square().sum().backward()

    def function(_, mesh):
        model = make_model()
        sharded = parallelize(model, mesh)
        output = sharded(x)
        output.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        full_gradients = [
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            for gradient in gradients
        ]
        return output.detach(), full_gradients

    for output, gradients in run_ranks_in_threads(axes, function):
        torch.testing.assert_close(output, single(x).detach())
        for gradient, parameter in zip(gradients, single.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_each_rank_draws_its_own_numbers_and_they_start_equal():
    def function(rank, _):
        first = torch.rand(1).item()
        if rank == 0:
            torch.rand(5)
        dist.barrier()
        return first, torch.rand(1).item(), random.random()

    torch.manual_seed(0)
    random.seed(0)
    first, second = on_two(function)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]
    assert torch.rand(1).item() == first[0]  # the caller's generator is unchanged
    assert random.random() == first[2]


def test_contexts_that_switch_something_for_the_process_are_each_ranks_own():
    """Ranks enter and leave them at different times, and wait for each other in between."""

    def function(rank, mesh):
        replicated = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        results = []
        for _ in range(2):
            with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
                dist.barrier()
                results.append((replicated + torch.ones(2)).to_local().tolist())
                results.append(torch.backends.cuda.flash_sdp_enabled())
            if rank == 0:
                dist.barrier()
            results.append(torch.backends.cuda.flash_sdp_enabled())
            if rank == 1:
                dist.barrier()
        return results

    assert on_two(function) == [[[2.0, 2.0], False, True] * 2] * 2
    assert torch.backends.cuda.flash_sdp_enabled()


def test_ranks_find_grad_mode_and_autocast_as_they_are_outside():
    def function(*_):
        return torch.is_grad_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert on_two(function) == [(False, torch.bfloat16)] * 2
    assert on_two(function) == [(True, torch.float32)] * 2


def snapshot() -> list[object]:
    world = dist.distributed_c10d
    return [
        dist.is_initialized(),
        list(dist.Backend.backend_list),
        sorted(dist.Backend.backend_capability),
        hasattr(dist.Backend, "THREADED"),
        world._pg_map,
        world._group_count,
        world._new_process_group_helper,
        world._store_based_barrier,
        sys.excepthook,
        dist.get_debug_level(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.utils._python_dispatch._is_in_torch_dispatch_mode,
        torch.utils._python_dispatch._is_in_non_infra_torch_dispatch_mode,
        [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")],
    ]


def test_nothing_stays_behind_not_even_after_an_exception():
    def fail(rank, _):
        torch.rand(1)
        dist.barrier()
        raise ValueError("no")

    def use_modes(rank, _):
        torch.set_default_dtype(torch.float64)
        with FlopCounterMode(display=False):
            dist.barrier()
        torch.set_default_dtype(torch.float32 if rank else torch.float64)

    before = snapshot()
    on_two(lambda *_: dist.barrier())
    assert snapshot() == before
    on_two(use_modes)
    assert snapshot() == before
    with pytest.raises(RankError):
        on_two(fail)
    assert snapshot() == before
    assert on_two(lambda rank, _: all_gather(rank)) == [[0, 1, 10, 11]] * 2


def test_a_rank_that_raises_ends_the_others_that_wait_for_it():
    ended = []

    def function(rank, _):
        if rank == 1:
            raise ValueError("the weights are gone")
        try:
            dist.all_reduce(torch.ones(1))
        except Exception:  # noqa: BLE001 - programs do this
            ended.append("caught")
        finally:
            ended.append("ended")

    with pytest.raises(RankError, match=r"^rank 1 failed: ValueError: the weights are gone$") as e:
        on_two(function)
    assert isinstance(e.value.__cause__, ValueError)
    assert e.value.rank == 1
    assert ended == ["ended"]


def test_a_rank_that_raises_in_backward_ends_the_others():
    def function(rank, _):
        x = torch.ones(2, requires_grad=True)

        def hook(gradient):
            if rank == 1:
                raise ValueError("in backward")
            dist.all_reduce(gradient.clone())

        x.register_hook(hook)
        (x * 2).sum().backward()

    with pytest.raises(RankError, match="rank 1 failed: ValueError: in backward"):
        on_two(function)


def test_a_deadlock_reports_what_each_rank_waits_for():
    def function(rank, _):
        if rank == 0:
            dist.all_reduce(torch.ones(3, 4))

    with pytest.raises(
        CollectiveError,
        match=r"deadlock: rank 0 waits in all_reduce of float32 \[3, 4\] with "
        r"the group of rank 0, 1; rank 1 has ended",
    ):
        on_two(function)


def test_collectives_in_another_order_on_two_groups_are_a_deadlock():
    def function(rank, mesh):
        axes = ("a", "b") if rank in (0, 3) else ("b", "a")
        for axis in axes:
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))

    with pytest.raises(CollectiveError, match="the ranks deadlock"):
        run_ranks_in_threads({"a": 2, "b": 2}, function)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), src=0)),
        (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(3))),
        (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(2).double())),
        (
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX),
        ),
        (lambda: dist.broadcast(torch.ones(2), 0), lambda: dist.broadcast(torch.ones(2), 1)),
    ],
)
def test_ranks_that_disagree_on_a_collective_are_refused(first, second):
    with pytest.raises(
        CollectiveError, match="ranks disagree on a collective: rank 0 of the group"
    ):
        on_two(lambda rank, _: first() if rank == 0 else second())


def test_a_process_that_has_a_group_is_refused():
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        with pytest.raises(WorldError, match=r"this one has one \(fake, 2 ranks\)"):
            on_two(lambda *_: None)
    finally:
        dist.destroy_process_group()


def test_ranks_within_ranks_are_refused():
    with pytest.raises(WorldError, match="worlds cannot be nested"):
        on_two(lambda *_: on_two(lambda *_: None))


@pytest.mark.parametrize("mesh", [{}, {"tp": 0}, {"tp": 1000}])
def test_meshes_that_cannot_run_in_threads_are_refused(mesh):
    with pytest.raises(WorldError, match="the mesh"):
        run_ranks_in_threads(mesh, lambda *_: None)


def test_a_mesh_of_one_rank_runs_in_a_thread():
    assert run_ranks_in_threads({"tp": 1}, lambda rank, mesh: (rank, mesh.size())) == [(0, 1)]


def test_compiled_ranks_that_wait_for_each_other_leave_dynamo_as_it_was() -> None:
    class Summed(nn.Module):
        def __init__(self, group: dist.ProcessGroup) -> None:
            super().__init__()
            self.group = group

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            once = functional.all_reduce(x, "sum", self.group) + 1
            return functional.all_reduce(once, "sum", self.group) + 1

    def program(rank: int, mesh: DeviceMesh) -> torch.Tensor:
        model = torch.compile(Summed(mesh.get_group()), backend="eager", fullgraph=True)
        return model(torch.full((2,), float(rank)))

    assert [result.tolist() for result in run_ranks_in_threads({"dp": 2}, program)] == [
        [5.0, 5.0]
    ] * 2
    assert not eval_frame._in_optimized_module
    graphs = []

    @torch.compile(backend=lambda graph, _: graphs.append(graph) or graph)
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    assert broken(torch.ones(2)).tolist() == [4.0, 4.0]
    assert len(graphs) == 2


def test_a_sum_of_inputs_that_are_multiplied_by_a_factor_is_computed():
    def reduce(rank, _):
        x = torch.full((2,), float(rank + 1))
        shard = torch.empty(1)
        dist.reduce_scatter(shard, list(x.chunk(2)), op=dist.ReduceOp.PREMUL_SUM(0.25))
        return shard.item()

    assert run_ranks_in_threads({"dp": 2}, reduce) == [0.75, 0.75]


def test_receives_take_messages_in_the_order_in_which_they_were_posted():
    def exchange(rank, _):
        if rank == 0:
            dist.send(torch.tensor(1.0), 1)
            dist.send(torch.tensor(2.0), 1)
            return None
        tensors = [torch.zeros(()), torch.zeros(())]
        first, second = (dist.irecv(tensor, 0) for tensor in tensors)
        second.wait()
        first.wait()
        return [tensor.item() for tensor in tensors]

    assert run_ranks_in_threads({"pp": 2}, exchange)[1] == [1.0, 2.0]
