"""What is varied of the decisions of ranks, and how many variations one run can try."""

from __future__ import annotations

import itertools

from shardscope.checks.shifts import find_shift
from shardscope.checks.variations import Plan, schedule
from shardscope.launch.decisions import (
    Change,
    ChangeKind,
    Decisions,
    Exchange,
    Pass,
    Site,
    SiteKind,
    find_excess,
)
from shardscope.record import Source

LINE = Source(file="train.py", line=7, function="main", text="")
BATCH = Site(SiteKind.BATCH, "DataLoader of Samples", LINE)
FINITE = Site(SiteKind.VALUE, "item()", Source(file="train.py", line=9, function="main", text=""))


def make_decisions(
    rank: int,
    *,
    data: str = "",
    sharing: tuple[int, ...] | None = None,
    num_steps: int = 6,
    calls: tuple[int, ...] = (),
) -> Decisions:
    """A rank that takes a batch in each step, then reads whether its loss is finite."""
    sharing = (rank,) if sharing is None else sharing
    counts = calls or tuple(range(0, 4 * num_steps, 4))
    passes = []
    for step, count in enumerate(counts):
        passes.append(Pass(0, step, count, step, value=1.0, sources=(f"batch:{data or rank}",)))
        passes.append(Pass(1, step, count + 1, step + 1, 1.0, "bool", sharing or None, ("data",)))
    return Decisions(
        rank=rank,
        sites=(BATCH, FINITE),
        passes=tuple(passes),
        data=(data or f"rank {rank}",),
        random=("seed",),
        num_values=64,
        num_steps=num_steps,
        batches=frozenset((f"batch:{data or rank}",)),
    )


def list_conditions(*decisions: Decisions) -> list[str]:
    plan = Plan({own.rank: own for own in decisions})
    return [variation.condition for variation in plan.list_variations()]


def test_a_value_of_a_ranks_own_data_is_varied_on_it_alone() -> None:
    conditions = list_conditions(make_decisions(0), make_decisions(1))
    assert "item() at train.py:9 is False on rank 1" in conditions
    assert "the batch of rank 1 is empty (train.py:7)" in conditions


def test_a_value_that_all_ranks_share_is_not_varied() -> None:
    conditions = list_conditions(make_decisions(0, sharing=()), make_decisions(1, sharing=()))
    assert not any("item()" in condition for condition in conditions)


def test_ranks_with_the_same_data_see_the_same_change() -> None:
    conditions = list_conditions(make_decisions(0, data="same"), make_decisions(1, data="same"))
    assert "item() at train.py:9 is False on ranks 0-1" in conditions


def test_a_run_tries_variations_in_steps_of_their_own() -> None:
    plan = Plan({rank: make_decisions(rank, num_steps=20) for rank in range(2)})
    chosen, changes = schedule(list(plan.list_variations()), plan)
    assert len(chosen) > 3
    steps = [change.number for change in changes]
    # A batch is taken before its model is called: the value read after it is of the next count.
    assert all(second - first >= 1 for first, second in itertools.pairwise(steps))
    lasting = [variation.is_lasting for variation in chosen]
    assert not any(lasting[:-1])


def test_a_site_that_one_rank_alone_passes_does_not_end_the_schedule() -> None:
    printing = make_decisions(0, sharing=(0, 1))
    other = Decisions(rank=1, sites=(), passes=(), data=("rank 0",), num_values=64)
    plan = Plan({0: printing, 1: other})
    assert schedule(list(plan.list_variations()), plan)[0]


def test_a_rank_that_skips_collectives_and_goes_on_is_found() -> None:
    change = Change(site=FINITE, number=2, kind=ChangeKind.OPPOSITE, ranks=(1,))
    before = {rank: make_decisions(rank) for rank in range(2)}
    skipping = {**before, 1: make_decisions(1, calls=(0, 4, 8, 9, 13, 17))}
    shift = find_shift(before, skipping, None, change)
    assert shift is not None
    assert (shift.ranks, shift.num_calls) == ((1,), -3)
    assert find_shift(before, before, None, change) is None


def test_an_all_to_all_whose_sizes_match_has_no_excess() -> None:
    first, second = Exchange(0, (8, 4), (8, 12)), Exchange(0, (12, 16), (4, 16))
    assert find_excess(first, second, (2, 5), (2, 5)) is None
    smaller = Exchange(0, (12, 16), (2, 16))
    excess = find_excess(first, smaller, (2, 5), (2, 5))
    assert excess is not None
    assert (excess.sender, excess.receiver) == (2, 5)
    assert (excess.num_sent, excess.num_expected) == (4, 2)
