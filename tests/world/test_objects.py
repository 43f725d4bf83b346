"""Object collectives in a simulated world: nothing arrives, so ranks keep what they hold."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import broadcast_object_list as imported_by_name

from shardscope import World, simulate, trace
from shardscope._torch.collectives.objects import replace_body
from shardscope.errors import WorldError

THING = {"step": 3, "names": ["a", "b"]}


def gather_all() -> Any:
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, THING)
    return objects


def gather_on_the_root() -> Any:
    objects: list[Any] = [None] * 4
    dist.gather_object(THING, objects, dst=0)
    return objects


def gather_elsewhere() -> Any:
    dist.gather_object(THING, dst=1)


def broadcast_from_here() -> Any:
    objects = [THING, "more"]
    dist.broadcast_object_list(objects, src=0)
    return objects


def broadcast_from_elsewhere() -> Any:
    objects = [None, None]
    dist.broadcast_object_list(objects, src=1)
    return objects


def scatter_from_here() -> Any:
    objects: list[Any] = [None]
    dist.scatter_object_list(objects, [THING, "b", "c", "d"], src=0)
    return objects


def scatter_from_elsewhere() -> Any:
    objects = ["kept"]
    dist.scatter_object_list(objects, [None] * 4, src=1)  # as in torch's own example
    return objects


def send() -> Any:
    return dist.send_object_list([THING], dst=1)


def receive() -> Any:
    objects = ["kept"]
    sender = dist.recv_object_list(objects, src=2)
    return sender, objects


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


def test_each_rank_gets_its_own_object_from_the_root() -> None:
    results = []
    for rank in range(4):
        with simulate(mesh={"dp": 4}, rank=rank):
            objects: list[Any] = [None]
            dist.scatter_object_list(objects, ["a", "b", "c", "d"], src=rank)
            results += objects
    assert results == ["a", "b", "c", "d"]


def test_a_sub_groups_ranks_are_translated() -> None:
    with simulate(mesh={"dp": 4}, rank=3), trace() as t:
        pair = dist.new_group([1, 3])
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, "here", group=pair)
        received = ["kept"]
        assert dist.recv_object_list(received, src=1, group=pair) == 1
        assert dist.recv_object_list(received, group=pair, group_src=0) == 1
    assert objects == ["here", "here"]
    assert {c.peer for c in t.recording.collectives if c.peer is not None} == {1}


def test_rank_0_is_the_root_where_none_is_named() -> None:
    with simulate(mesh={"dp": 4}, rank=0), trace() as t:
        objects: list[Any] = [None]
        dist.scatter_object_list(objects, ["a", "b", "c", "d"])
        dist.broadcast_object_list(objects)
        dist.gather_object("x", [None] * 4)
    assert objects == ["a"]
    assert {c.peer for c in t.recording.collectives} == {0, None}


def test_a_root_without_objects_gets_an_error() -> None:
    with (
        simulate(mesh={"dp": 4}, rank=0),
        pytest.raises(ValueError, match="must be given on the source rank"),
    ):
        dist.scatter_object_list([None], None, src=0)


def test_a_rank_outside_the_group_takes_no_part() -> None:
    with simulate(mesh={"dp": 4}, rank=0), trace() as t:
        other_group = dist.new_group([1, 2])
        with pytest.warns(UserWarning, match="does not belong to the given group"):
            dist.broadcast_object_list(["x"], src=1, group=other_group)
    assert t.recording.collectives == ()


def test_functions_imported_by_name_are_simulated_too() -> None:
    objects = ["x"]
    with simulate(mesh={"dp": 4}, rank=2), trace() as t:
        imported_by_name(objects, src=0)
    assert objects == ["x"]
    assert [call.kind for call in t.recording.collectives] == ["broadcast", "broadcast"]


def test_a_rank_outside_the_group_keeps_its_list() -> None:
    gathered = ["mine", "too"]
    with simulate(mesh={"dp": 4}, rank=0):
        other_group = dist.new_group([1, 2])
        with pytest.warns(UserWarning, match="does not belong to the given group"):
            dist.all_gather_object(gathered, "x", group=other_group)
    assert gathered == ["mine", "too"]


def test_objects_that_arrive_are_copies() -> None:
    sent = {"a": [1]}
    gathered: list[Any] = [None] * 3
    with simulate(mesh={"dp": 2}):
        dist.all_gather_object(gathered, sent)
    assert gathered == [sent, sent, None]
    assert gathered[0] is not sent
    assert gathered[0] is not gathered[1]


def test_lists_that_are_too_short_are_errors_as_for_real() -> None:
    with simulate(mesh={"dp": 2}):
        with pytest.raises(IndexError):
            dist.gather_object("x", [None], dst=0)
        with pytest.raises(ValueError, match="room for one object"):
            dist.scatter_object_list([], ["a", "b"], src=0)


def test_roots_and_peers_are_read_as_torch_reads_them() -> None:
    with simulate(mesh={"dp": 2}):
        with pytest.raises(ValueError, match="both"):
            dist.broadcast_object_list(["x"], src=0, group_src=1)
        with pytest.raises(ValueError, match="Must specify"):
            dist.recv_object_list([None])
        with pytest.raises(ValueError, match="same as"):
            dist.recv_object_list([None], src=0)


HAS_WEIGHTS_ONLY = "weights_only" in signature(dist.all_gather_object).parameters


@pytest.mark.skipif(
    not HAS_WEIGHTS_ONLY, reason=f"torch {torch.__version__} has no object collectives of weights"
)
def test_weights_are_serialized_as_torch_save_writes_them() -> None:
    weights = {"bias": torch.ones(8)}
    content = io.BytesIO()
    torch.save(weights, content)
    objects: list[Any] = [None] * 4
    with simulate(mesh={"dp": 4}), trace() as t:
        dist.all_gather_object(objects, weights, weights_only=True)  # type: ignore[call-arg]
        dist.gather_object(weights, objects, dst=0, weights_only=True)  # type: ignore[call-arg]
        dist.broadcast_object_list([weights], src=0, weights_only=True)  # type: ignore[call-arg]
        dist.scatter_object_list(objects, [weights] * 4, src=0, weights_only=True)  # type: ignore[call-arg]
        dist.send_object_list([weights], dst=1, weights_only=True)  # type: ignore[call-arg]
        dist.recv_object_list([weights], src=1, weights_only=True)  # type: ignore[call-arg]
    assert all(torch.equal(received["bias"], weights["bias"]) for received in objects)
    payloads = [c for c in t.recording.collectives if c.dtype == "uint8"]
    sizes = {c.output_bytes if c.kind == "recv" else c.input_bytes for c in payloads}
    assert len(payloads) == 6
    assert content.getbuffer().nbytes in sizes


@pytest.mark.skipif(
    not HAS_WEIGHTS_ONLY, reason=f"torch {torch.__version__} has no object collectives of weights"
)
def test_weights_only_rejects_other_objects(world: World) -> None:
    objects: list[Any] = [None] * 4
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        dist.all_gather_object(objects, signature, weights_only=True)  # type: ignore[call-arg]


def test_an_argument_that_torch_does_not_take_is_refused_as_for_real(world: World) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'haste'"):
        dist.all_gather_object([None] * 4, THING, haste=True)  # type: ignore[call-arg]


def test_an_argument_of_a_newer_torch_is_a_sentence() -> None:
    with replace_body("send_object_list", lambda object_list, dst: None):
        dist.send_object_list([THING], dst=1, use_batch=False)
        with pytest.raises(WorldError, match="send_object_list was called with use_batch=True, "):
            dist.send_object_list([THING], dst=1, use_batch=True)
