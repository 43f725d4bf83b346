"""The fewest ops that still fail, in as few trials as possible.

One op is to blame nearly always, and halving finds it where none is suspected. If that leads
nowhere, several are needed together: then the last of them is searched for, then the first, then
those in between. What passes need not pass when more is taken away from it, so nothing is concluded
from one answer to another set: at the end each op is taken away once, and the result stands only if
none of that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from shardscope.compile.diagnose.searching.asking import Answer, BudgetSpentError, Progress, Trials

__all__ = ["Answer", "Progress", "Shrunk", "shrink"]

_MAX_SUSPECTS = 2
_FEW_OF = 4  # parts that a program is divided by for what is still near
_STRIDE = 4  # how much wider each look is than the one before, where what is sought is near


@final
@dataclass(frozen=True)
class Shrunk:
    """What is left, in the order of the program."""

    keep: tuple[str, ...]
    is_minimal: bool  # without any one of them it does not fail in the same way
    num_queries: int
    passing: tuple[str, ...]  # the nearest set that is known to pass; empty if none is
    is_interrupted: bool = False  # by the user


def shrink(
    names: Sequence[str],
    ask: Callable[[frozenset[str]], Answer],
    *,
    budget: int = 1000,
    suspects: Sequence[str] = (),
    reads: Mapping[str, Sequence[str]] | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Shrunk:
    """Find ops of which none can be spared, in a program that is known to fail as a whole.

    `suspects` are tried alone first, then the first of them with one other; `reads` says whose
    results an op reads, and lets the search try the ops that connect two others before it looks at
    all between them.
    """
    trials = Trials(names, ask, budget=budget, on_progress=on_progress)
    is_minimal = is_interrupted = False
    suspects = [name for name in suspects if name in names]
    try:
        if suspects:
            _try_suspects(trials, suspects)
        else:
            _halve(trials, names)
        while not is_minimal:
            _gather(trials, reads or {})
            is_minimal = _is_minimal(trials)
    except BudgetSpentError:
        is_minimal = False  # nobody has looked whether more can be spared
    except KeyboardInterrupt:
        is_interrupted = True
    return Shrunk(
        keep=trials.best,
        is_minimal=is_minimal,
        num_queries=trials.num_queries,
        passing=trials.nearest_passing(),
        is_interrupted=is_interrupted,
    )


def _try_suspects(trials: Trials, suspects: Sequence[str]) -> None:
    """One alone, then the first with one other, among its neighbours if that is enough."""
    names = trials.best
    trials.num_left = _MAX_SUSPECTS + 2 * _num_halvings(names) + 1
    if any(trials.is_failing([name]) for name in suspects[:_MAX_SUSPECTS]):
        return
    first = suspects[0]
    place = names.index(first)
    for size in _first_sizes(len(names) // _FEW_OF, near=0):
        if trials.is_failing(names[max(0, place - size) : place + size + 1]):
            break
    _halve(trials, [name for name in trials.best if name != first], [first])


def _halve(trials: Trials, part: Sequence[str], needed: Sequence[str] = ()) -> None:
    """Follow the half that fails; if the left one does not, believe that the right one does.

    Believing costs nothing if one op is to blame, and the parts that are tried stay small.
    """
    trials.num_left = _num_halvings(part) + 1
    while len(part) > 1:
        middle = len(part) // 2
        is_left = trials.is_failing([*needed, *part[:middle]])
        part = part[:middle] if is_left else part[middle:]
    trials.is_failing([*needed, *part])


def _gather(trials: Trials, reads: Mapping[str, Sequence[str]]) -> None:
    """Collect ops without which what is left does not fail, until these alone do."""
    names = trials.best
    if len(names) <= 1:
        return
    trials.num_left = 2 * _num_halvings(names) + 4
    end = _first_failing_size(trials, [], names)
    last, rest = names[end - 1], names[: end - 1]
    if trials.is_failing([last]):
        return
    # Ops that only fail together are near each other more often than not.
    trials.num_left = _num_halvings(rest) + 4
    backwards = rest[::-1]
    start = _first_failing_size(trials, [last], backwards, near=0)
    first, rest = backwards[start - 1], backwards[: start - 1][::-1]
    if trials.is_failing([first, last]):
        return
    rest = _connecting(trials, first, last, rest, reads)
    _gather_between(trials, [first, last], rest)


def _gather_between(trials: Trials, needed: list[str], rest: tuple[str, ...]) -> None:
    while rest:
        trials.num_left = len(needed) + 2 * _num_halvings(rest) + 1
        size = _first_failing_size(trials, needed, rest, near=len(rest))
        has_gap = size < len(rest)
        needed, rest = [*needed, rest[size - 1]], rest[: size - 1]
        # In a row of ops that are all needed this would be a question for each of them.
        if has_gap and trials.is_failing(needed):
            return


def _connecting(
    trials: Trials,
    first: str,
    last: str,
    rest: tuple[str, ...],
    reads: Mapping[str, Sequence[str]],
) -> tuple[str, ...]:
    """Of the ops between two, those on the way from one to the other, if they do to fail."""
    after = {first}
    for name in rest:
        if not after.isdisjoint(reads.get(name, ())):
            after.add(name)
    before = set(reads.get(last, ()))
    for name in reversed(rest):
        if name in before:
            before.update(reads.get(name, ()))
    way = tuple(name for name in rest if name in after and name in before)
    is_enough = 0 < len(way) < len(rest) and trials.is_failing([first, *way, last])
    return way if is_enough else rest


def _first_failing_size(
    trials: Trials, needed: Sequence[str], names: Sequence[str], *, near: int | None = None
) -> int:
    """How many of `names` it takes to fail besides `needed`: it does not with one less.

    All of them are known to do, and none not to; those in front come first. `near` is where to
    look first, if not midway.
    """
    low, high = 0, len(names)
    for size in _first_sizes(high, near):
        if trials.is_failing([*needed, *names[:size]]):
            high = size
            if near == 0:
                break
        else:
            low = size
            if near != 0:
                break
    while high - low > 1:
        middle = (low + high) // 2
        if trials.is_failing([*needed, *names[:middle]]):
            high = middle
        else:
            low = middle
    return high


def _first_sizes(size: int, near: int | None) -> list[int]:
    """Sizes to try before halving: away from `near`, in steps that grow."""
    if near is None:
        return []
    steps = [1]
    while steps[-1] * _STRIDE < size:
        steps.append(steps[-1] * _STRIDE)
    inside = [step for step in steps if step < size]
    return inside if near == 0 else [size - step for step in inside]


def _is_minimal(trials: Trials) -> bool:
    """Whether nothing can be spared. If something can, the best is smaller than before."""
    names = trials.best
    if len(names) <= 1:
        return True
    trials.num_left = len(names)
    return not any(trials.is_failing(set(names) - {name}) for name in names)


def _num_halvings(names: Sequence[str]) -> int:
    return max(len(names) - 1, 0).bit_length()
