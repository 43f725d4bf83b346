"""Finds the fewest ops that still fail, with as few queries as possible (delta debugging)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

_MAX_SUSPECTS = 2
_NEIGHBOURHOOD_DIVISOR = 4  # a quarter of the program counts as the neighbourhood of an op
_STRIDE = 4  # factor between successive sizes when the wanted op is expected nearby


class Answer(Enum):
    """The result of running a subset of the ops."""

    FAILS = "fails"  # in the same way as all ops together
    PASSES = "passes"
    UNRESOLVED = "unresolved"  # it fails in another way, or cannot be built


@final
@dataclass(frozen=True)
class Progress:
    """The state of a search."""

    num_queries: int
    num_left: int  # estimated
    size: int  # of the smallest set known to fail


class BudgetSpentError(Exception):
    """The search has used all of its queries."""


@final
class OpSearch:
    """A search for the fewest ops that still fail, and what it has found.

    `ask` runs a subset of the ops; all ops together are known to fail. Answers are cached.
    """

    def __init__(
        self,
        names: Sequence[str],
        ask: Callable[[frozenset[str]], Answer],
        *,
        budget: int = 1000,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._positions = {name: position for position, name in enumerate(names)}
        self._ask = ask
        self._budget = budget
        self._on_progress = on_progress
        self._answers: dict[frozenset[str], Answer] = {frozenset(names): Answer.FAILS}
        self.keep = tuple(names)  # the smallest subset known to fail, in the order of the program
        self.is_minimal = False  # without any one of them it does not fail in the same way
        self.is_interrupted = False  # by the user
        self.num_left = 0  # estimated number of further queries

    def run(
        self, suspects: Sequence[str] = (), reads: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """Search until `keep` is minimal, the budget is spent or the user interrupts.

        `suspects` are tried alone first, then the first of them with one other op. `reads` maps an
        op to the ops whose results it reads; with it the search tries the ops on the path between
        two needed ops before all ops between them.
        """
        suspects = [name for name in suspects if name in self.keep]
        try:
            if suspects:
                _try_suspects(self, suspects)
            else:
                _halve(self, self.keep)
            is_minimal = False
            while not is_minimal:
                _gather(self, reads or {})
                is_minimal = _is_minimal(self)
            self.is_minimal = True
        except BudgetSpentError:  # it was not checked whether more ops can be left out
            pass
        except KeyboardInterrupt:
            self.is_interrupted = True

    @property
    def num_queries(self) -> int:
        """How many subsets were run."""
        return len(self._answers) - 1

    def is_failing(self, names: Iterable[str]) -> bool:
        """Whether these ops alone still fail in the same way; the empty subset never fails."""
        keep = frozenset(names)
        if not keep:
            return False
        answer = self._answers.get(keep) or self._query(keep)
        return answer is Answer.FAILS

    def _query(self, keep: frozenset[str]) -> Answer:
        if self.num_queries >= self._budget:
            raise BudgetSpentError
        answer = self._ask(keep)
        self._answers[keep] = answer
        if answer is Answer.FAILS and len(keep) < len(self.keep):
            self.keep = self.sort(keep)
        self.num_left = max(self.num_left - 1, 0)
        self._on_progress(Progress(self.num_queries, self.num_left, len(self.keep)))
        return answer

    def sort(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names in the order of the program."""
        return tuple(sorted(names, key=self._positions.__getitem__))

    @property
    def passing(self) -> tuple[str, ...]:
        """The subset known to pass that differs least from `keep`, preferably a part; or ()."""
        best = frozenset(self.keep)
        passing = [keep for keep, answer in self._answers.items() if answer is Answer.PASSES]
        if not passing:
            return ()

        def distance(keep: frozenset[str]) -> tuple[bool, int]:
            return not keep < best, len(keep ^ best)

        # The first query wins a tie: dictionaries preserve insertion order.
        nearest = min(passing, key=distance)
        return self.sort(nearest)


def _try_suspects(search: OpSearch, suspects: Sequence[str]) -> None:
    """Try each suspect alone, then the first with another op, preferably a neighbour."""
    names = search.keep
    search.num_left = _MAX_SUSPECTS + 2 * _num_halvings(names) + 1
    if any(search.is_failing([name]) for name in suspects[:_MAX_SUSPECTS]):
        return
    first = suspects[0]
    position = names.index(first)
    for size in _first_sizes(len(names) // _NEIGHBOURHOOD_DIVISOR, near=0):
        if search.is_failing(names[max(0, position - size) : position + size + 1]):
            break
    _halve(search, [name for name in search.keep if name != first], [first])


def _halve(search: OpSearch, part: Sequence[str], needed: Sequence[str] = ()) -> None:
    """Bisect: follow the half that fails; if the left half passes, assume that the right one fails.

    The assumption costs nothing if a single op is the cause, and the subsets that are tried stay
    small.
    """
    search.num_left = _num_halvings(part) + 1
    while len(part) > 1:
        middle = len(part) // 2
        is_left = search.is_failing([*needed, *part[:middle]])
        part = part[:middle] if is_left else part[middle:]
    search.is_failing([*needed, *part])


def _gather(search: OpSearch, reads: Mapping[str, Sequence[str]]) -> None:
    """Collect ops that the failure needs, until they fail without the rest."""
    names = search.keep
    if len(names) <= 1:
        return
    search.num_left = 2 * _num_halvings(names) + 4
    end = _first_failing_size(search, [], names)
    last, rest = names[end - 1], names[: end - 1]
    if search.is_failing([last]):
        return
    # Ops that only fail together are usually near each other.
    search.num_left = _num_halvings(rest) + 4
    backwards = rest[::-1]
    start = _first_failing_size(search, [last], backwards, near=0)
    first, rest = backwards[start - 1], backwards[: start - 1][::-1]
    if search.is_failing([first, last]):
        return
    rest = _connecting(search, first, last, rest, reads)
    _gather_between(search, [first, last], rest)


def _gather_between(search: OpSearch, needed: list[str], rest: tuple[str, ...]) -> None:
    while rest:
        search.num_left = len(needed) + 2 * _num_halvings(rest) + 1
        size = _first_failing_size(search, needed, rest, near=len(rest))
        has_gap = size < len(rest)
        needed, rest = [*needed, rest[size - 1]], rest[: size - 1]
        # For consecutive ops that are all needed this would cost a query for each.
        if has_gap and search.is_failing(needed):
            return


def _connecting(
    search: OpSearch,
    first: str,
    last: str,
    rest: tuple[str, ...],
    reads: Mapping[str, Sequence[str]],
) -> tuple[str, ...]:
    """The ops on data paths from `first` to `last`, if these are enough to fail; else `rest`."""
    after = {first}
    for name in rest:
        if not after.isdisjoint(reads.get(name, ())):
            after.add(name)
    before = set(reads.get(last, ()))
    for name in reversed(rest):
        if name in before:
            before.update(reads.get(name, ()))
    path = tuple(name for name in rest if name in after and name in before)
    is_enough = 0 < len(path) < len(rest) and search.is_failing([first, *path, last])
    return path if is_enough else rest


def _first_failing_size(
    search: OpSearch, needed: Sequence[str], names: Sequence[str], *, near: int | None = None
) -> int:
    """The smallest n such that `needed` and the first n of `names` fail.

    With all of `names` it is known to fail, with none to pass. `near` is a size
    near which to search first; None starts in the middle.
    """
    low, high = 0, len(names)
    for size in _first_sizes(high, near):
        if search.is_failing([*needed, *names[:size]]):
            high = size
            if near == 0:
                break
        else:
            low = size
            if near != 0:
                break
    while high - low > 1:
        middle = (low + high) // 2
        if search.is_failing([*needed, *names[:middle]]):
            high = middle
        else:
            low = middle
    return high


def _first_sizes(size: int, near: int | None) -> list[int]:
    """Sizes to try before bisecting: away from `near`, in growing steps."""
    if near is None:
        return []
    steps = [1]
    while steps[-1] * _STRIDE < size:
        steps.append(steps[-1] * _STRIDE)
    inside = [step for step in steps if step < size]
    return inside if near == 0 else [size - step for step in inside]


def _is_minimal(search: OpSearch) -> bool:
    """Whether no op can be left out. If one can, `keep` is smaller afterwards."""
    names = search.keep
    if len(names) <= 1:
        return True
    search.num_left = len(names)
    return not any(search.is_failing(set(names) - {name}) for name in names)


def _num_halvings(names: Sequence[str]) -> int:
    return max(len(names) - 1, 0).bit_length()
