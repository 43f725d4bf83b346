"""Which rank holds which slice: always what torch itself gives that rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardscope import simulate, visualize_sharding
from shardscope.errors import AuditError
from shardscope.record import Slice, TensorLayout, expand_ranks


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def held_by(layout: TensorLayout, rank: int) -> Slice:
    (found,) = [piece for piece in layout.slices if rank in expand_ranks(piece.ranks)]
    return found


def take(whole: torch.Tensor, part: Slice) -> torch.Tensor:
    for dim, stretches in enumerate(part.stretches):
        indices = [index for start, stop in stretches for index in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long))
    return whole


CASES = [
    ({"a": 4}, (8,), [Shard(0)]),
    ({"a": 4}, (10, 3), [Shard(0)]),
    ({"a": 4}, (2, 5), [Shard(1)]),
    ({"a": 8}, (3, 2), [Shard(0)]),
    ({"a": 2, "b": 3}, (7, 5), [Shard(0), Shard(1)]),
    ({"a": 2, "b": 3}, (7, 5), [Shard(1), Shard(1)]),
    ({"a": 2, "b": 2}, (5, 4), [Replicate(), Shard(0)]),
    ({"a": 2, "b": 2}, (5, 4), [Replicate(), Replicate()]),
    ({"a": 2, "b": 2, "c": 2}, (4, 6, 5), [Shard(2), Shard(0), Shard(1)]),
    ({"a": 2, "b": 2, "c": 2}, (9, 2, 2, 3), [Shard(0), Replicate(), Shard(3)]),
    ({"a": 2}, (0, 4), [Shard(0)]),
]


@pytest.mark.parametrize(("mesh", "shape", "placements"), CASES)
def test_each_rank_holds_what_torch_gives_it(
    mesh: dict[str, int], shape: tuple[int, ...], placements: list[Placement]
) -> None:
    whole = numbered(*shape)
    for rank in range(math.prod(mesh.values())):
        with simulate(mesh, rank=rank) as world:
            tensor = distribute_tensor(whole, world.mesh, placements, src_data_rank=None)
            layout = visualize_sharding(tensor)
            expected = tensor.to_local()
        assert take(whole, held_by(layout, rank)).equal(expected)


@pytest.mark.parametrize("num_rows", [8, 10, 16, 3, 7])
@pytest.mark.parametrize("num_dp", [2, 3])
@pytest.mark.parametrize("num_tp", [2, 4])
def test_fsdp_on_top_of_tensor_parallelism_is_what_torch_makes_of_it(
    num_rows: int, num_dp: int, num_tp: int
) -> None:
    whole = numbered(num_rows, 2)
    for rank in range(num_dp * num_tp):
        with simulate({"dp": num_dp, "tp": num_tp}, rank=rank) as world:
            model = nn.Linear(2, num_rows, bias=False)
            model.weight.data.copy_(whole)
            parallelize_module(model, world.mesh["tp"], ColwiseParallel(), src_data_rank=None)
            fully_shard(model, mesh=world.mesh["dp"])
            assert isinstance(model.weight, DTensor)
            layout = visualize_sharding(model.weight)
            expected = model.weight.to_local()
        assert take(whole, held_by(layout, rank)).equal(expected)


def test_replicas_are_listed_together() -> None:
    with simulate({"dp": 3, "tp": 2}) as world:
        tensor = distribute_tensor(numbered(4), world.mesh, [Replicate(), Shard(0)])
        layout = visualize_sharding(tensor, name="bias")
    assert (layout.name, layout.shape, layout.placements) == (
        "bias",
        (4,),
        ("Replicate", "Shard(0)"),
    )
    assert [list(expand_ranks(piece.ranks)) for piece in layout.slices] == [[0, 2, 4], [1, 3, 5]]
    assert [piece.stretches for piece in layout.slices] == [(((0, 2),),), (((2, 4),),)]


def test_partial_sums_are_not_sliced() -> None:
    with simulate({"tp": 2}) as world:
        tensor = DTensor.from_local(numbered(4), world.mesh, [Partial()])
        layout = visualize_sharding(tensor)
    assert layout.placements == ("Partial(sum)",)
    assert [list(expand_ranks(piece.ranks)) for piece in layout.slices] == [[0, 1]]


def test_sixteen_thousand_ranks_take_no_longer_than_their_slices() -> None:
    with simulate({"dp": 2048, "tp": 8}) as world, torch.device("meta"):
        model = nn.Linear(64, 64, bias=False)
        parallelize_module(model, world.mesh["tp"], RowwiseParallel())
        assert isinstance(model.weight, DTensor)
        world.materialize(model)
        layout = visualize_sharding(model.weight)
    assert len(layout.slices) == 8


def test_a_number_has_one_slice() -> None:
    with simulate({"tp": 2}) as world:
        layout = visualize_sharding(distribute_tensor(torch.ones(()), world.mesh, [Replicate()]))
    assert [piece.stretches for piece in layout.slices] == [()]


@pytest.mark.parametrize("value", [torch.ones(2), 3, None])
def test_what_is_no_dtensor_is_refused_with_a_sentence(value: object) -> None:
    with pytest.raises(AuditError, match=r"visualize_sharding\(\) got .*Give it a DTensor"):
        visualize_sharding(value)  # type: ignore[arg-type]
