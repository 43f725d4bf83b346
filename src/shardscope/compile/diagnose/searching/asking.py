"""What was asked while a program was shrunk: each set once, within a budget, the best kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

__all__ = ["Answer", "BudgetSpentError", "Progress", "Trials"]


class Answer(Enum):
    """What became of a part of a program."""

    FAILS = "fails"  # in the same way as the whole
    PASSES = "passes"
    UNRESOLVED = "unresolved"  # it fails in another way, or cannot be built


@final
@dataclass(frozen=True)
class Progress:
    """How far a search is."""

    num_queries: int
    num_left: int  # estimated
    size: int  # of the smallest set known to fail


class BudgetSpentError(Exception):
    """No query is left."""


@final
class Trials:
    """The questions so far. An answer that is known is not asked for again."""

    def __init__(
        self,
        names: Sequence[str],
        ask: Callable[[frozenset[str]], Answer],
        *,
        budget: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._ask = ask
        self._budget = budget
        self._on_progress = on_progress
        whole = frozenset(names)
        self._answers: dict[frozenset[str], Answer] = {whole: Answer.FAILS}
        self.best = tuple(names)  # the smallest that fails
        self.num_left = 0  # how many more the search expects to need

    @property
    def num_queries(self) -> int:
        """How often somebody had to answer."""
        return len(self._answers) - 1

    def is_failing(self, names: Iterable[str]) -> bool:
        """Whether these alone still fail in the same way. Without any there is nothing to fail."""
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
        if answer is Answer.FAILS and len(keep) < len(self.best):
            self.best = self.sort(keep)
        self.num_left = max(self.num_left - 1, 0)
        self._on_progress(Progress(self.num_queries, self.num_left, len(self.best)))
        return answer

    def sort(self, names: Iterable[str]) -> tuple[str, ...]:
        """In the order of the program."""
        return tuple(sorted(names, key=self._places.__getitem__))

    def nearest_passing(self) -> tuple[str, ...]:
        """What passes and differs least from the best: rather a part of it than something else."""
        best = frozenset(self.best)
        passing = [keep for keep, answer in self._answers.items() if answer is Answer.PASSES]
        if not passing:
            return ()

        def distance(keep: frozenset[str]) -> tuple[bool, int]:
            return not keep < best, len(keep ^ best)

        # The first asked wins a draw: dictionaries keep their order.
        nearest = min(passing, key=distance)
        return self.sort(nearest)
