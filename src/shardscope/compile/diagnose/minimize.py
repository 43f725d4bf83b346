"""Reduces a failing graph to the fewest ops that fail, and finds the stage that causes it.

`OpSearch` is the search itself (delta debugging), with as few queries as possible; `Minimizer` asks
the worker, and bisects the compiler's stages for the ops that are left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from msgspec.structs import replace

from shardscope.attribution.call_sites import shown_path
from shardscope.compile.diagnose.accuracy import NUMBERS, CheckResult, is_same_failure
from shardscope.compile.diagnose.stage_bisect import (
    StageFinding,
    StageToggles,
    finding_from_last_phase,
    locate_stage,
)
from shardscope.compile.diagnose.subgraph import Compiler
from shardscope.compile.diagnose.worker_client import ProgressReporter, WorkerClient
from shardscope.compile.diagnose.worker_tasks import (
    OpSubset,
    SubgraphInfo,
    check_affects_results,
    check_with_toggles,
    describe_suspects,
    find_first_wrong_op,
)
from shardscope.errors import CompileError
from shardscope.record import Diagnosis, Phase, SuspectOp

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


INTERRUPTED = (
    "The diagnosis was interrupted: this is the best result so far, and what is missing in it was "
    "not determined."
)
"""The note of a diagnosis that Ctrl-C ended early, wherever that happened."""
_RESERVE = 6  # calls that finding the stage and a passing variant may take


@final
@dataclass(frozen=True)
class MinimizedFailure:
    """The smallest failing subset of ops, its outcome, and the nearest subset that passes."""

    diagnosis: Diagnosis
    subset: OpSubset
    outcome: CheckResult
    passing: OpSubset | None
    is_interrupted: bool = False


@final
class Minimizer:
    """Finds the ops and the stage that cause the failure of a graph."""

    def __init__(
        self, client: WorkerClient, compiler: Compiler, reporter: ProgressReporter, *, budget: int
    ) -> None:
        self._client = client
        self._compiler = compiler
        self._reporter = reporter
        self._budget = budget

    def find(
        self, diagnosis: Diagnosis, key: int, loaded: SubgraphInfo, graph_outcome: CheckResult
    ) -> MinimizedFailure:
        """Minimize a graph that is known to fail with `graph_outcome`."""
        search = self._search_affecting_ops(key, loaded, graph_outcome)
        subset = OpSubset(key, frozenset(search.keep))
        # If no op could be left out, the outcome of the graph is the outcome of the subset.
        outcome = (
            graph_outcome if len(search.keep) == len(loaded.ops) else self._client.check(subset)
        )
        minimized = MinimizedFailure(
            self._describe(diagnosis, subset, outcome, search),
            subset,
            outcome,
            _passing_subset(key, search),
            search.is_interrupted,
        )
        return minimized if search.is_interrupted else self._with_stage(minimized)

    def _describe(
        self, diagnosis: Diagnosis, subset: OpSubset, outcome: CheckResult, search: OpSearch
    ) -> Diagnosis:
        return replace(
            diagnosis,
            graph=subset.key,
            condition=outcome.condition,
            fact=outcome.fact,
            phase=outcome.phase,
            deviation=outcome.deviation,
            error=outcome.error,
            suspects=tuple(map(show_relative_path, self._client.read(describe_suspects, subset))),
            is_minimal=search.is_minimal,
        )

    def _search_affecting_ops(
        self, key: int, loaded: SubgraphInfo, graph_outcome: CheckResult
    ) -> OpSearch:
        """The fewest failing ops; of several faults, one that makes the graph's results wrong."""
        self._reporter.show_task("searching for the failing ops")
        try:
            hints = self._find_hints(key, graph_outcome)
        except KeyboardInterrupt:
            search = self._start_search(key, loaded.ops, graph_outcome)
            search.is_interrupted = True
            return search
        search = self._start_search(key, loaded.ops, graph_outcome)
        search.run(hints, loaded.reads)
        is_inner = not self._client.check(OpSubset(key)).is_bad  # its results are correct
        if is_inner or not self._may_not_affect_results(search, loaded, graph_outcome, hints):
            return search
        rest = [name for name in loaded.ops if name not in search.keep]
        try:
            is_harmless = not self._client.run(
                check_affects_results, OpSubset(key, frozenset(search.keep)), self._compiler
            )
            if is_harmless and is_same_failure(
                self._client.check(OpSubset(key, frozenset(rest))), graph_outcome
            ):
                other_search = self._start_search(key, rest, graph_outcome)
                other_search.run(reads=loaded.reads)
                return other_search
        except CompileError:  # then the first result stands
            pass
        return search

    def _may_not_affect_results(
        self,
        search: OpSearch,
        loaded: SubgraphInfo,
        graph_outcome: CheckResult,
        hints: Sequence[str],
    ) -> bool:
        """Whether it is still open if the minimized ops make the graph's results wrong."""
        is_forward = graph_outcome.condition in NUMBERS and graph_outcome.phase is Phase.FORWARD
        is_part = search.is_minimal and len(search.keep) < len(loaded.ops)
        is_hinted = bool(hints) and hints[0] in search.keep  # so it affects the results
        return is_forward and is_part and not is_hinted

    def _start_search(self, key: int, ops: Sequence[str], graph_outcome: CheckResult) -> OpSearch:
        """A search among some ops of a graph, which fail as the graph does."""

        def ask(keep: frozenset[str]) -> Answer:
            try:
                outcome = self._client.check(OpSubset(key, keep))
            except CompileError:  # it fails in eager execution, too
                return Answer.UNRESOLVED
            if is_same_failure(outcome, graph_outcome):
                return Answer.FAILS
            return Answer.UNRESOLVED if outcome.is_bad else Answer.PASSES

        def report_progress(progress: Progress) -> None:
            self._reporter.expect(progress.num_left + _RESERVE)

        left = max(0, self._budget - self._client.num_calls - _RESERVE)
        return OpSearch(ops, ask, budget=left, on_progress=report_progress)

    def _find_hints(self, key: int, graph_outcome: CheckResult) -> tuple[str, ...]:
        """Ops that are probable causes; for wrong numbers the first op with a wrong result."""
        if graph_outcome.hints or graph_outcome.condition not in NUMBERS:
            return graph_outcome.hints
        try:
            outcome: CheckResult = self._client.run(find_first_wrong_op, key, self._compiler)
        except CompileError:  # the search is only slower without hints
            return ()
        return outcome.hints if is_same_failure(outcome, graph_outcome) else ()

    def _with_stage(self, failure: MinimizedFailure) -> MinimizedFailure:
        self._reporter.show_task("finding the stage")
        try:
            finding = self._find_stage(failure)
        except CompileError as error:
            note = f"Finding the stage failed ({error})."
            return dataclasses.replace(failure, diagnosis=add_note(failure.diagnosis, note))
        except KeyboardInterrupt:
            return dataclasses.replace(failure, diagnosis=add_note(failure.diagnosis, INTERRUPTED))
        return dataclasses.replace(failure, diagnosis=_add_stage(failure.diagnosis, finding))

    def _find_stage(self, failure: MinimizedFailure) -> StageFinding:
        last_phase = ""

        def ask(toggles: StageToggles) -> CheckResult:
            nonlocal last_phase
            result = self._client.run(
                check_with_toggles,
                failure.subset,
                self._compiler,
                toggles,
                failure.outcome.phase,
                num_calls=int(toggles.backend is None),
            )
            if not result.log.is_complete:
                last_phase = self._client.last_phase
            return result

        finding = locate_stage(ask, outcome=failure.outcome)
        return (
            finding
            if finding.part or not last_phase
            else dataclasses.replace(finding, part=finding_from_last_phase(last_phase).part)
        )


def show_relative_path(suspect: SuspectOp) -> SuspectOp:
    """The op with its source file relative to the user's folder: the worker runs in another one."""
    source = suspect.source
    if source is None:
        return suspect
    return replace(suspect, source=replace(source, file=shown_path(source.file)))


def _passing_subset(key: int, search: OpSearch) -> OpSubset | None:
    """The nearest passing subset if it is a proper subset of the failing ops; else None."""
    is_part = len(search.passing) > 0 and set(search.passing) < set(search.keep)
    return OpSubset(key, frozenset(search.passing)) if is_part else None


def _add_stage(diagnosis: Diagnosis, finding: StageFinding) -> Diagnosis:
    return replace(
        diagnosis,
        stage=finding.stage,
        part=finding.part,
        phase=finding.phase or diagnosis.phase,
        notes=(*diagnosis.notes, *finding.notes),
    )


def add_note(diagnosis: Diagnosis, note: str) -> Diagnosis:
    """The diagnosis with a note on something that could not be determined; each note once."""
    return (
        diagnosis if note in diagnosis.notes else replace(diagnosis, notes=(*diagnosis.notes, note))
    )
