"""Combines the verdicts on all results of a compiled function into one outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from shardscope.compile.diagnose.judging.runs import Result
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.numerics.case import Values, Verdict, plain
from shardscope.numerics.noise import as_exact, find_rms
from shardscope.numerics.verdict import compare
from shardscope.record import Condition, Phase

__all__ = ["Reference", "list_wrong", "weigh", "weigh_again", "weigh_second"]

Part = Callable[[Result], Values]
_NO_DOUBLE = "it does not run in double precision, so it is compared with eager execution only"
_EACH_TIME = "; the wrong numbers differ from run to run"
_NUM_AGAIN = 5
_NUM_TWICE = 2  # further runs, each of which may agree by chance
_FORWARD = Phase.FORWARD
_SPREAD = 2.0  # times the spread of eager execution itself
_OF_ITS_ERROR = 0.1  # by which a wrong result may change between runs and count as the same


class Reference(Protocol):
    """Results of eager execution."""

    @property
    def eager(self) -> Result:
        """The result without changes."""

    @property
    def exact(self) -> Result | None:
        """The result in double precision; None if an op does not support it."""

    def run_others(self, count: int) -> Sequence[Result]:
        """`count` results with perturbed rounding."""

    def run_again(self, count: int) -> Sequence[Result]:
        """`count` further results without changes."""


def weigh(compiled: Result, reference: Reference) -> Outcome:
    """The outcome of one run."""
    best = Outcome(Condition.FINE)
    for phase, verdict in _compare(compiled, reference):
        if verdict.condition.is_bad:
            doubt = "" if verdict.deviation is None or reference.exact else f" ({_NO_DOUBLE})"
            fact = verdict.fact + doubt
            return Outcome(verdict.condition, fact, phase, deviation=verdict.deviation)
        if verdict.condition is Condition.MORE_ACCURATE and best.condition is Condition.FINE:
            best = Outcome(verdict.condition, verdict.fact, phase, deviation=verdict.deviation)
    return best


def list_wrong(compiled: Result, reference: Reference) -> list[str]:
    """The names of all results that are wrong, without gradients."""
    verdicts = [verdict for phase, verdict in _compare(compiled, reference) if phase is _FORWARD]
    return [verdict.name for verdict in verdicts if verdict.condition.is_bad]


def weigh_again(
    outcome: Outcome, compiled: Result, run_again: Callable[[], Result], reference: Reference
) -> Outcome:
    """The outcome of wrong results after further runs, compiled and eager."""
    if _is_eagers_own(compiled, reference):
        return Outcome(Condition.FINE, "eager execution gives different numbers each time too")
    runs = [run_again() for _ in range(_NUM_TWICE)]
    if all(weigh(one, reference).is_bad for one in runs):
        is_other = any(_is_other_error(compiled, one, reference.eager) for one in runs)
        return replace(outcome, fact=f"{outcome.fact}{_EACH_TIME}") if is_other else outcome
    fact = f"it is right when it is run again; at first {outcome.fact}"
    return Outcome(Condition.NONDETERMINISTIC, fact, outcome.phase, deviation=outcome.deviation)


def weigh_second(outcome: Outcome, first: Result, again: Result, reference: Reference) -> Outcome:
    """The outcome of correct results after a second compiled run."""
    if not _differs(first, again):
        return outcome
    second = weigh(again, reference)
    if not second.is_bad or _is_eagers_own(again, reference):
        return outcome
    fact = f"it is correct at first, but not when it is run again: {second.fact}"
    return Outcome(Condition.NONDETERMINISTIC, fact, second.phase, deviation=second.deviation)


def _is_eagers_own(compiled: Result, reference: Reference) -> bool:
    """Whether results of eager execution also differ between runs, by as much."""
    return any(_differs(reference.eager, one) for one in reference.run_again(1)) and _is_within(
        compiled, reference.eager, reference.run_again(_NUM_AGAIN)
    )


def _compare(compiled: Result, reference: Reference) -> Iterator[tuple[Phase, Verdict]]:
    """Verdicts on values, then on gradients, computed lazily: callers stop at the first bad one."""
    for phase, part in ((Phase.FORWARD, _values), (Phase.BACKWARD, _gradients)):

        def exact(part: Part = part) -> Values | None:
            return None if reference.exact is None else part(reference.exact)

        def others(count: int, part: Part = part) -> list[Values]:
            return [part(one) for one in reference.run_others(count)]

        for verdict in compare(*_pair(compiled, reference.eager, part), exact, others):
            yield phase, verdict


def _pair(one: Result, other: Result, part: Part) -> tuple[Values, Values]:
    """The values of two runs; of incomplete runs those that both have."""
    if one.is_complete and other.is_complete:
        return part(one), part(other)
    names = part(one).keys() & part(other).keys()
    first, second = (
        {name: part(run)[name] for name in part(run) if name in names} for run in (one, other)
    )
    return first, second


def _values(result: Result) -> Values:
    return result.values


def _gradients(result: Result) -> Values:
    return result.gradients


def _differs(one: Result, other: Result) -> bool:
    return any(
        verdict.condition is not Condition.FINE
        for part in (_values, _gradients)
        for verdict in compare(*_pair(other, one, part), partial(part, one))
    )


def _is_within(compiled: Result, eager: Result, again: Sequence[Result]) -> bool:
    """Whether a run deviates from eager by no more than eager runs do from each other."""
    for part in (_values, _gradients):
        for name, wanted in part(eager).items():
            spread = [_distance(part(one)[name], wanted) for one in again if name in part(one)]
            if name not in part(compiled) or not spread:
                return False
            if _distance(part(compiled)[name], wanted) > _SPREAD * max(spread):
                return False
    return True


def _is_other_error(first: Result, second: Result, eager: Result) -> bool:
    """Whether two wrong runs are wrong in different ways."""
    return any(
        _distance(part(second)[name], part(first)[name])
        > _OF_ITS_ERROR * _distance(part(first)[name], wanted)
        for part in (_values, _gradients)
        for name, wanted in part(eager).items()
        if name in part(first) and name in part(second)
    )


def _distance(one: Any, other: Any) -> float:
    """The RMS distance of two values; infinite if their types, shapes or dtypes differ."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return 0.0 if type(one) is type(other) else math.inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if one.is_meta:
        return 0.0
    return find_rms(as_exact(plain(one)).nan_to_num() - as_exact(plain(other)).nan_to_num())
