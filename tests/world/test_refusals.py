"""Calls that torch's fake group accepts and a real one refuses are errors."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import empty, ones
from torch.distributed.distributed_c10d import _coalescing_manager

from older_torch import TORCH
from shardscope import World, simulate, trace
from shardscope.errors import CollectiveError

NUM_RANKS = 4
INT = torch.int32

functional = torch.ops._c10d_functional

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

Call = Callable[[], object]


def empties(size: int, number: int = NUM_RANKS) -> list[torch.Tensor]:
    return [empty(size) for _ in range(number)]


def default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def name() -> str:
    return default_group().group_name


def coalesced(call: Call) -> Call:
    def issue() -> None:
        with _coalescing_manager():
            call()

    return issue


# A call, the op as the message names it, and the fact that it states.
PEERS: dict[str, tuple[Call, str, str]] = {
    "broadcast": (
        lambda: dist.broadcast(ones(8), src=77),
        "c10d.broadcast_",
        "rank 77 is named as root",
    ),
    "broadcast from a negative rank": (
        lambda: dist.broadcast(ones(8), src=-1),
        "c10d.broadcast_",
        "rank -1 is named as root",
    ),
    "broadcast by rank in the group": (
        lambda: dist.broadcast(ones(8), group_src=9, group=default_group()),
        "c10d.broadcast_",
        "rank 9 is named as root",
    ),
    "reduce": (lambda: dist.reduce(ones(8), dst=77), "c10d.reduce_", "rank 77 is named as root"),
    "gather": (lambda: dist.gather(ones(8), dst=77), "c10d.gather_", "rank 77 is named as root"),
    "scatter": (lambda: dist.scatter(ones(8), src=77), "c10d.scatter_", "rank 77 is named as root"),
    "send": (lambda: dist.send(ones(8), dst=99), "c10d.send", "rank 99 is named as receiver"),
    "isend": (lambda: dist.isend(ones(8), dst=99), "c10d.send", "rank 99 is named as receiver"),
    "recv": (lambda: dist.recv(empty(8), src=99), "c10d.recv_", "rank 99 is named as sender"),
    "batch_isend_irecv": (
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, empty(8), 99)]),
        "c10d.recv_",
        "rank 99 is named as sender",
    ),
    "functional broadcast": (
        lambda: funcol.broadcast(ones(8), 77, default_group()),
        "_c10d_functional.broadcast",
        "rank 77 is named as root",
    ),
    "functional in-place broadcast": (
        lambda: functional.broadcast_(ones(8), 77, name()),
        "_c10d_functional.broadcast_",
        "rank 77 is named as root",
    ),
}

DTYPES: dict[str, tuple[Call, str, str]] = {
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(empty(32, dtype=INT), ones(8)),
        "c10d._allgather_base_",
        "its tensors mix float32 and int32",
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(empty(8, dtype=INT), ones(32)),
        "c10d._reduce_scatter_base_",
        "its tensors mix float32 and int32",
    ),
    "one of two coalesced gathers": (
        coalesced(
            lambda: (
                dist.all_gather_into_tensor(empty(32), ones(8)),
                dist.all_gather_into_tensor(empty(32, dtype=INT), ones(8)),
            )
        ),
        "c10d.allgather_into_tensor_coalesced_",
        "its tensors mix float32 and int32",
    ),
    "functional gather into a given tensor": (
        lambda: functional.all_gather_into_tensor_out(
            ones(8), NUM_RANKS, name(), out=empty(32, dtype=INT)
        ),
        "_c10d_functional.all_gather_into_tensor_out",
        "its tensors mix float32 and int32",
    ),
}

GATHERED_SIZES: dict[str, tuple[Call, str, str]] = {
    "all_gather list": (
        lambda: dist.all_gather(empties(8, 3), ones(8)),
        "c10d.allgather_",
        "its output list has 3 tensors for 4 ranks",
    ),
    "all_gather piece": (
        lambda: dist.all_gather(empties(7), ones(8)),
        "c10d.allgather_",
        "this rank's tensor in the output list has 7 elements and the tensor it stands for has 8",
    ),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(empty(31), ones(8)),
        "c10d._allgather_base_",
        "its output has 31 elements, but 4 ranks × 8 of the input make 32",
    ),
    "all_gather_coalesced list": (
        lambda: dist.all_gather_coalesced(
            [[empty(8), empty(4)] for _ in range(3)], [ones(8), ones(4)]
        ),
        "c10d.allgather_coalesced_",
        "its output list has 3 tensors for 4 ranks",
    ),
    "all_gather_coalesced piece": (
        lambda: dist.all_gather_coalesced(
            [[empty(8), empty(3)] for _ in range(4)], [ones(8), ones(4)]
        ),
        "c10d.allgather_coalesced_",
        "this rank's tensor in the output list has 3 elements and the tensor it stands for has 4",
    ),
    "coalesced all_gather": (
        coalesced(lambda: dist.all_gather_into_tensor(empty(31), ones(8))),
        "c10d.allgather_into_tensor_coalesced_",
        "its output has 31 elements, but 4 ranks × 8 of the input make 32",
    ),
    "gather list": (
        lambda: dist.gather(ones(8), empties(8, 3), dst=0),
        "c10d.gather_",
        "its output list has 3 tensors for 4 ranks",
    ),
    "gather piece": (
        lambda: dist.gather(ones(8), empties(7), dst=0),
        "c10d.gather_",
        "this rank's tensor in the output list has 7 elements and the tensor it stands for has 8",
    ),
    "functional gather into a given tensor": (
        lambda: functional.all_gather_into_tensor_out(ones(8), NUM_RANKS, name(), out=empty(31)),
        "_c10d_functional.all_gather_into_tensor_out",
        "its output has 31 elements, but 4 ranks × 8 of the input make 32",
    ),
}

SCATTERED_SIZES: dict[str, tuple[Call, str, str]] = {
    "reduce_scatter list": (
        lambda: dist.reduce_scatter(empty(8), empties(8, 3)),
        "c10d.reduce_scatter_",
        "its input list has 3 tensors for 4 ranks",
    ),
    "reduce_scatter piece": (
        lambda: dist.reduce_scatter(empty(8), empties(7)),
        "c10d.reduce_scatter_",
        "this rank's tensor in the input list has 7 elements and the tensor it stands for has 8",
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(empty(7), ones(32)),
        "c10d._reduce_scatter_base_",
        "its input has 32 elements, but 4 ranks × 7 of the output make 28",
    ),
    "coalesced reduce_scatter": (
        coalesced(lambda: dist.reduce_scatter_tensor(empty(8), ones(31))),
        "c10d.reduce_scatter_tensor_coalesced_",
        "its input has 31 elements, but 4 ranks × 8 of the output make 32",
    ),
    "scatter list": (
        lambda: dist.scatter(empty(8), empties(8, 3), src=0),
        "c10d.scatter_",
        "its input list has 3 tensors for 4 ranks",
    ),
    "scatter piece": (
        lambda: dist.scatter(empty(8), empties(7), src=0),
        "c10d.scatter_",
        "this rank's tensor in the input list has 7 elements and the tensor it stands for has 8",
    ),
    "functional reduce_scatter": (
        lambda: functional.reduce_scatter_tensor(ones(7), "sum", NUM_RANKS, name()),
        "_c10d_functional.reduce_scatter_tensor",
        "dim 0 of its input has size 7, which 4 ranks cannot divide evenly",
    ),
    "functional coalesced reduce_scatter": (
        lambda: functional.reduce_scatter_tensor_coalesced(
            [ones(8), ones(7)], "sum", NUM_RANKS, name()
        ),
        "_c10d_functional.reduce_scatter_tensor_coalesced",
        "dim 0 of its input has size 7, which 4 ranks cannot divide evenly",
    ),
    "functional reduce_scatter into a given tensor": (
        lambda: functional.reduce_scatter_tensor_out(
            ones(8), "sum", NUM_RANKS, name(), out=empty(3)
        ),
        "_c10d_functional.reduce_scatter_tensor_out",
        "its input has 8 elements, but 4 ranks × 3 of the output make 12",
    ),
}

# The op that torch's differentiable function calls; since 2.13 it is the plain one.
DIFFERENTIABLE_ALL_TO_ALL = (
    "_c10d_functional.all_to_all_single"
    if TORCH >= (2, 13)
    else "_c10d_functional_autograd.all_to_all_single"
)
EXCHANGED_SIZES: dict[str, tuple[Call, str, str]] = {
    "all_to_all output list": (
        lambda: dist.all_to_all(empties(2, 3), empties(2)),
        "c10d.alltoall_",
        "its output list has 3 tensors for 4 ranks",
    ),
    "all_to_all input list": (
        lambda: dist.all_to_all(empties(2), empties(2, 5)),
        "c10d.alltoall_",
        "its input list has 5 tensors for 4 ranks",
    ),
    "all_to_all own part": (
        lambda: dist.all_to_all(empties(2), empties(3)),
        "c10d.alltoall_",
        "this rank sends itself 3 elements and expects 2 from itself",
    ),
    "all_to_all_single without splits": (
        lambda: dist.all_to_all_single(empty(7), ones(7)),
        "c10d.alltoall_base_",
        "dim 0 of its input has size 7, which 4 ranks cannot divide evenly",
    ),
    "all_to_all_single of two sizes": (
        lambda: dist.all_to_all_single(empty(4), ones(8)),
        "c10d.alltoall_base_",
        "this rank sends itself 2 elements and expects 1 from itself",
    ),
    "all_to_all_single of two widths": (
        lambda: dist.all_to_all_single(empty(4, 3), ones(4, 2)),
        "c10d.alltoall_base_",
        "this rank sends itself 2 elements and expects 3 from itself",
    ),
    "all_to_all_single input sum": (
        lambda: dist.all_to_all_single(empty(8), ones(8), None, [1, 1, 1, 1]),
        "c10d.alltoall_base_",
        "its input split sizes sum to 4, and dim 0 has size 8",
    ),
    "all_to_all_single output sum": (
        lambda: dist.all_to_all_single(empty(8), ones(8), [1, 1, 1, 1], None),
        "c10d.alltoall_base_",
        "its output split sizes sum to 4, and dim 0 has size 8",
    ),
    "all_to_all_single number of splits": (
        lambda: dist.all_to_all_single(empty(8), ones(8), [4, 4], [4, 4]),
        "c10d.alltoall_base_",
        "it has 2 input split sizes for 4 ranks",
    ),
    "all_to_all_single negative split": (
        lambda: dist.all_to_all_single(empty(8), ones(8), [4, 4, -4, 4], [2, 2, 2, 2]),
        "c10d.alltoall_base_",
        "its output split sizes include -4",
    ),
    "all_to_all_single own part": (
        lambda: dist.all_to_all_single(empty(8), ones(8), [1, 1, 1, 5], [2, 2, 2, 2]),
        "c10d.alltoall_base_",
        "this rank sends itself 2 elements and expects 1 from itself",
    ),
    "all_to_all_single of a scalar": (
        lambda: dist.all_to_all_single(empty(()), ones(())),
        "c10d.alltoall_base_",
        "its input has no dims",
    ),
    "functional number of input splits": (
        lambda: funcol.all_to_all_single(ones(8), [4, 4], [4, 4], default_group()),
        "_c10d_functional.all_to_all_single",
        "it has 2 input split sizes for 4 ranks",
    ),
    "functional number of output splits": (
        lambda: funcol.all_to_all_single(ones(8), [4, 4], [2, 2, 2, 2], default_group()),
        "_c10d_functional.all_to_all_single",
        "it has 2 output split sizes for 4 ranks",
    ),
    "functional input sum": (
        lambda: funcol.all_to_all_single(ones(8), [1] * 4, [1] * 4, default_group()),
        "_c10d_functional.all_to_all_single",
        "its input split sizes sum to 4, and dim 0 has size 8",
    ),
    "functional own part": (
        lambda: funcol.all_to_all_single(ones(8), [1, 2, 2, 2], [2] * 4, default_group()),
        "_c10d_functional.all_to_all_single",
        "this rank sends itself 2 elements and expects 1 from itself",
    ),
    "functional with autograd": (
        lambda: funcol.all_to_all_single_autograd(ones(8), [4, 4], [4, 4], default_group()),
        DIFFERENTIABLE_ALL_TO_ALL,
        "it has 2 input split sizes for 4 ranks",
    ),
}


def check_refused(call: Call, op: str, fact: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"{op} in group 'default_pg' (4 ranks): {fact}")
    assert "; a real process group would fail or hang here, so the simulated one stops. " in text
    remedy = text.split("stops. ")[1]
    assert remedy.endswith(".")
    assert len(remedy) > len("Cast it.")


@pytest.mark.parametrize("case", PEERS)
def test_a_root_or_peer_outside_the_group_is_refused(world: World, case: str) -> None:
    check_refused(*PEERS[case])


@pytest.mark.parametrize("case", DTYPES)
def test_tensors_of_two_dtypes_are_refused(world: World, case: str) -> None:
    check_refused(*DTYPES[case])


@pytest.mark.parametrize("case", GATHERED_SIZES)
def test_a_gather_of_wrong_sizes_is_refused(world: World, case: str) -> None:
    check_refused(*GATHERED_SIZES[case])


@pytest.mark.parametrize("case", SCATTERED_SIZES)
def test_a_scatter_of_wrong_sizes_is_refused(world: World, case: str) -> None:
    check_refused(*SCATTERED_SIZES[case])


@pytest.mark.parametrize("case", EXCHANGED_SIZES)
def test_an_exchange_of_wrong_sizes_is_refused(world: World, case: str) -> None:
    check_refused(*EXCHANGED_SIZES[case])


def test_what_is_refused_says_what_to_do(world: World) -> None:
    with pytest.raises(CollectiveError, match="with a sub-group, "):
        dist.send(ones(8), dst=99)
    with pytest.raises(CollectiveError, match=r"Allocate the output with 32 elements\."):
        dist.all_gather_into_tensor(empty(31), ones(8))


def test_a_group_goes_by_the_name_of_its_axis() -> None:
    with simulate(mesh={"dp": 2, "tp": 4}) as world:
        group = world.mesh["tp"].get_group()
        with pytest.raises(
            CollectiveError, match=r"^c10d._allgather_base_ in group 'tp' \(4 ranks"
        ):
            dist.all_gather_into_tensor(empty(31), ones(8), group=group)


def test_a_receive_in_a_group_of_one_is_refused() -> None:
    with (
        simulate(mesh={"dp": 1}),
        pytest.raises(CollectiveError, match="this rank is alone in the group"),
    ):
        dist.recv(empty(8))


def test_a_refused_call_leaves_the_world_usable(world: World) -> None:
    with pytest.raises(CollectiveError):
        dist.broadcast(ones(8), src=77)
    with trace() as t:
        dist.broadcast(ones(8), src=1)
    assert [c.peer for c in t.recording.collectives] == [1]


def test_a_refused_call_logs_no_traceback(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(CollectiveError):
        dist.broadcast(ones(8), src=77)
    assert [record.message for record in caplog.records] == []


def test_nothing_is_refused_outside_a_simulated_world() -> None:
    with simulate(mesh={"dp": 4}):
        pass
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    try:
        assert dist.send(ones(8), dst=99) is None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        (lambda: dist.isend(torch.ones(1), 1), "names itself as receiver"),
        (lambda: dist.irecv(torch.ones(1), 1), "names itself as sender"),
        (lambda: dist.all_gather([], torch.ones(1)), "list has 0 tensors for 4 ranks"),
        (
            lambda: dist.scatter(torch.ones(2), [torch.ones(size) for size in (1, 2, 2, 2)], src=1),
            "from 1 to 2 elements",
        ),
    ],
    ids=["send to itself", "receive from itself", "empty list", "uneven tensors"],
)
def test_what_gloo_refuses_is_refused(call: Callable[[], object], fact: str) -> None:
    with simulate(mesh={"dp": 4}, rank=1), pytest.raises(CollectiveError, match=fact):
        call()


def test_a_batch_may_contain_both_ends_of_a_transfer() -> None:
    with simulate(mesh={"dp": 4}, rank=1), trace() as t:
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(1), 1), dist.P2POp(dist.irecv, torch.ones(1), 1)]
        )
    assert [call.peer for call in t.recording.collectives] == [1, 1]
