"""Compares a compiled run of a subgraph with eager runs: all results, in one `CheckResult`.

The eager runs (`SubgraphRuns`) are the subgraph as it is, in double precision, and with perturbed
rounding; each is computed when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol, final

import torch
from torch import Tensor

from shardscope.compile.diagnose.accuracy.check_result import CheckResult, make_eager_failure
from shardscope.compile.diagnose.subgraph import (
    PhaseCallback,
    RunValues,
    Subgraph,
    copy_inputs,
    ignore_phase,
    name_inputs,
    run,
)
from shardscope.numerics import (
    RandomRounding,
    RngUseMode,
    Values,
    ValueVerdict,
    compare,
    find_distance,
    fp64_mode,
    is_changed,
    to_fp64,
)
from shardscope.record import Condition, Phase

Part = Callable[[RunValues], Values]
_NO_DOUBLE = "it does not run in double precision, so it is compared with eager execution only"
_UNSTABLE_NUMBERS = "; the wrong numbers differ from run to run"
_NUM_EAGER_RERUNS = 5
_NUM_COMPILED_RERUNS = 2  # further runs, each of which may agree by coincidence
_FORWARD = Phase.FORWARD
_MAX_SPREADS = 2.0  # how many times the spread of eager runs a compiled run may deviate
_MAX_ERROR_CHANGE = 0.1  # of its error: a wrong result that changes less counts as the same


class Reference(Protocol):
    """Results of eager execution."""

    @property
    def eager(self) -> RunValues:
        """The result without changes."""

    @property
    def exact(self) -> RunValues | None:
        """The result in double precision; None if an op does not support it."""

    def run_perturbed(self, count: int) -> Sequence[RunValues]:
        """`count` results with perturbed rounding."""

    def run_again(self, count: int) -> Sequence[RunValues]:
        """`count` further results without changes."""


def compare_runs(compiled: RunValues, reference: Reference) -> CheckResult:
    """Compare one compiled run with eager execution: the first bad verdict as an outcome."""
    best = CheckResult(Condition.FINE)
    for phase, verdict in _compare(compiled, reference):
        if verdict.condition.is_bad:
            doubt = "" if verdict.deviation is None or reference.exact else f" ({_NO_DOUBLE})"
            fact = verdict.fact + doubt
            return CheckResult(verdict.condition, fact, phase, deviation=verdict.deviation)
        if verdict.condition is Condition.MORE_ACCURATE and best.condition is Condition.FINE:
            best = CheckResult(verdict.condition, verdict.fact, phase, deviation=verdict.deviation)
    return best


def list_wrong(compiled: RunValues, reference: Reference) -> list[str]:
    """The names of all forward results that are wrong."""
    verdicts = [verdict for phase, verdict in _compare(compiled, reference) if phase is _FORWARD]
    return [verdict.name for verdict in verdicts if verdict.condition.is_bad]


def check_determinism(
    outcome: CheckResult,
    compiled: RunValues,
    run_again: Callable[[], RunValues],
    reference: Reference,
) -> CheckResult:
    """The outcome of wrong results after further compiled and eager runs: wrong or
    nondeterministic.
    """
    if _is_eager_nondeterminism(compiled, reference):
        return CheckResult(Condition.FINE, "eager execution gives different numbers each time too")
    runs = [run_again() for _ in range(_NUM_COMPILED_RERUNS)]
    if all(compare_runs(run, reference).is_bad for run in runs):
        is_different = any(_is_different_error(compiled, run, reference.eager) for run in runs)
        return (
            replace(outcome, fact=f"{outcome.fact}{_UNSTABLE_NUMBERS}") if is_different else outcome
        )
    fact = f"it is right when it is run again; at first {outcome.fact}"
    return CheckResult(Condition.NONDETERMINISTIC, fact, outcome.phase, deviation=outcome.deviation)


def check_second_run(
    outcome: CheckResult, first: RunValues, again: RunValues, reference: Reference
) -> CheckResult:
    """The outcome of correct results after a second compiled run."""
    if not _differs(first, again):
        return outcome
    second = compare_runs(again, reference)
    if not second.is_bad or _is_eager_nondeterminism(again, reference):
        return outcome
    fact = f"it is correct at first, but not when it is run again: {second.fact}"
    return CheckResult(Condition.NONDETERMINISTIC, fact, second.phase, deviation=second.deviation)


def _is_eager_nondeterminism(compiled: RunValues, reference: Reference) -> bool:
    """Whether eager results differ between runs by as much as the compiled ones do."""
    return any(_differs(reference.eager, again) for again in reference.run_again(1)) and _is_within(
        compiled, reference.eager, reference.run_again(_NUM_EAGER_RERUNS)
    )


def _compare(compiled: RunValues, reference: Reference) -> Iterator[tuple[Phase, ValueVerdict]]:
    """Verdicts on values, then on gradients, computed lazily: callers stop at the first bad one."""
    for phase, part in ((Phase.FORWARD, _values), (Phase.BACKWARD, _gradients)):

        def exact(part: Part = part) -> Values | None:
            return None if reference.exact is None else part(reference.exact)

        def perturbed(count: int, part: Part = part) -> list[Values]:
            return [part(run) for run in reference.run_perturbed(count)]

        for verdict in compare(*_pair(compiled, reference.eager, part), exact, perturbed):
            yield phase, verdict


def _pair(first_run: RunValues, second_run: RunValues, part: Part) -> tuple[Values, Values]:
    """The values of two runs; if a run is incomplete, only the values that both have."""
    if first_run.is_complete and second_run.is_complete:
        return part(first_run), part(second_run)
    names = part(first_run).keys() & part(second_run).keys()
    first, second = (
        {name: part(run)[name] for name in part(run) if name in names}
        for run in (first_run, second_run)
    )
    return first, second


def _values(result: RunValues) -> Values:
    return result.values


def _gradients(result: RunValues) -> Values:
    return result.gradients


def _differs(first_run: RunValues, second_run: RunValues) -> bool:
    return any(
        verdict.condition is not Condition.FINE
        for part in (_values, _gradients)
        for verdict in compare(*_pair(second_run, first_run, part), partial(part, first_run))
    )


def _is_within(compiled: RunValues, eager: RunValues, again: Sequence[RunValues]) -> bool:
    """Whether a run deviates from eager by no more than eager runs do from each other."""
    for part in (_values, _gradients):
        for name, eager_value in part(eager).items():
            spread = [
                find_distance(part(run)[name], eager_value) for run in again if name in part(run)
            ]
            if name not in part(compiled) or not spread:
                return False
            if find_distance(part(compiled)[name], eager_value) > _MAX_SPREADS * max(spread):
                return False
    return True


def _is_different_error(first: RunValues, second: RunValues, eager: RunValues) -> bool:
    """Whether two wrong runs are wrong in different ways."""
    return any(
        find_distance(part(second)[name], part(first)[name])
        > _MAX_ERROR_CHANGE * find_distance(part(first)[name], eager_value)
        for part in (_values, _gradients)
        for name, eager_value in part(eager).items()
        if name in part(first) and name in part(second)
    )


Call = Callable[[Sequence[Any]], Any]


@final
class SubgraphRuns:
    """The eager runs of a subgraph; `run` calls its compiled form on the same inputs."""

    def __init__(
        self,
        subgraph: Subgraph,
        *,
        seed: int = 0,
        with_backward: bool = True,
        max_perturbed: int | None = None,
    ) -> None:
        self.subgraph = subgraph
        self._seed = seed
        self._with_backward = with_backward  # gradients too
        self._max_perturbed = max_perturbed  # runs with perturbed rounding; None: no limit
        self._perturbed: list[RunValues] = []
        self._again: list[RunValues] = []
        self._is_roundable = True
        self._changed: set[str] | None = None  # inputs that eager execution changes

    @cached_property
    def eager(self) -> RunValues:
        """The result of eager execution."""
        try:
            return self.run(self._run_graph)
        except Exception:  # noqa: BLE001 - not every result is differentiable
            self._with_backward = False
        try:
            return self.run(self._run_graph)
        except Exception as error:
            raise make_eager_failure(error) from error

    @cached_property
    def exact(self) -> RunValues | None:
        """The result in double precision; None where an op does not support it."""
        _ = self.eager  # determines which inputs are changed in place
        try:
            return self.run(self._run_graph, fp64_mode(self._dtype), change=to_fp64)
        except Exception:  # noqa: BLE001 - then it is compared with eager execution only
            return None

    @cached_property
    def uses_rng(self) -> bool:
        """Whether the subgraph draws random numbers."""
        watching = RngUseMode()
        self.run(self._run_graph, watching)
        return watching.has_drawn

    def run_perturbed(self, count: int) -> Sequence[RunValues]:
        """Up to `count` results with perturbed rounding; fewer if such a run fails."""
        count = count if self._max_perturbed is None else min(count, self._max_perturbed)
        while len(self._perturbed) < count and self._is_roundable:
            rounding = RandomRounding(self._seed + len(self._perturbed) + 1)
            try:
                self._perturbed.append(self.run(self._run_graph, rounding))
            except Exception:  # noqa: BLE001 - perturbed numbers may make the program fail
                self._is_roundable = False
        return self._perturbed[:count]

    def run_again(self, count: int) -> Sequence[RunValues]:
        """`count` further results of eager execution."""
        while len(self._again) < count:
            self._again.append(self.run(self._run_graph))
        return self._again[:count]

    def run(
        self,
        call: Call,
        context: AbstractContextManager[Any] | None = None,
        *,
        change: Callable[[Tensor], Tensor] | None = None,
        report_phase: PhaseCallback = ignore_phase,
    ) -> RunValues:
        """Run `call` on copies of the subgraph's inputs."""
        originals = self.subgraph.inputs
        inputs = copy_inputs(originals) if change is None else copy_inputs(originals, change)
        with context or nullcontext():
            result = run(
                call,
                inputs,
                seed=self._seed,
                with_gradients=self.subgraph.with_gradients,
                with_backward=self._with_backward,
                report_phase=report_phase,
            )
        return RunValues({**result.values, **self._find_changed(inputs)}, result.gradients)

    def _find_changed(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Inputs that a run changed in place, and those that eager execution changes."""
        before, after = name_inputs(self.subgraph.inputs), name_inputs(inputs)
        is_first = self._changed is None
        changed = {name for name, tensor in after.items() if is_changed(tensor, before[name])}
        if is_first:
            self._changed = changed
        watched = changed | (self._changed or set())
        return {
            _name_changed_input(name): after[name].detach() for name in after if name in watched
        }

    def unchanged(self, result: RunValues) -> dict[str, Tensor]:
        """The original values of inputs that only `result`, and not eager execution, changed."""
        before = name_inputs(self.subgraph.inputs)
        return {
            _name_changed_input(name): tensor.detach()
            for name, tensor in before.items()
            if _name_changed_input(name) in result.values and name not in (self._changed or set())
        }

    @property
    def _dtype(self) -> torch.dtype:
        floats = [
            value.dtype
            for value in self.subgraph.inputs
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        return max(set(floats), key=floats.count, default=torch.get_default_dtype())

    def _run_graph(self, inputs: Sequence[Any]) -> Any:
        return self.subgraph.graph(*inputs)


def _name_changed_input(name: str) -> str:
    return f"{name}, changed in place"
