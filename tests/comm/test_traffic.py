"""Bytes by hand: what a collective carries, and what a ring of its ranks sends for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from shardscope import World, simulate, trace
from shardscope.record import CollectiveKind
from shardscope.record.base import wire_bytes
from small_models import only

K = CollectiveKind


@pytest.mark.parametrize(
    ("kind", "input_bytes", "output_bytes", "expected"),
    [
        (K.ALL_REDUCE, 800, 800, 1400),  # 2 × 7/8: each element goes round twice
        (K.ALL_GATHER, 100, 800, 700),  # the other seven shards pass through
        (K.REDUCE_SCATTER, 800, 100, 700),
        (K.ALL_TO_ALL, 800, 800, 700),  # one shard in eight stays
        (K.BROADCAST, 800, 800, 800),
        (K.REDUCE, 800, 800, 800),
        (K.GATHER, 100, 0, 100),  # a rank that is not the root sends its shard
        (K.GATHER, 100, 800, 0),  # the root sends nothing
        (K.SCATTER, 800, 100, 700),  # the root keeps one shard
        (K.SCATTER, 0, 100, 0),
        (K.SEND, 800, 0, 800),
        (K.RECV, 0, 800, 0),  # counted where it is sent
        (K.BARRIER, 0, 0, 0),
    ],
)
def test_ring_sends_what_the_formulas_say(
    kind: CollectiveKind, input_bytes: int, output_bytes: int, expected: int
) -> None:
    assert wire_bytes(kind, input_bytes, output_bytes, 8) == expected


@pytest.mark.parametrize("kind", list(CollectiveKind))
def test_one_rank_sends_nothing(kind: CollectiveKind) -> None:
    assert wire_bytes(kind, 800, 800, 1) == 0


def test_fractions_of_a_byte_are_rounded() -> None:
    assert wire_bytes(K.ALL_REDUCE, 4, 4, 3) == 5  # 2 × 2/3 × 4 = 5.33


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"dp": 4}, rank=1) as world:
        yield world


def pieces(num_elements: int = 8) -> list[torch.Tensor]:
    return [torch.ones(num_elements) for _ in range(4)]


CARRIED: dict[str, tuple[Callable[[], object], tuple[int, int, int, int]]] = {
    # call, then (num_tensors, input_bytes, output_bytes, wire_bytes) for float32 on 4 ranks
    "all_reduce": (lambda: dist.all_reduce(torch.ones(8)), (1, 32, 32, 48)),
    "all_gather": (lambda: dist.all_gather(pieces(), torch.ones(8)), (1, 32, 128, 96)),
    "all_gather_into_tensor": (
        lambda: torch.ops.c10d._allgather_base_(
            torch.ones(32), torch.ones(8), dist.group.WORLD.boxed()
        ),
        (1, 32, 128, 96),
    ),
    "reduce_scatter": (lambda: dist.reduce_scatter(torch.ones(8), pieces()), (4, 128, 32, 96)),
    "all_to_all": (lambda: dist.all_to_all(pieces(2), pieces(2)), (4, 32, 32, 24)),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(torch.ones(8), torch.ones(8)),
        (1, 32, 32, 24),
    ),
    "all_to_all_single, uneven": (  # rank 1 keeps 2 of the 10 elements it puts in
        lambda: dist.all_to_all_single(torch.ones(7), torch.ones(10), [2, 2, 2, 1], [1, 2, 3, 4]),
        (1, 40, 28, 32),
    ),
    "all_to_all_single, nothing to keep": (
        lambda: dist.all_to_all_single(
            torch.ones(3, 2), torch.ones(6, 2), [3, 0, 0, 0], [6, 0, 0, 0]
        ),
        (1, 48, 24, 48),
    ),
    "all_to_all_single, empty": (
        lambda: dist.all_to_all_single(
            torch.ones(0, 2), torch.ones(0, 2), [0, 0, 0, 0], [0, 0, 0, 0]
        ),
        (1, 0, 0, 0),
    ),
    "broadcast": (lambda: dist.broadcast(torch.ones(8), src=2), (1, 32, 32, 32)),
    "reduce": (lambda: dist.reduce(torch.ones(8), dst=2), (1, 32, 32, 32)),
    "gather to another": (lambda: dist.gather(torch.ones(8), dst=0), (1, 32, 0, 32)),
    "gather here": (lambda: dist.gather(torch.ones(8), pieces(), dst=1), (1, 32, 128, 0)),
    "scatter from another": (lambda: dist.scatter(torch.ones(8), src=0), (1, 0, 32, 0)),
    "scatter from here": (
        lambda: dist.scatter(torch.ones(8), pieces(), src=1),
        (4, 128, 32, 96),
    ),
    "send": (lambda: dist.send(torch.ones(8), dst=2), (1, 32, 0, 32)),
    "recv": (lambda: dist.recv(torch.ones(8), src=2), (1, 0, 32, 0)),
    "barrier": (lambda: dist.barrier(), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("name", CARRIED)
def test_bytes_of_each_kind(world: World, name: str) -> None:
    call, expected = CARRIED[name]
    with trace() as t:
        call()
    collective = only(t)
    carried = (
        collective.num_tensors,
        collective.input_bytes,
        collective.output_bytes,
        collective.wire_bytes,
    )
    assert carried == expected


def test_slice_of_a_big_storage_counts_as_the_slice(world: World) -> None:
    big = torch.ones(1024 * 1024)
    with trace() as t:
        dist.all_reduce(big[:8])
    assert (only(t).input_bytes, only(t).output_bytes) == (32, 32)


def test_expanded_tensor_counts_its_elements(world: World) -> None:
    with trace() as t:
        torch.ops._c10d_functional.all_reduce(
            torch.ones(1).expand(8), "sum", dist.group.WORLD.group_name
        )
    assert only(t).input_bytes == 32


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        (torch.float64, 64),
        (torch.float32, 32),
        (torch.bfloat16, 16),
        (torch.int64, 64),
        (torch.uint8, 8),
        (torch.bool, 8),
        (torch.complex64, 64),
        (torch.float8_e4m3fn, 8),
    ],
)
def test_bytes_follow_the_dtype(world: World, dtype: torch.dtype, num_bytes: int) -> None:
    with trace() as t:
        torch.ops.c10d.broadcast_(
            [torch.zeros(8, dtype=dtype)], dist.group.WORLD.boxed(), 0, 0, True, -1
        )
    assert only(t).dtype == str(dtype).removeprefix("torch.")
    assert only(t).input_bytes == num_bytes


def test_scalar_and_empty_tensors_are_recorded(world: World) -> None:
    with trace() as t:
        dist.all_reduce(torch.tensor(1.0))
        dist.all_reduce(torch.ones(0))
    assert [call.input_bytes for call in t.recording.collectives] == [4, 0]
    assert [call.wire_bytes for call in t.recording.collectives] == [6, 0]


def test_uneven_exchange_brings_in_what_the_others_send() -> None:
    with simulate(mesh={"ep": 4}) as world, trace() as t:
        received = funcol.all_to_all_single(
            torch.ones(5, 3), [2, 1, 0, 3], [2, 0, 0, 3], world.mesh.get_group()
        )
        funcol.wait_tensor(received)
    (exchange,) = t.recording.collectives
    assert (exchange.input_bytes, exchange.output_bytes) == (5 * 3 * 4, 6 * 3 * 4)
    assert exchange.wire_bytes == 3 * 3 * 4


def test_uneven_exchange_sends_as_much_as_a_list_as_with_splits() -> None:
    with simulate({"dp": 4}), trace() as t:
        sizes = [100, 1, 1, 1]
        dist.all_to_all([torch.ones(n) for n in sizes], [torch.ones(n) for n in sizes])
        dist.all_to_all_single(torch.ones(103), torch.ones(103), sizes, sizes)
    assert [call.wire_bytes for call in t.recording.collectives] == [12, 12]


def test_sparse_tensor_counts_what_it_holds() -> None:
    sparse = torch.eye(100_000, 8).to_sparse()
    with simulate({"dp": 4}), trace() as t:
        dist.all_reduce(sparse)
    (call,) = t.recording.collectives
    assert call.input_bytes == 8 * 4 + 2 * 8 * 8  # values, and two indices of each
