"""Hooks on collectives: each is reported once, no rank is blocked, and all state is restored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shardscope._torch.collectives.hooks import CollectiveEvent, intercept
from shardscope.world import simulate

TIMEOUT = timedelta(seconds=20)


class Log:
    """Records the ops of observed collectives."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def before(self, event: CollectiveEvent) -> None:
        self.ops.append(event.op)


def gloo_group(store: dist.Store, rank: int) -> dist.ProcessGroup:
    """The group of one of two threaded ranks."""
    group = dist.ProcessGroup(store, rank, 2)
    backend = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def test_other_threads_run_while_a_collective_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its kernel returns when both ranks have called it: never, if the first one holds the GIL.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, log = dist.HashStore(), Log()

    def meet(rank: int) -> bool:
        group = gloo_group(store, rank)
        group.monitored_barrier(TIMEOUT, wait_all_ranks=False)
        return True

    with intercept(log), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(meet, range(2))) == [True, True]
    assert log.ops == ["c10d.monitored_barrier_"] * 2


def test_observers_come_and_go_in_any_order() -> None:
    first, second = Log(), Log()
    with simulate(mesh={"dp": 2}):
        outer, inner = intercept(first), intercept(second)
        outer.__enter__()
        inner.__enter__()
        dist.all_reduce(torch.ones(1))
        outer.__exit__(None, None, None)
        dist.barrier()
        inner.__exit__(None, None, None)
        dist.all_reduce(torch.ones(1))
    assert first.ops == ["c10d.allreduce_"]
    assert second.ops == ["c10d.allreduce_", "c10d.barrier"]


def test_an_observer_that_raises_refuses_the_collective_and_others_still_see_the_next() -> None:
    class Refuser(Log):
        def before(self, event: CollectiveEvent) -> None:
            super().before(event)
            if event.op == "c10d.barrier":
                raise PermissionError("no barriers")

    log, refuser = Log(), Refuser()
    with simulate(mesh={"dp": 2}), intercept(log), intercept(refuser):
        with pytest.raises(PermissionError, match="no barriers"):
            dist.barrier()
        dist.all_reduce(torch.ones(1))
    assert log.ops == refuser.ops == ["c10d.barrier", "c10d.allreduce_"]


def test_collectives_on_sparse_tensors_are_reported() -> None:
    log = Log()
    with simulate(mesh={"dp": 2}), intercept(log):
        dist.all_reduce(torch.eye(3).to_sparse())
    assert log.ops == ["c10d.allreduce_"]


def test_collectives_that_a_mode_issues_instead_of_an_op_are_reported() -> None:
    class ReplacingMode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops._c10d_functional.all_reduce.default:
                dist.barrier()
                dist.broadcast(torch.ones(1), 0)
                return args[0]
            return op(*args, **(kwargs or {}))

    log = Log()
    with simulate(mesh={"dp": 2}), intercept(log), ReplacingMode():
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD.group_name)
    assert log.ops == ["c10d.barrier", "c10d.broadcast_"]


def test_an_op_that_a_mode_passes_on_is_reported_once_under_its_own_name() -> None:
    class PassOn(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            return op(*args, **(kwargs or {}))

    log = Log()
    with simulate(mesh={"dp": 2}), intercept(log), PassOn():
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD.group_name)
    assert log.ops == ["_c10d_functional.all_reduce"]


CALLS = {
    "c10d.allreduce_": lambda x: dist.all_reduce(x),
    "c10d._allgather_base_": lambda x: (
        dist.all_gather_single(torch.cat([x, x]), x)
        if hasattr(dist, "all_gather_single")
        else dist.all_gather_into_tensor(torch.cat([x, x]), x)
    ),
    "c10d.broadcast_": lambda x: dist.broadcast(x, 0),
    "c10d.barrier": lambda x: dist.barrier(),
    "c10d.allgather_": lambda x: dist.all_gather([x.clone(), x.clone()], x),
    "_c10d_functional.all_reduce": lambda x: torch.ops._c10d_functional.all_reduce(
        x, "sum", dist.group.WORLD.group_name
    ),
}


@pytest.fixture
def fake_group():
    """A fake group of two ranks, without a simulated world, which has an observer of its own."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("op", CALLS)
def test_each_way_to_issue_a_collective_is_reported_once(fake_group, op) -> None:
    log = Log()
    with intercept(log):
        CALLS[op](torch.ones(2))
    assert log.ops == [op]


@pytest.mark.parametrize("op", CALLS)
def test_calls_in_inference_mode_are_reported_once(fake_group, op) -> None:
    log = Log()
    with intercept(log), torch.inference_mode():
        CALLS[op](torch.ones(2))
    assert log.ops == [op]


@pytest.mark.parametrize("op", CALLS)
def test_calls_by_a_dispatch_mode_are_reported_once(fake_group, op) -> None:
    class Caller(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.neg.default:
                CALLS[op](torch.ones(2))
            return func(*args, **(kwargs or {}))

    log = Log()
    with intercept(log), Caller():
        torch.ones(2).neg()
    assert log.ops == [op]


@pytest.mark.parametrize("op", CALLS)
def test_calls_of_another_thread_are_reported_once(fake_group, op) -> None:
    log = Log()
    with intercept(log), ThreadPoolExecutor(1) as pool:
        pool.submit(CALLS[op], torch.ones(2)).result()
    assert log.ops == [op]


@pytest.mark.parametrize("op", [op for op in CALLS if op.startswith("c10d.")])
def test_calls_on_fake_tensors_are_reported_once(fake_group, op) -> None:
    log = Log()
    with intercept(log), FakeTensorMode():
        CALLS[op](torch.ones(2))
    assert log.ops == [op]


def test_broadcasts_of_ddp_buffers_in_inference_mode_are_reported(fake_group) -> None:
    log = Log()
    model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
    model.eval()
    with intercept(log), torch.inference_mode():
        model(torch.ones(2, 2))
    assert set(log.ops) == {"c10d.broadcast_"}


def test_dispatch_keys_of_the_thread_are_restored_even_after_an_exception(fake_group) -> None:
    def keys() -> tuple[str, str]:
        included = torch._C._dispatch_tls_local_include_set()
        return str(included), str(torch._C._dispatch_tls_local_exclude_set())

    before = keys()
    with intercept(Log()):
        for call in CALLS.values():
            with torch.inference_mode():
                call(torch.ones(2))
            call(torch.ones(2))
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            dist.group.WORLD.allreduce("no tensors", dist.AllreduceOptions())
    assert keys() == before


def test_tensor_versions_are_the_same_with_and_without_hooks(fake_group) -> None:
    def versions() -> list[int]:
        counts = []
        for call in CALLS.values():
            x = torch.ones(2)
            call(x)
            counts.append(x._version)
        return counts

    without = versions()
    with intercept(Log()):
        assert versions() == without
