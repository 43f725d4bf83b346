"""Plain torch.distributed calls in a simulated world: all kinds work, and each is seen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import empty, ones
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils._pytree import tree_leaves

from shardscope import World, simulate, trace

NUM_RANKS = 4

# torch means to drop some of these; they work in every version we support.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

Call = Callable[[], object]


def empties(size: int = 8) -> list[torch.Tensor]:
    return [empty(size) for _ in range(NUM_RANKS)]


def default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


# A call, then the kind, input bytes and output bytes of each collective it is.
EAGER: dict[str, tuple[Call, list[tuple[str, int, int]]]] = {
    "all_reduce": (lambda: dist.all_reduce(ones(8)), [("all_reduce", 32, 32)]),
    "all_gather": (lambda: dist.all_gather(empties(), ones(8)), [("all_gather", 32, 128)]),
    "all_gather of uneven tensors": (
        lambda: dist.all_gather([empty(8 + rank) for rank in range(NUM_RANKS)], ones(8)),
        [("all_gather", 32, 152)],
    ),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(empty(32), ones(8)),
        [("all_gather", 32, 128)],
    ),
    "all_gather_into_tensor stacked": (
        lambda: dist.all_gather_into_tensor(empty(4, 8), ones(8)),
        [("all_gather", 32, 128)],
    ),
    "all_gather_into_tensor of another shape": (
        lambda: dist.all_gather_into_tensor(empty(8, 4), ones(4, 2)),
        [("all_gather", 32, 128)],
    ),
    "all_gather_into_tensor of a scalar": (
        lambda: dist.all_gather_into_tensor(empty(4), ones(())),
        [("all_gather", 4, 16)],
    ),
    "all_gather_coalesced": (
        lambda: dist.all_gather_coalesced(
            [[empty(8), empty(4)] for _ in range(NUM_RANKS)], [ones(8), ones(4)]
        ),
        [("all_gather", 48, 192)],
    ),
    "all_reduce_coalesced": (
        lambda: dist.all_reduce_coalesced([ones(8), ones(4)]),
        [("all_reduce", 48, 48)],
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(empty(8), [ones(8) for _ in range(NUM_RANKS)]),
        [("reduce_scatter", 128, 32)],
    ),
    "reduce_scatter of uneven tensors": (
        lambda: dist.reduce_scatter(empty(8), [ones(8), ones(7), ones(9), ones(1)]),
        [("reduce_scatter", 100, 32)],
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(empty(8), ones(32)),
        [("reduce_scatter", 128, 32)],
    ),
    "broadcast": (lambda: dist.broadcast(ones(8), src=3), [("broadcast", 32, 32)]),
    "reduce": (lambda: dist.reduce(ones(8), dst=3), [("reduce", 32, 32)]),
    "gather on the root": (
        lambda: dist.gather(ones(8), empties(), dst=0),
        [("gather", 32, 128)],
    ),
    "gather elsewhere": (lambda: dist.gather(ones(8), dst=1), [("gather", 32, 0)]),
    "gather_single on the root": (
        lambda: dist.gather_single(ones(8), empty(32), dst=0),
        [("gather", 32, 128)],
    ),
    "gather_single elsewhere": (lambda: dist.gather_single(ones(8), dst=1), [("gather", 32, 0)]),
    "scatter on the root": (
        lambda: dist.scatter(empty(8), [ones(8) for _ in range(NUM_RANKS)], src=0),
        [("scatter", 128, 32)],
    ),
    "scatter elsewhere": (lambda: dist.scatter(empty(8), src=1), [("scatter", 0, 32)]),
    "all_to_all": (
        lambda: dist.all_to_all(empties(2), [ones(2) for _ in range(NUM_RANKS)]),
        [("all_to_all", 32, 32)],
    ),
    "all_to_all of uneven tensors": (
        lambda: dist.all_to_all(
            [empty(2 + rank) for rank in range(NUM_RANKS)], [ones(2) for _ in range(NUM_RANKS)]
        ),
        [("all_to_all", 32, 56)],
    ),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(empty(8), ones(8)),
        [("all_to_all", 32, 32)],
    ),
    "all_to_all_single with splits, some of them zero": (
        lambda: dist.all_to_all_single(empty(6, 3), ones(5, 3), [2, 1, 0, 3], [2, 0, 0, 3]),
        [("all_to_all", 60, 72)],
    ),
    "all_to_all_single of nothing": (
        lambda: dist.all_to_all_single(empty(0, 3), ones(0, 3), [0] * 4, [0] * 4),
        [("all_to_all", 0, 0)],
    ),
    "barrier": (lambda: dist.barrier(), [("barrier", 0, 0)]),
    "send": (lambda: dist.send(ones(8), dst=1), [("send", 32, 0)]),
    "recv": (lambda: dist.recv(empty(8), src=1), [("recv", 0, 32)]),
    "recv from anyone": (lambda: dist.recv(empty(8)), [("recv", 0, 32)]),
    "isend": (lambda: dist.isend(ones(8), dst=1).wait(), [("send", 32, 0)]),
    "irecv": (lambda: dist.irecv(empty(8), src=1).wait(), [("recv", 0, 32)]),
    "batch_isend_irecv": (
        lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, ones(8), 1), dist.P2POp(dist.irecv, empty(4), 3)]
            )
        ],
        [("send", 32, 0), ("recv", 0, 16)],
    ),
}

FUNCTIONAL: dict[str, tuple[Call, list[tuple[str, int, int]]]] = {
    "all_reduce": (
        lambda: funcol.all_reduce(ones(8), "sum", default_group()),
        [("all_reduce", 32, 32)],
    ),
    "all_reduce_coalesced of mixed dtypes": (
        lambda: funcol.all_reduce_coalesced(
            [ones(8), ones(4, dtype=torch.int64)], "sum", default_group()
        ),
        [("all_reduce", 64, 64)],
    ),
    "all_gather_tensor": (
        lambda: funcol.all_gather_tensor(ones(8, 2), 1, default_group()),
        [("all_gather", 64, 256)],
    ),
    "all_gather_into_tensor_coalesced": (
        lambda: funcol.all_gather_into_tensor_coalesced([ones(8), ones(4)], default_group()),
        [("all_gather", 48, 192)],
    ),
    "reduce_scatter_tensor": (
        lambda: funcol.reduce_scatter_tensor(ones(8), "sum", 0, default_group()),
        [("reduce_scatter", 32, 8)],
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda: funcol.reduce_scatter_tensor_coalesced(
            [ones(8), ones(4)], "sum", [0, 0], default_group()
        ),
        [("reduce_scatter", 48, 12)],
    ),
    "all_to_all_single": (
        lambda: funcol.all_to_all_single(ones(8), None, None, default_group()),
        [("all_to_all", 32, 32)],
    ),
    "all_to_all_single of nothing": (
        lambda: funcol.all_to_all_single(ones(0, 3), [0] * 4, [0] * 4, default_group()),
        [("all_to_all", 0, 0)],
    ),
    "broadcast": (
        lambda: funcol.broadcast(ones(8), 3, default_group()),
        [("broadcast", 32, 32)],
    ),
    "permute_tensor": (
        lambda: funcol.permute_tensor(ones(8), [1, 2, 3, 0], default_group()),
        [("all_to_all", 32, 32)],
    ),
    "all_reduce and its backward": (
        lambda: (
            funcol.all_reduce(ones(8, requires_grad=True), "sum", default_group()).sum().backward()
        ),
        [("all_reduce", 32, 32), ("all_reduce", 32, 32)],
    ),
    "all_gather_tensor_autograd and its backward": (
        lambda: (
            funcol.all_gather_tensor_autograd(ones(8, requires_grad=True), 0, default_group())
            .mul(2)  # torch 2.11 wants gradients that are contiguous, which those of a sum are not
            .sum()
            .backward()
        ),
        [("all_gather", 32, 128), ("reduce_scatter", 128, 32)],
    ),
    "reduce_scatter_tensor_autograd and its backward": (
        lambda: (
            funcol.reduce_scatter_tensor_autograd(
                ones(8, requires_grad=True), "sum", 0, default_group()
            )
            .mul(2)
            .sum()
            .backward()
        ),
        [("reduce_scatter", 32, 8), ("all_gather", 8, 32)],
    ),
}


def seen_in(call: Call) -> list[tuple[str, int, int]]:
    with trace() as t:
        for leaf in tree_leaves(call()):
            if isinstance(leaf, funcol.AsyncCollectiveTensor):
                leaf.wait()
    return [(str(c.kind), c.input_bytes, c.output_bytes) for c in t.recording.collectives]


@pytest.mark.parametrize("name", EAGER)
def test_an_eager_call_works_and_is_seen_once(world: World, name: str) -> None:
    call, expected = EAGER[name]
    assert seen_in(call) == expected


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_functional_call_works_and_is_seen_once(world: World, name: str) -> None:
    call, expected = FUNCTIONAL[name]
    assert seen_in(call) == expected


def test_functional_results_have_the_shapes_of_a_real_group(world: World) -> None:
    group = default_group()
    gathered = funcol.all_gather_tensor(ones(8, 2), 1, group)
    scattered = funcol.reduce_scatter_tensor(ones(8, 2), "sum", 0, group)
    exchanged = funcol.all_to_all_single(ones(5, 3), [2, 1, 0, 3], [2, 0, 0, 3], group)
    assert funcol.wait_tensor(gathered).shape == (8, 8)
    assert funcol.wait_tensor(scattered).shape == (2, 2)
    assert funcol.wait_tensor(exchanged).shape == (6, 3)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: (dist.all_reduce(ones(8)), dist.all_reduce(ones(4))),
            ("all_reduce", 48, 48),
        ),
        (
            lambda: (
                dist.all_gather_into_tensor(empty(32), ones(8)),
                dist.all_gather_into_tensor(
                    empty(16, dtype=torch.int32), ones(4, dtype=torch.int32)
                ),
            ),
            ("all_gather", 48, 192),
        ),
        (
            lambda: (
                dist.reduce_scatter_tensor(empty(8), ones(32)),
                dist.reduce_scatter_tensor(empty(4), ones(16)),
            ),
            ("reduce_scatter", 192, 48),
        ),
    ],
    ids=["all_reduce", "all_gather of mixed dtypes", "reduce_scatter"],
)
def test_coalesced_calls_are_one_collective(
    world: World, call: Call, expected: tuple[str, int, int], asynchronous: bool
) -> None:
    def coalesced() -> None:
        with _coalescing_manager(async_ops=asynchronous) as manager:
            call()
        if asynchronous:
            manager.wait()

    assert seen_in(coalesced) == [expected]


def issue_asynchronously() -> dict[str, tuple[Any, list[torch.Tensor]]]:
    """Work by the name of the call, with the tensors that its future must hold."""
    reduced, root, received = ones(8), ones(8), empty(8)
    gathered, full, scattered, exchanged = empties(), empty(32), empty(8), empty(8)
    pieces = empties()
    return {
        "all_reduce": (dist.all_reduce(reduced, async_op=True), [reduced]),
        "broadcast": (dist.broadcast(root, src=1, async_op=True), [root]),
        "all_gather": (dist.all_gather(gathered, ones(8), async_op=True), gathered),
        "all_gather_into_tensor": (
            dist.all_gather_into_tensor(full, ones(8), async_op=True),
            [full],
        ),
        "reduce_scatter_tensor": (
            dist.reduce_scatter_tensor(scattered, ones(32), async_op=True),
            [scattered],
        ),
        "all_to_all": (
            dist.all_to_all(pieces, [ones(8) for _ in range(NUM_RANKS)], async_op=True),
            pieces,
        ),
        "all_to_all_single": (
            dist.all_to_all_single(exchanged, ones(8), async_op=True),
            [exchanged],
        ),
        "irecv": (dist.irecv(received, src=1), [received]),
    }


def test_work_is_finished_and_its_future_holds_the_outputs(world: World) -> None:
    for name, (work, outputs) in issue_asynchronously().items():
        assert work.wait() is True, name
        assert work.is_completed(), name
        values = work.get_future().wait()
        assert len(values) == len(outputs), name
        for value, output in zip(values, outputs, strict=True):
            assert value.untyped_storage()._cdata == output.untyped_storage()._cdata, name


def test_asynchronous_work_without_outputs_can_be_awaited(world: World) -> None:
    barrier = dist.barrier(async_op=True)
    assert barrier is not None
    assert barrier.wait() is True
    assert dist.isend(ones(8), dst=1).wait() is True


def test_a_receive_from_anyone_names_another_rank_as_sender(world: World) -> None:
    assert dist.recv(empty(8)) == 1
    assert [dist.recv(empty(8)) for _ in range(3)] == [1, 1, 1]


def test_subgroups_work(world: World) -> None:
    pair = dist.new_group([0, 3])
    with trace() as t:
        dist.all_reduce(ones(8), group=pair)
        dist.broadcast(ones(8), src=3, group=pair)
        dist.barrier(group=pair)
    assert [(str(c.kind), c.num_ranks, c.peer) for c in t.recording.collectives] == [
        ("all_reduce", 2, None),
        ("broadcast", 2, 3),
        ("barrier", 2, None),
    ]


@pytest.mark.parametrize(
    "issue",
    [
        lambda: dist.isend(torch.ones(3), 1),
        lambda: dist.irecv(torch.ones(3), 1),
        lambda: dist.irecv(torch.ones(3)),
        lambda: dist.barrier(async_op=True),
        lambda: dist.gather(torch.ones(3), None, 1, async_op=True),
        lambda: dist.all_reduce(torch.ones(3), async_op=True),
    ],
    ids=["isend", "irecv", "irecv from anyone", "barrier", "gather", "all_reduce"],
)
def test_asynchronous_work_is_soon_completed(issue: Callable[[], Any]) -> None:
    with simulate(mesh={"dp": 2}):
        work = issue()
        assert work.is_completed()
        assert work.wait() is not None


@pytest.mark.parametrize(
    "issue",
    [
        lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(2, 4)),
        lambda: dist.all_to_all_single(torch.ones(4, 2), torch.ones(8)),
        lambda: dist.reduce_scatter(torch.ones(2, 2), [torch.ones(4), torch.ones(4)]),
        lambda: dist.gather(torch.ones(1), [torch.ones(1), torch.ones(2)]),
    ],
    ids=["stacked", "other rows", "other shapes", "uneven"],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_shapes_that_only_nccl_takes_are_taken(issue: Callable[[], Any]) -> None:
    with simulate(mesh={"dp": 2}), trace() as t:
        issue()
    assert len(t.recording.collectives) == 1
