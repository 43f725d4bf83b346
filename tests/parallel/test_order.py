"""Ranks whose collective schedules differ are found before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardscope.errors import ParallelError
from shardscope.parallel import Colwise, Rowwise, Shard
from shardscope.parallel.api import parallelize
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes import schedule as order_module
from shardscope.parallel.passes.schedule import (
    ScheduledCollective,
    check_order,
    compare_ranks,
    group_ranks_by_shapes,
    trace_collectives,
)
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.sharding_rules import registry
from shardscope.parallel.sharding_rules.context import LoweringContext
from shardscope.record import CollectiveKind, Phase

PAIR = {"up": Colwise(), "down": Rowwise()}


class Pair(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).cumsum(-1)


def make(mesh: str = "tp=2", *, hidden: int = 8, num_rows: int = 8) -> ParallelProgram:
    exported = torch.export.export(Pair(hidden), (torch.randn(num_rows, 4),))
    inputs = {"x": {"dp": Shard(0)}} if "dp" in mesh else None
    return parallelize(exported, mesh, PAIR, inputs=inputs, verify=False)


def schedules_of(program: ParallelProgram) -> dict[int, Sequence[ScheduledCollective]]:
    mesh = program.mesh
    return {
        mesh.rank_at(coordinate): trace_collectives(program.graph, coordinate)
        for coordinate in mesh.coordinates
    }


def test_equal_schedules_pass() -> None:
    program = make("dp=2,tp=2", hidden=7)
    compare_ranks(schedules_of(program), program.mesh)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": CollectiveKind.ALL_GATHER}, r"rank 1 all_gather \(sum\) of float32\[8, 4\]"),
        ({"shape": (8, 3)}, r"rank 1 all_reduce \(sum\) of float32\[8, 3\] along tp"),
        ({"dtype": torch.float64}, r"rank 1 all_reduce \(sum\) of float64\[8, 4\] along tp"),
        ({"reduction": "max"}, r"rank 1 all_reduce \(max\) of float32\[8, 4\] along tp"),
    ],
    ids=["kind", "shape", "dtype", "reduction"],
)
def test_a_rank_with_another_collective_is_named(change: dict[str, object], words: str) -> None:
    program = make()
    schedules = schedules_of(program)
    schedules[1] = [replace(schedules[1][0], **change)]  # type: ignore[arg-type]
    with pytest.raises(ParallelError, match=words) as caught:
        compare_ranks(schedules, program.mesh)
    text = str(caught.value)
    assert (
        "ranks 0 and 1 would issue different collectives at position 0 (down, test_order.py:"
    ) in text
    assert "rank 0 issues all_reduce (sum) of float32[8, 4] along tp" in text


def test_a_rank_without_collectives_is_named() -> None:
    program = make()
    schedules = schedules_of(program)
    schedules[0] = []
    with pytest.raises(ParallelError, match="rank 0 issues none, rank 1 all_reduce"):
        compare_ranks(schedules, program.mesh)


def test_the_order_between_groups_counts_too() -> None:
    program = make("dp=2,tp=2")
    schedules = schedules_of(program)
    first = schedules[0][0]
    second = replace(first, axis=0)
    schedules = {rank: [first, second] for rank in schedules}
    schedules[3] = [second, first]
    with pytest.raises(ParallelError, match=r"ranks (1|2) and 3"):
        compare_ranks(schedules, program.mesh)


def test_shapes_may_differ_between_groups_but_not_within() -> None:
    program = make("dp=2,tp=2", num_rows=6)
    schedules = schedules_of(program)
    taller = {
        rank: [replace(collective, shape=(3 + rank // 2, 4)) for collective in schedules[rank]]
        for rank in schedules
    }
    compare_ranks(taller, program.mesh)
    wider = {
        rank: [replace(collective, shape=(3 + rank % 2, 4)) for collective in schedules[rank]]
        for rank in schedules
    }
    with pytest.raises(ParallelError, match=r"float32\[3, 4\] along tp.*float32\[4, 4\] along tp"):
        compare_ranks(wider, program.mesh)


def test_a_program_whose_layouts_do_not_fit_is_refused() -> None:
    program = make(hidden=8)
    reshard = program.moves[0]
    # As if the value were sharded unevenly along tp without padding.
    reshard.value.shape = (9, 4)
    reshard.value.placements[0] = Shard(0)
    with pytest.raises(ParallelError, match=r"float32\[5, 4\] along tp.*float32\[4, 4\] along tp"):
        check_order(program.graph, program.mesh)


def test_parallelize_checks_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_last_collective(
        graph: object, coordinate: MeshCoordinate, **options: object
    ) -> Sequence[ScheduledCollective]:
        schedule = trace_collectives(graph, coordinate, **options)  # type: ignore[arg-type]
        return schedule if coordinate.coordinates == (0,) else schedule[:-1]

    monkeypatch.setattr(order_module, "trace_collectives", drop_last_collective)
    with pytest.raises(ParallelError, match="rank 1 none"):
        make()


def test_ranks_are_grouped_by_shapes() -> None:
    even, uneven = make("dp=2,tp=2"), make("dp=2,tp=2", hidden=7)
    assert group_ranks_by_shapes(even.graph, even.mesh) == [(0, 1, 2, 3)]
    assert group_ranks_by_shapes(uneven.graph, uneven.mesh) == [(0, 2), (1, 3)]


def test_of_a_thousand_ranks_one_per_group_of_shapes_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[MeshCoordinate] = []

    def count(
        graph: object, coordinate: MeshCoordinate, **options: object
    ) -> Sequence[ScheduledCollective]:
        traced.append(coordinate)
        return trace_collectives(graph, coordinate, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(order_module, "trace_collectives", count)
    make("dp=256,tp=4", hidden=6, num_rows=256)
    # Of six columns the four ranks hold 2, 2, 2 and none.
    assert [coordinate.coordinates for coordinate in traced] == [(0, 0), (0, 3)]


class Overwritten(nn.Module):
    """The first row, which the first rank has, is replaced by something trained."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 3))
        self.row = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.select_scatter(self.rows * x, self.row * 2, 0, 0)
        return rows.pow(2).sum()


def train_overwritten() -> ParallelProgram:
    exported = torch.export.export(Overwritten(), (torch.randn(4, 3),))
    return parallelize(exported, "tp=2", {"rows": Shard(0)}, training=True)


def test_a_rank_that_writes_nothing_still_takes_part_in_the_gradient() -> None:
    program = train_overwritten()
    assert program.verdicts
    backward = [
        collective.cause for collective in program.collectives if collective.phase is Phase.BACKWARD
    ]
    assert backward == ["gradient of aten.mul's result, which the program uses sharded"]


def test_a_rank_that_leaves_out_an_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.select_scatter.default

    def format_placement(local: LoweringContext) -> object:
        if local.coordinate.coordinates == (1,):
            return local.builder.write(torch.ops.aten.clone.default, local["self"])
        return local.repeat()

    monkeypatch.setitem(registry.LOWERINGS, op, format_placement)
    with pytest.raises(
        ParallelError, match="ranks 0 and 1 would issue different collectives in the backward pass"
    ):
        train_overwritten()
