"""Every way a program can call a collective itself is seen once, with kind, group and line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from shardscope import World, simulate, trace
from shardscope.record import Call, CollectiveKind, Phase, RankSpan
from small_models import alone_on_gloo, everyone, facts, only

K = CollectiveKind

# torch 2.13 renames some collectives; the old names work in every version we support.
old_names = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"dp": 2, "tp": 4}, rank=5) as world:
        yield world


def pieces(num_ranks: int = 8) -> list[torch.Tensor]:
    return [torch.ones(8) for _ in range(num_ranks)]


def coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(8))


EAGER: dict[str, tuple[Callable[[], object], CollectiveKind, str, str]] = {
    # call, kind, torch's op, the function that the cause names
    "all_reduce": (lambda: dist.all_reduce(torch.ones(8)), K.ALL_REDUCE, "allreduce_", ""),
    "all_reduce, async": (
        lambda: dist.all_reduce(torch.ones(8), async_op=True).wait(),
        K.ALL_REDUCE,
        "allreduce_",
        "all_reduce",
    ),
    "all_reduce, coalesced": (
        coalesced,
        K.ALL_REDUCE,
        "allreduce_coalesced_",
        "_coalescing_manager",
    ),
    "all_gather": (
        lambda: dist.all_gather(pieces(), torch.ones(8)),
        K.ALL_GATHER,
        "allgather_",
        "",
    ),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(torch.ones(64), torch.ones(8)),
        K.ALL_GATHER,
        "_allgather_base_",
        "",
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(torch.ones(8), pieces()),
        K.REDUCE_SCATTER,
        "reduce_scatter_",
        "",
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(torch.ones(8), torch.ones(64)),
        K.REDUCE_SCATTER,
        "_reduce_scatter_base_",
        "",
    ),
    "all_to_all": (
        lambda: dist.all_to_all(pieces(), pieces()),
        K.ALL_TO_ALL,
        "alltoall_",
        "",
    ),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(torch.ones(8), torch.ones(8)),
        K.ALL_TO_ALL,
        "alltoall_base_",
        "",
    ),
    "broadcast": (lambda: dist.broadcast(torch.ones(8), 0), K.BROADCAST, "broadcast_", ""),
    "reduce": (lambda: dist.reduce(torch.ones(8), 0), K.REDUCE, "reduce_", ""),
    "gather": (lambda: dist.gather(torch.ones(8), dst=0), K.GATHER, "gather_", ""),
    "scatter": (lambda: dist.scatter(torch.ones(8), src=0), K.SCATTER, "scatter_", ""),
    "send": (lambda: dist.send(torch.ones(8), 0), K.SEND, "send", ""),
    "recv": (lambda: dist.recv(torch.ones(8), 0), K.RECV, "recv_", ""),
    "recv from anyone": (
        lambda: dist.recv(torch.ones(8)),
        K.RECV,
        "recv_any_source_",
        "recv",
    ),
    "isend": (lambda: dist.isend(torch.ones(8), 0), K.SEND, "send", ""),
    "irecv": (lambda: dist.irecv(torch.ones(8), 0), K.RECV, "recv_", ""),
    "barrier": (lambda: dist.barrier(), K.BARRIER, "barrier", ""),
}


@old_names
@pytest.mark.parametrize("name", EAGER)
def test_eager_collective_is_seen_once_with_its_call(world: World, name: str) -> None:
    call, kind, op, api = EAGER[name]
    with trace() as t:
        call()
    collective = only(t)
    assert (collective.kind, collective.op) == (kind, f"c10d.{op}")
    assert collective.cause == Call(api=f"torch.distributed.{api or name}")
    assert (collective.rank, collective.num_ranks, collective.phase) == (5, 8, Phase.OUTSIDE)
    assert (collective.owner, collective.trigger) == (None, None)


def test_source_is_the_line_that_called(world: World) -> None:
    with trace() as t:
        dist.all_reduce(torch.ones(8))  # this very line
    source = only(t).source
    assert source is not None
    assert Path(source.file).name == Path(__file__).name
    assert source.text == "dist.all_reduce(torch.ones(8))  # this very line"
    assert Path(__file__).read_text().splitlines()[source.line - 1].strip() == source.text
    assert source.function == "test_source_is_the_line_that_called"


@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN", "PRODUCT", "AVG", "BAND", "BOR", "BXOR"])
def test_reduction_has_its_name(world: World, op: str) -> None:
    reduction = getattr(dist.ReduceOp, op)
    with trace() as t:
        dist.all_reduce(torch.ones(8, dtype=torch.int32), op=reduction)
        dist.reduce(torch.ones(8, dtype=torch.int32), 0, reduction)
        dist.reduce_scatter(
            torch.ones(8, dtype=torch.int32), [p.int() for p in pieces()], reduction
        )
        torch.ops._c10d_functional.all_reduce(torch.ones(8), op.lower(), everyone().group_name)
    assert [name for (name,) in facts(t, "reduce_op")] == [op.lower()] * 4


def test_reduction_with_a_factor_has_its_name(world: World) -> None:
    with trace() as t:
        dist.all_reduce(torch.ones(8), op=dist._make_nccl_premul_sum(0.5))
    assert only(t).reduce_op == "premul_sum"


def test_collective_without_a_reduction_names_none(world: World) -> None:
    with trace() as t:
        dist.broadcast(torch.ones(8), 0)
    assert only(t).reduce_op is None


def test_group_axis_and_order_within_the_group(world: World) -> None:
    tp, dp = world.mesh["tp"].get_group(), world.mesh["dp"].get_group()
    with trace() as t:
        dist.all_reduce(torch.ones(8), group=tp)
        dist.all_reduce(torch.ones(8), group=dp)
        dist.all_reduce(torch.ones(8), group=tp)
        dist.all_reduce(torch.ones(8))
    assert facts(t, "order", "group", "axis", "num_ranks", "group_order") == [
        (0, "tp[4-7]", "tp", 4, 0),
        (1, "dp[1-5/4]", "dp", 2, 0),
        (2, "tp[4-7]", "tp", 4, 1),
        (3, "world[0-7]", None, 8, 0),
    ]
    groups = {group.name: group for group in t.recording.groups}
    assert groups["dp[1-5/4]"].ranks == (RankSpan(1, 2, 4),)
    assert groups["tp[4-7]"].torch_name == tp.group_name
    assert groups["tp[4-7]"].backend == "fake"


def test_group_made_by_hand_and_its_twin_have_different_names(world: World) -> None:
    first, second = dist.new_group([4, 5]), dist.new_group([4, 5])
    with trace() as t:
        dist.all_reduce(torch.ones(8), group=first)
        dist.all_reduce(torch.ones(8), group=second)
    assert facts(t, "group", "axis", "group_order") == [
        ("group[4-5]", None, 0),
        ("group[4-5]#2", None, 0),
    ]


def test_flattened_axes_have_their_name(world: World) -> None:
    flat = world.mesh["dp", "tp"]._flatten("all")
    with trace() as t:
        dist.all_reduce(torch.ones(8), group=flat.get_group())
    assert (only(t).axis, only(t).num_ranks) == ("all", 8)


@old_names
def test_peer_is_a_rank_of_the_world_in_sub_groups_too(world: World) -> None:
    tp = world.mesh["tp"].get_group()  # ranks 4-7
    with trace() as t:
        dist.send(torch.ones(8), 6, group=tp)
        dist.recv(torch.ones(8), 7, group=tp)
        dist.send(torch.ones(8), group=tp, group_dst=2)
        dist.broadcast(torch.ones(8), 4, group=tp)
        dist.reduce(torch.ones(8), 7, group=tp)
        dist.gather(torch.ones(8), dst=4, group=tp)
        dist.scatter(torch.ones(8), src=6, group=tp)
        torch.ops._c10d_functional.broadcast(torch.ones(8), 3, tp.group_name)
        dist.send(torch.ones(8), 0)
        dist.recv(torch.ones(8), group=tp)
    assert [peer for (peer,) in facts(t, "peer")] == [6, 7, 6, 4, 7, 4, 6, 7, 0, None]


def test_batched_sends_and_receives_are_seen_one_by_one(world: World) -> None:
    with trace() as t:
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(8), 6),
                dist.P2POp(dist.irecv, torch.ones(4), 4),
            ]
        )
    assert len(work) == 2
    assert facts(t, "kind", "peer", "input_bytes", "output_bytes") == [
        (K.SEND, 6, 32, 0),
        (K.RECV, 4, 0, 16),
    ]
    assert {call.cause for call in t.recording.collectives} == {
        Call(api="torch.distributed.batch_isend_irecv")
    }


OBJECTS: dict[str, tuple[Callable[[], object], list[CollectiveKind]]] = {
    "all_gather_object": (
        lambda: dist.all_gather_object([None] * 8, {"a": 1}),
        [K.ALL_GATHER, K.ALL_GATHER],
    ),
    "gather_object": (lambda: dist.gather_object({"a": 1}, dst=0), [K.ALL_GATHER, K.GATHER]),
    "broadcast_object_list": (
        lambda: dist.broadcast_object_list([{"a": 1}], src=0),
        [K.BROADCAST, K.BROADCAST],
    ),
    "scatter_object_list": (
        lambda: dist.scatter_object_list([None], [{"a": i} for i in range(8)], src=5),
        [K.BROADCAST, K.SCATTER, K.SCATTER],
    ),
    "send_object_list": (lambda: dist.send_object_list([1], dst=0), [K.SEND, K.SEND]),
    "recv_object_list": (lambda: dist.recv_object_list([None], src=0), [K.RECV, K.RECV]),
}


@old_names
@pytest.mark.parametrize("name", OBJECTS)
def test_object_collective_is_seen_as_what_it_sends(world: World, name: str) -> None:
    call, kinds = OBJECTS[name]
    with trace() as t:
        call()
    assert [kind for (kind,) in facts(t, "kind")] == kinds
    assert [cause.api for (cause,) in facts(t, "cause")] == [f"torch.distributed.{name}"] * len(
        kinds
    )


def test_real_object_collectives_are_seen() -> None:
    with alone_on_gloo():
        answers = [None]
        with trace() as t:
            dist.all_gather_object(answers, {"a": 1})
            dist.broadcast_object_list(answers, src=0)
    assert answers == [{"a": 1}]
    assert {call.cause for call in t.recording.collectives} == {
        Call(api="torch.distributed.all_gather_object"),
        Call(api="torch.distributed.broadcast_object_list"),
    }


def test_monitored_barrier_is_seen_on_gloo_its_only_backend() -> None:
    with alone_on_gloo(), trace() as t:
        dist.monitored_barrier()
    collective = only(t)
    assert (collective.kind, collective.op) == (K.BARRIER, "c10d.monitored_barrier_")
    assert collective.cause == Call(api="torch.distributed.monitored_barrier")


def test_other_threads_are_seen_with_their_name(world: World) -> None:
    with trace() as t:
        worker = threading.Thread(target=lambda: dist.all_reduce(torch.ones(8)), name="prefetcher")
        worker.start()
        worker.join()
        dist.all_reduce(torch.ones(8))
    assert facts(t, "kind", "thread", "order") == [
        (K.ALL_REDUCE, "prefetcher", 0),
        (K.ALL_REDUCE, "", 1),
    ]
    assert t.recording.collectives[0].source.text.startswith("worker = threading.Thread(")


def test_threads_that_issue_at_once_lose_nothing(world: World) -> None:
    def issue() -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(8))

    with trace() as t:
        workers = [threading.Thread(target=issue, name=f"worker {i}") for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    threads = [thread for (thread,) in facts(t, "thread")]
    assert {name: threads.count(name) for name in set(threads)} == {
        f"worker {i}": 50 for i in range(4)
    }
    assert [order for (order,) in facts(t, "group_order")] == list(range(200))


@old_names
@pytest.mark.parametrize("name", EAGER)
def test_fake_tensors_are_seen_like_real_ones(world: World, name: str) -> None:
    call, kind, op, _ = EAGER[name]
    with FakeTensorMode(allow_non_fake_inputs=True), trace() as t:
        call()
    assert (only(t).kind, only(t).op) == (kind, f"c10d.{op}")


@old_names
@pytest.mark.parametrize(
    "name", [name for name in EAGER if name not in ("barrier", "recv from anyone")]
)
def test_meta_tensors_are_seen_like_real_ones(world: World, name: str) -> None:
    call, kind, op, _ = EAGER[name]
    with torch.device("meta"), trace() as t:
        call()
    assert (only(t).kind, only(t).op) == (kind, f"c10d.{op}")
