"""Object collectives in a simulated world: nothing arrives, so ranks keep what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from shardscope import World, simulate, trace

THING = {"step": 3, "names": ["a", "b"]}


def gather_all() -> Any:
    held: list[Any] = [None] * 4
    dist.all_gather_object(held, THING)
    return held


def gather_on_the_root() -> Any:
    held: list[Any] = [None] * 4
    dist.gather_object(THING, held, dst=0)
    return held


def gather_elsewhere() -> Any:
    dist.gather_object(THING, dst=1)


def broadcast_from_here() -> Any:
    held = [THING, "more"]
    dist.broadcast_object_list(held, src=0)
    return held


def broadcast_from_elsewhere() -> Any:
    held = [None, None]
    dist.broadcast_object_list(held, src=1)
    return held


def scatter_from_here() -> Any:
    held: list[Any] = [None]
    dist.scatter_object_list(held, [THING, "b", "c", "d"], src=0)
    return held


def scatter_from_elsewhere() -> Any:
    held = ["kept"]
    dist.scatter_object_list(held, [None] * 4, src=1)  # as in torch's own example
    return held


def send() -> Any:
    return dist.send_object_list([THING], dst=1)


def receive() -> Any:
    held = ["kept"]
    sender = dist.recv_object_list(held, src=2)
    return sender, held


@pytest.mark.parametrize(
    ("call", "result", "kinds"),
    [
        (gather_all, [THING] * 4, ["all_gather", "all_gather"]),
        (gather_on_the_root, [THING] * 4, ["all_gather", "gather"]),
        (gather_elsewhere, None, ["all_gather", "gather"]),
        (broadcast_from_here, [THING, "more"], ["broadcast", "broadcast"]),
        (broadcast_from_elsewhere, [None, None], ["broadcast", "broadcast"]),
        (scatter_from_here, [THING], ["broadcast", "scatter", "scatter"]),
        (scatter_from_elsewhere, ["kept"], ["broadcast", "scatter", "scatter"]),
        (send, None, ["send", "send"]),
        (receive, (2, ["kept"]), ["recv", "recv"]),
    ],
)
def test_objects_travel_as_sizes_then_bytes(
    world: World, call: Callable[[], Any], result: Any, kinds: list[str]
) -> None:
    with trace() as t:
        assert call() == result
    collectives = t.recording.collectives
    assert [str(c.kind) for c in collectives] == kinds
    assert [c.dtype for c in collectives][:2] == ["int64", "uint8"]
    assert t.recording.gaps == ()


def test_each_rank_of_a_root_gets_its_own_piece() -> None:
    pieces = []
    for rank in range(4):
        with simulate(mesh={"dp": 4}, rank=rank):
            held: list[Any] = [None]
            dist.scatter_object_list(held, ["a", "b", "c", "d"], src=rank)
            pieces += held
    assert pieces == ["a", "b", "c", "d"]


def test_a_sub_groups_ranks_are_translated() -> None:
    with simulate(mesh={"dp": 4}, rank=3), trace() as t:
        pair = dist.new_group([1, 3])
        held: list[Any] = [None, None]
        dist.all_gather_object(held, "here", group=pair)
        received = ["kept"]
        assert dist.recv_object_list(received, src=1, group=pair) == 1
        assert dist.recv_object_list(received, group=pair, group_src=0) == 1
    assert held == ["here", "here"]
    assert {c.peer for c in t.recording.collectives if c.peer is not None} == {1}


def test_rank_0_is_the_root_where_none_is_named() -> None:
    with simulate(mesh={"dp": 4}, rank=0), trace() as t:
        held: list[Any] = [None]
        dist.scatter_object_list(held, ["a", "b", "c", "d"])
        dist.broadcast_object_list(held)
        dist.gather_object("x", [None] * 4)
    assert held == ["a"]
    assert {c.peer for c in t.recording.collectives} == {0, None}


def test_a_root_without_pieces_gets_torchs_own_error() -> None:
    with (
        simulate(mesh={"dp": 4}, rank=0),
        pytest.raises(ValueError, match="must be specified on source rank"),
    ):
        dist.scatter_object_list([None], None, src=0)


def test_a_rank_outside_the_group_takes_no_part() -> None:
    with simulate(mesh={"dp": 4}, rank=0), trace() as t:
        others = dist.new_group([1, 2])
        with pytest.warns(UserWarning, match="does not belong to the given group"):
            dist.broadcast_object_list(["x"], src=1, group=others)
    assert t.recording.collectives == ()
