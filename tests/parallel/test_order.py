"""Ranks that would wait for each other are found before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardscope.errors import ParallelError
from shardscope.parallel import Colwise, Rowwise, Shard
from shardscope.parallel import order as order_module
from shardscope.parallel.layouts import Seat
from shardscope.parallel.order import check_order, compare_ranks, ranks_alike
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.rules import book
from shardscope.parallel.rules.local import Local
from shardscope.parallel.talk import Said, listen
from shardscope.parallel.transform import parallelize
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


def said_by(program: ParallelProgram) -> dict[int, Sequence[Said]]:
    mesh = program.mesh
    return {mesh.rank_at(seat): listen(program.flow, seat) for seat in mesh.seats}


def test_ranks_that_say_the_same_pass() -> None:
    program = make("dp=2,tp=2", hidden=7)
    compare_ranks(said_by(program), program.mesh)


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
def test_a_rank_that_says_something_else_is_named(change: dict[str, object], words: str) -> None:
    program = make()
    said = said_by(program)
    said[1] = [replace(said[1][0], **change)]  # type: ignore[arg-type]
    with pytest.raises(ParallelError, match=words) as caught:
        compare_ranks(said, program.mesh)
    text = str(caught.value)
    assert (
        "ranks 0 and 1 would issue different collectives at position 0 (down, test_order.py:"
    ) in text
    assert "rank 0 issues all_reduce (sum) of float32[8, 4] along tp" in text


def test_a_rank_that_says_nothing_is_named() -> None:
    program = make()
    said = said_by(program)
    said[0] = []
    with pytest.raises(ParallelError, match="rank 0 issues none, rank 1 all_reduce"):
        compare_ranks(said, program.mesh)


def test_the_order_between_groups_counts_too() -> None:
    program = make("dp=2,tp=2")
    said = said_by(program)
    first = said[0][0]
    other = replace(first, axis=0)
    said = {rank: [first, other] for rank in said}
    said[3] = [other, first]
    with pytest.raises(ParallelError, match=r"ranks (1|2) and 3"):
        compare_ranks(said, program.mesh)


def test_shapes_may_differ_between_groups_but_not_within() -> None:
    program = make("dp=2,tp=2", num_rows=6)
    said = said_by(program)
    taller = {rank: [replace(one, shape=(3 + rank // 2, 4)) for one in said[rank]] for rank in said}
    compare_ranks(taller, program.mesh)
    wider = {rank: [replace(one, shape=(3 + rank % 2, 4)) for one in said[rank]] for rank in said}
    with pytest.raises(ParallelError, match=r"float32\[3, 4\] along tp.*float32\[4, 4\] along tp"):
        compare_ranks(wider, program.mesh)


def test_a_program_whose_layouts_do_not_fit_is_refused() -> None:
    program = make(hidden=8)
    move = program.moves[0]
    # As if along tp the value were cut by someone who forgot that uneven pieces must be padded.
    move.value.shape = (9, 4)
    move.value.placements[0] = Shard(0)
    with pytest.raises(ParallelError, match=r"float32\[5, 4\] along tp.*float32\[4, 4\] along tp"):
        check_order(program.flow, program.mesh)


def test_parallelize_checks_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen_wrongly(flow: object, seat: Seat, **options: object) -> Sequence[Said]:
        said = listen(flow, seat, **options)  # type: ignore[arg-type]
        return said if seat.coordinates == (0,) else said[:-1]

    monkeypatch.setattr(order_module, "listen", listen_wrongly)
    with pytest.raises(ParallelError, match="rank 1 none"):
        make()


def test_ranks_that_hold_the_same_shapes_are_alike() -> None:
    even, uneven = make("dp=2,tp=2"), make("dp=2,tp=2", hidden=7)
    assert ranks_alike(even.flow, even.mesh) == [(0, 1, 2, 3)]
    assert ranks_alike(uneven.flow, uneven.mesh) == [(0, 2), (1, 3)]


def test_of_a_thousand_ranks_only_those_that_differ_are_listened_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Seat] = []

    def count(flow: object, seat: Seat, **options: object) -> Sequence[Said]:
        heard.append(seat)
        return listen(flow, seat, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(order_module, "listen", count)
    make("dp=256,tp=4", hidden=6, num_rows=256)
    # Of six columns the four ranks hold 2, 2, 2 and none.
    assert [seat.coordinates for seat in heard] == [(0, 0), (0, 3)]


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
    backward = [one.cause for one in program.collectives if one.phase is Phase.BACKWARD]
    assert backward == ["gradient of aten.mul's result, which the program uses sharded"]


def test_a_rank_that_leaves_out_an_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.select_scatter.default

    def spell(local: Local) -> object:
        if local.seat.coordinates == (1,):
            return local.pen.write(torch.ops.aten.clone.default, local["self"])
        return local.repeat()

    monkeypatch.setitem(book.SPELLERS, op, spell)
    with pytest.raises(
        ParallelError, match="ranks 0 and 1 would issue different collectives in the backward pass"
    ):
        train_overwritten()
