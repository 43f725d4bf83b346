"""Numbers the training steps of a recording, by where each of them begins on each rank.

Collectives have no step number of their own. What distinguishes steps is a span named `step`, or
the phases of collectives: forward follows the optimizer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from msgspec import Struct

from shardscope.record import Collective, Phase, Recording

STEP = "step"  # also the name of spans that time a step
FORWARD = "forward"


class StepStart(Struct, frozen=True):
    """Where a step begins: the order of its first collective, and the time, 0 if not recorded."""

    order: int
    start_ns: int


class RankSteps(Struct, frozen=True):
    """The steps of one rank, of which there are none or several.

    `word` is what begins where they begin: a "step", or only a "forward" pass, of which a step may
    have several. `is_timed` means that spans distinguish them.
    """

    word: str
    starts: tuple[StepStart, ...]
    is_timed: bool = False


class StepNumbers(Struct, frozen=True):
    """Steps that have the same number on all ranks; none if `word` is empty.

    `word` and `is_timed` are those of `RankSteps`. `orders` has the order of the first collective
    of each step, by rank.
    """

    word: str = ""
    num_steps: int = 0
    is_timed: bool = False
    orders: Mapping[int, tuple[int, ...]] = {}

    def find(self, rank: int, order: int) -> int:
        """Return the number of a collective's step, from 1.

        It is 0 before the first step, and on ranks whose steps are not known.
        """
        return bisect_right(self.orders.get(rank, ()), order)


def find_steps(recording: Recording, *, is_timed: bool) -> dict[int, RankSteps]:
    """Find where the steps of each rank begin; `is_timed` means that collectives have times.

    A step begins with a span of that name, or with the first forward collective after one of the
    optimizer. Optimizers often issue none: what is known then is where a forward pass follows a
    backward pass. A single step has no beginning.
    """
    times_by_rank = list_step_times(recording) if is_timed else {}
    steps = {}
    calls = sorted(recording.collectives, key=attrgetter("rank", "order"))
    for rank, group in groupby(calls, key=attrgetter("rank")):
        rank_calls, times = list(group), times_by_rank.get(rank, ())
        if len(times) > 1:
            steps[rank] = RankSteps(STEP, _read_times(times, rank_calls), is_timed=True)
        else:
            steps[rank] = _read_phases(rank_calls)
    return steps


def list_step_times(recording: Recording) -> dict[int, tuple[int, ...]]:
    """List when the spans of steps begin, by rank."""
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for span in recording.spans:
        if span.name == STEP and not span.is_inner:
            starts[span.rank].append(span.start_ns)
    return {rank: tuple(sorted(rank_starts)) for rank, rank_starts in starts.items()}


def _read_times(times: Sequence[int], calls: Sequence[Collective]) -> tuple[StepStart, ...]:
    orders = (
        next((call.order for call in calls if (call.start_ns or 0) >= time), calls[-1].order + 1)
        for time in times
    )
    return tuple(StepStart(order, time) for order, time in zip(orders, times, strict=True))


def _read_phases(calls: Sequence[Collective]) -> RankSteps:
    has_optimizer = any(call.phase is Phase.OPTIMIZER for call in calls)
    ending = Phase.OPTIMIZER if has_optimizer else Phase.BACKWARD
    starts, is_ended = [], True
    for call in calls:
        if call.phase is Phase.FORWARD and is_ended:
            starts.append(StepStart(call.order, call.start_ns or 0))
            is_ended = False
        is_ended = is_ended or call.phase is ending
    return RankSteps(STEP if has_optimizer else FORWARD, tuple(starts) if len(starts) > 1 else ())


def number_steps(recording: Recording, steps: Mapping[int, RankSteps]) -> StepNumbers:
    """Number the steps of all ranks, as far as a number means the same on each of them.

    Ranks on which only forward passes are known have steps if they have as many as the others.
    Without any step, forward passes are numbered if all ranks have as many as the model ran:
    micro-batches of a pipeline overlap, so that its ranks differ.
    """
    counts = [len(rank_steps.starts) for rank_steps in steps.values() if rank_steps.word == STEP]
    word, num_steps = STEP, max(counts, default=0)
    if not num_steps:
        different_counts = {len(rank_steps.starts) for rank_steps in steps.values()}
        word, num_steps = FORWARD, max(different_counts, default=0)
        if len(different_counts) > 1 or recording.run.num_forwards not in (None, num_steps):
            return StepNumbers()
    if not num_steps:
        return StepNumbers()
    is_timed = any(rank_steps.is_timed for rank_steps in steps.values())
    return StepNumbers(
        word=word,
        num_steps=num_steps,
        is_timed=is_timed,
        orders={
            rank: tuple(start.order for start in rank_steps.starts)
            for rank, rank_steps in steps.items()
            if rank_steps.is_timed == is_timed
            and (rank_steps.word == word or len(rank_steps.starts) == num_steps)
        },
    )
