"""Oracles whose truth is known: what is left is what is needed, in few questions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shardscope.compile.diagnose.minimize import Answer, OpSearch, Progress

Oracle = Callable[[frozenset[int]], bool]


def names_of(numbers: range | set[int] | frozenset[int]) -> list[str]:
    return [f"n{number}" for number in sorted(numbers)]


def numbers_of(names: frozenset[str] | tuple[str, ...]) -> frozenset[int]:
    return frozenset(int(name[1:]) for name in names)


def search(size: int, oracle: Oracle, **options: object) -> tuple[frozenset[int], OpSearch]:
    def ask(keep: frozenset[str]) -> Answer:
        assert keep, "nothing is not a program"
        return Answer.FAILS if oracle(numbers_of(keep)) else Answer.PASSES

    hints = {name: options.pop(name) for name in ("suspects", "reads") if name in options}
    shrunk = OpSearch(names_of(range(size)), ask, **options)  # type: ignore[arg-type]
    shrunk.run(**hints)  # type: ignore[arg-type]
    return numbers_of(shrunk.keep), shrunk


def assert_minimal(keep: frozenset[int], oracle: Oracle) -> None:
    assert oracle(keep)
    spared = [op for op in keep if len(keep) > 1 and oracle(keep - {op})]
    assert spared == []


@pytest.mark.parametrize(("size", "bar"), [(1, 0), (2, 2), (100, 8), (400, 10), (5000, 14)])
def test_one_bad_op_is_found_by_halving(size: int, bar: int) -> None:
    for bad in range(0, size, max(size // 100, 1)):
        keep, shrunk = search(size, lambda ops, bad=bad: bad in ops)
        assert (keep, shrunk.is_minimal) == (frozenset({bad}), True)
        assert shrunk.num_queries <= bar


@pytest.mark.parametrize(
    ("size", "distances", "bar"),
    [(100, range(1, 100), 28), (400, range(200, 400), 35), (400, [1], 20), (400, [2, 3, 4], 24)],
)
def test_two_ops_that_only_fail_together_are_found(
    size: int, distances: range | list[int], bar: int
) -> None:
    rng = random.Random(0)
    for distance in distances:
        first = rng.randrange(size - distance)
        pair = frozenset({first, first + distance})
        keep, shrunk = search(size, lambda ops, pair=pair: pair <= ops)
        assert (keep, shrunk.is_minimal) == (pair, True)
        assert shrunk.num_queries <= bar


@pytest.mark.parametrize(("num_needed", "bar"), [(3, 50), (5, 80), (10, 140)])
def test_several_scattered_ops_are_found(num_needed: int, bar: int) -> None:
    rng = random.Random(num_needed)
    for _ in range(50):
        needed = frozenset(rng.sample(range(400), num_needed))
        keep, shrunk = search(400, lambda ops, needed=needed: needed <= ops)
        assert (keep, shrunk.is_minimal) == (needed, True)
        assert shrunk.num_queries <= bar


@pytest.mark.parametrize("length", [3, 10, 40])
def test_each_of_several_adjacent_needed_ops_costs_about_one_query(length: int) -> None:
    rng = random.Random(length)
    for _ in range(20):
        first = rng.randrange(400 - length)
        row = frozenset(range(first, first + length))
        keep, shrunk = search(400, lambda ops, row=row: row <= ops)
        assert (keep, shrunk.is_minimal) == (row, True)
        assert shrunk.num_queries <= 30 + length


def test_the_ops_that_connect_two_are_tried_before_all_between_them() -> None:
    # Every seventh op reads the one seven before it: three of these chains' links must be kept.
    reads = {f"n{number}": [f"n{number - 7}"] for number in range(7, 400)}
    chain = frozenset(range(100, 142, 7))
    keep, informed = search(400, lambda ops: chain <= ops, reads=reads)
    assert (keep, informed.is_minimal) == (chain, True)
    keep, blind = search(400, lambda ops: chain <= ops)
    assert (keep, blind.is_minimal) == (chain, True)
    assert informed.num_queries + 8 <= blind.num_queries


def random_graph(size: int, rng: random.Random) -> dict[int, list[int]]:
    return {
        op: [max(op - 1 - int(rng.expovariate(0.3)), 0) for _ in range(rng.choice([1, 1, 2]))]
        for op in range(1, size)
    }


def test_faults_that_need_a_producer_connected_to_its_consumer_are_minimal() -> None:
    rng = random.Random(7)
    for _ in range(60):
        graph = random_graph(120, rng)
        last = rng.randrange(20, 120)
        first = rng.randrange(last)

        def is_connected(
            ops: frozenset[int],
            first: int = first,
            last: int = last,
            graph: dict[int, list[int]] = graph,
        ) -> bool:
            reached = {first} & ops
            for value in range(first + 1, last + 1):
                if value in ops and reached & set(graph[value]):
                    reached.add(value)
            return last in reached

        if not is_connected(frozenset(range(120))):
            continue
        reads = {f"n{op}": names_of(set(sources)) for op, sources in graph.items()}
        keep, shrunk = search(120, is_connected, reads=reads)
        assert shrunk.is_minimal
        assert_minimal(keep, is_connected)
        assert {first, last} <= keep


def test_oracles_that_are_not_monotone_still_end_minimal() -> None:
    """Any answer to any set, as long as it is always the same one."""
    for seed in range(300):
        size = random.Random(seed).randrange(2, 60)
        everything = frozenset(range(size))
        share = (seed % 10) / 10

        def is_failing(
            ops: frozenset[int],
            seed: int = seed,
            everything: frozenset[int] = everything,
            share: float = share,
        ) -> bool:
            if not ops:
                return False
            dice = random.Random(f"{seed} {sorted(ops)}")
            return ops == everything or dice.random() < share

        keep, shrunk = search(size, is_failing, budget=10_000)
        assert shrunk.is_minimal
        assert_minimal(keep, is_failing)


def test_a_prefix_that_fails_and_a_longer_one_that_does_not() -> None:
    def is_failing(ops: frozenset[int]) -> bool:
        return 30 in ops and (70 not in ops or 90 in ops)

    keep, shrunk = search(100, is_failing)
    assert shrunk.is_minimal
    assert_minimal(keep, is_failing)


def test_what_cannot_be_built_is_neither_taken_for_the_failure_nor_for_a_pass() -> None:
    asked: dict[frozenset[str], Answer] = {}

    def ask(keep: frozenset[str]) -> Answer:
        ops = numbers_of(keep)
        # 10 cannot be built without 11, and 50 fails in another way without 20.
        if (10 in ops) != (11 in ops) or (50 in ops and 20 not in ops):
            asked[keep] = Answer.UNRESOLVED
        else:
            asked[keep] = Answer.FAILS if 50 in ops else Answer.PASSES
        return asked[keep]

    shrunk = OpSearch(names_of(range(100)), ask)
    shrunk.run()
    assert numbers_of(shrunk.keep) == {20, 50}
    assert shrunk.is_minimal
    assert asked[frozenset(shrunk.passing)] is Answer.PASSES


def test_a_suspect_that_fails_alone_costs_one_query() -> None:
    keep, shrunk = search(400, lambda ops: 311 in ops, suspects=["n311", "n5"])
    assert (keep, shrunk.num_queries, shrunk.is_minimal) == (frozenset({311}), 1, True)


@pytest.mark.parametrize(("suspects", "bar"), [(("gone", "n1", "n2", "n3"), 17), (("n300",), 17)])
def test_wrong_suspects_cost_few_queries(suspects: tuple[str, ...], bar: int) -> None:
    keep, shrunk = search(400, lambda ops: 311 in ops, suspects=suspects)
    assert (keep, shrunk.is_minimal) == (frozenset({311}), True)
    assert shrunk.num_queries <= bar


@pytest.mark.parametrize("shown", [0, 1])
@pytest.mark.parametrize(("distance", "bar"), [(1, 5), (3, 8), (60, 14), (240, 16)])
def test_the_other_of_two_is_searched_for_near_the_one_where_it_showed(
    distance: int, bar: int, shown: int
) -> None:
    pair = (320 - distance, 320)
    keep, shrunk = search(400, lambda ops: ops.issuperset(pair), suspects=[f"n{pair[shown]}"])
    assert (keep, shrunk.is_minimal) == (frozenset(pair), True)
    assert shrunk.num_queries <= bar


def test_no_subset_is_tested_twice() -> None:
    asked: list[frozenset[int]] = []

    def oracle(ops: frozenset[int]) -> bool:
        asked.append(ops)
        return {3, 40, 77} <= ops

    _, shrunk = search(100, oracle)
    assert len(asked) == len(set(asked)) == shrunk.num_queries
    assert frozenset(range(100)) not in asked


@pytest.mark.parametrize("budget", [0, 1, 5, 20])
def test_with_the_budget_spent_the_best_so_far_is_given_and_not_called_minimal(
    budget: int,
) -> None:
    needed = frozenset({11, 150, 390})
    keep, shrunk = search(400, lambda ops: needed <= ops, budget=budget)
    assert needed <= keep
    assert (shrunk.num_queries, shrunk.is_minimal) == (budget, False)
    assert not shrunk.is_interrupted


def test_ctrl_c_keeps_the_best_so_far() -> None:
    num_asked = 0

    def oracle(ops: frozenset[int]) -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 4:
            raise KeyboardInterrupt
        return 3 in ops

    keep, shrunk = search(100, oracle)
    assert keep == frozenset(range(12))
    assert (shrunk.is_interrupted, shrunk.is_minimal, shrunk.num_queries) == (True, False, 3)


def test_the_nearest_passing_set_is_the_result_without_one_op() -> None:
    pair = frozenset({20, 60})
    _, shrunk = search(100, lambda ops: pair <= ops)
    assert len(shrunk.passing) == 1
    assert numbers_of(shrunk.passing) < pair
    _, single = search(100, lambda ops: 20 in ops)
    assert single.passing
    assert 20 not in numbers_of(single.passing)


def test_progress_counts_down_to_the_end() -> None:
    reports: list[Progress] = []
    search(400, lambda ops: 123 in ops, on_progress=reports.append)
    assert [progress.num_queries for progress in reports] == list(range(1, len(reports) + 1))
    assert [progress.num_left for progress in reports] == list(range(9, 9 - len(reports), -1))
    assert reports[-1].size == 1


def test_an_empty_program_needs_no_query() -> None:
    keep, shrunk = search(0, lambda ops: True)
    assert (keep, shrunk.is_minimal, shrunk.num_queries) == (frozenset(), True, 0)
