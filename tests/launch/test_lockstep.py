"""Ranks in lockstep: the coordinator lets them go on, or ends all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from sample_recordings import make_collective
from shardscope.launch.decisions import Exchange
from shardscope.launch.lockstep import Arrival, Coordinator, Lockstep, Outcome
from shardscope.record import Collective, CollectiveKind

Rank = Callable[[Lockstep], object]


def make_call(rank: int, order: int = 0, **changes: object) -> Collective:
    facts = {"rank": rank, "order": order, "group_order": order, "reduce_op": "sum", **changes}
    return make_collective(**facts)


def run_ranks(ranks: Sequence[Rank], folder: Path) -> Outcome:
    """What the coordinator says of ranks, which run in threads here."""
    folder.mkdir(exist_ok=True)
    address = f"\0{folder}"
    ends, ended = os.pipe()
    path = folder / "outcome.json"
    coordinator = Coordinator(address, range(len(ranks)), path, ends)

    def run_rank(rank: int) -> None:
        lockstep = Lockstep(address, rank)
        lockstep.report_members("world", tuple(range(len(ranks))))
        ranks[rank](lockstep)
        lockstep.leave(None, is_cut=False)

    # The coordinator knows the main thread of a rank by its name, which is empty.
    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(ranks))]
    main = threading.main_thread
    try:
        threading.main_thread = threading.current_thread  # type: ignore[assignment]
        for thread in threads:
            thread.start()
        coordinator.run()
        for thread in threads:
            thread.join(30)
    finally:
        threading.main_thread = main
        os.close(ends)
        os.close(ended)
    return msgspec.json.decode(path.read_bytes(), type=Outcome)


def issue(rank: int, *calls: Collective) -> Rank:
    def run(lockstep: Lockstep) -> None:
        for call in calls:
            if not lockstep.arrive(Arrival(call, waits=True)):
                return

    return run


def test_ranks_that_issue_the_same_end_by_themselves(tmp_path: Path) -> None:
    ranks = [issue(rank, make_call(rank), make_call(rank, 1)) for rank in range(2)]
    assert run_ranks(ranks, tmp_path).reason == "completed"


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": CollectiveKind.ALL_GATHER},
        {"dtype": "bfloat16"},
        {"reduce_op": "max"},
        {"input_bytes": 8, "output_bytes": 8},
    ],
)
def test_ranks_that_differ_are_ended(changes: dict[str, object], tmp_path: Path) -> None:
    ranks = [issue(0, make_call(0)), issue(1, make_call(1, **changes))]
    outcome = run_ranks(ranks, tmp_path)
    assert (outcome.reason, outcome.ranks) == ("mismatch", (0, 1))


def test_a_rank_that_waits_for_one_that_has_ended_is_ended(tmp_path: Path) -> None:
    outcome = run_ranks([issue(0, make_call(0)), issue(1)], tmp_path)
    assert (outcome.reason, outcome.ranks) == ("stuck", (0,))


def test_receives_that_wait_for_each_other_are_ended(tmp_path: Path) -> None:
    receive = {"kind": CollectiveKind.RECV, "reduce_op": None}
    ranks = [issue(rank, make_call(rank, peer=1 - rank, **receive)) for rank in range(2)]
    assert run_ranks(ranks, tmp_path).reason == "stuck"


def test_a_send_and_its_receive_meet(tmp_path: Path) -> None:
    send = make_call(0, kind=CollectiveKind.SEND, peer=1, reduce_op=None)
    receive = make_call(1, kind=CollectiveKind.RECV, peer=0, reduce_op=None)
    assert run_ranks([issue(0, send), issue(1, receive)], tmp_path).reason == "completed"


def test_sizes_of_an_all_to_all_have_to_match(tmp_path: Path) -> None:
    def exchange(rank: int, sent: int) -> Rank:
        call = make_call(rank, kind=CollectiveKind.ALL_TO_ALL, reduce_op=None)
        arrival = Arrival(call, waits=True, exchange=Exchange(0, (sent,) * 2, (sent,) * 2))
        return lambda lockstep: lockstep.arrive(arrival)

    assert run_ranks([exchange(0, 8), exchange(1, 8)], tmp_path / "a").reason == "completed"
    assert run_ranks([exchange(0, 8), exchange(1, 4)], tmp_path / "b").reason == "mismatch"


def test_all_ranks_take_as_many_steps_as_the_first_that_has_run_enough(tmp_path: Path) -> None:
    taken: dict[int, int] = {}

    def train(rank: int) -> Rank:
        def run(lockstep: Lockstep) -> None:
            step = 0
            while lockstep.arrive(Arrival(make_call(rank, step), waits=True)):
                step += 1
                if not lockstep.end_step(step, 20_000 * step):
                    break
            taken[rank] = step

        return run

    run_ranks([train(0), train(1)], tmp_path)
    assert taken == {0: 2, 1: 2}
