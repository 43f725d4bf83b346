"""Steps are distinguished by spans or by phases, where a number means the same on all ranks."""

from __future__ import annotations

import pytest

from sample_recordings import make_collective, make_recording, make_run, make_steps
from shardscope.record import Phase, Recording
from shardscope.report.model.step_numbers import StepNumbers, find_steps, number_steps

PHASES = {"f": Phase.FORWARD, "b": Phase.BACKWARD, "o": Phase.OPTIMIZER}


def number(recording: Recording, *, is_timed: bool = False) -> StepNumbers:
    return number_steps(recording, find_steps(recording, is_timed=is_timed))


def make_phases(*phases_by_rank: str, num_forwards: int | None = None) -> Recording:
    calls = tuple(
        make_collective(rank=rank, order=order, phase=PHASES[letter])
        for rank, letters in enumerate(phases_by_rank)
        for order, letter in enumerate(letters)
    )
    ranks = tuple(range(len(phases_by_rank)))
    return make_recording(calls, run=make_run(ranks=ranks, num_forwards=num_forwards))


@pytest.mark.parametrize("is_timed", [False, True])
def test_each_collective_has_the_number_of_its_step(is_timed: bool) -> None:
    numbers = number(make_steps(timed=is_timed), is_timed=is_timed)
    per_step = 4 if is_timed else 5
    expected = [0, *[1] * per_step, *[2] * per_step]
    for rank in (0, 1):
        assert [numbers.find(rank, order) for order in range(len(expected))] == expected
    assert (numbers.word, numbers.num_steps, numbers.is_timed) == ("step", 2, is_timed)
    assert numbers.find(7, 3) == 0  # a rank without collectives


@pytest.mark.parametrize(
    ("phases", "num_forwards", "expected"),
    [
        (("fbfb",), 2, ("forward", 2)),
        (("fbfb",), None, ("forward", 2)),
        (("fbfb",), 4, ("", 0)),  # the model ran more often than is seen
        (("fbfb", "fbfbfb"), None, ("", 0)),  # stages of a pipeline
        (("fbo",), 1, ("", 0)),  # a single step
        (("fbo" * 3, "fbo"), None, ("step", 3)),  # a rank that ended early
        ((), None, ("", 0)),
    ],
)
def test_steps_are_numbered_where_the_ranks_agree(
    phases: tuple[str, ...], num_forwards: int | None, expected: tuple[str, int]
) -> None:
    numbers = number(make_phases(*phases, num_forwards=num_forwards))
    assert (numbers.word, numbers.num_steps) == expected


def test_ranks_without_an_optimizer_have_steps_if_they_have_as_many() -> None:
    numbers = number(make_phases("fbofbo", "fbfb", "fbfbfb"))
    assert [numbers.find(rank, 3) for rank in range(3)] == [2, 2, 0]
