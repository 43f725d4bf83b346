"""Reduces a failing graph to the fewest ops that fail, and finds the stage that causes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from msgspec.structs import replace

from shardscope.attribution.call_sites import shown_path
from shardscope.compile.diagnose.accuracy import NUMBERS, CheckResult, is_same_failure
from shardscope.compile.diagnose.delta_debugging import Answer, OpSearch, Progress
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
            return _replace_diagnosis(failure, add_note(failure.diagnosis, note))
        except KeyboardInterrupt:
            return _replace_diagnosis(failure, add_note(failure.diagnosis, INTERRUPTED))
        return _replace_diagnosis(failure, _add_stage(failure.diagnosis, finding))

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
            else dataclasses.replace(finding, part=_last_part(last_phase))
        )


def show_relative_path(suspect: SuspectOp) -> SuspectOp:
    """The op with its source file relative to the user's folder: the worker runs in another one."""
    source = suspect.source
    if source is None:
        return suspect
    return replace(suspect, source=replace(source, file=shown_path(source.file)))


def _last_part(announcement: str) -> str:
    """The part of the compiler that was started last before a process died."""
    return finding_from_last_phase(announcement).part


def _replace_diagnosis(failure: MinimizedFailure, diagnosis: Diagnosis) -> MinimizedFailure:
    return MinimizedFailure(
        diagnosis, failure.subset, failure.outcome, failure.passing, failure.is_interrupted
    )


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
