"""Compares the gradients of a step as they are at several moments, and chooses one of these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from shardscope.parallel.equivalence import Runs, StepResult, TensorComparison
from shardscope.parallel.parity.evidence import is_noise
from shardscope.parallel.parity.result import BrokenTie
from shardscope.parallel.parity.scale_causes import find_factor
from shardscope.record import TOLERABLE, TensorKind


@final
@dataclass(frozen=True, eq=False)
class StepComparison:
    """One step on the single device and on all ranks, with the comparisons of its tensors."""

    reference: StepResult
    ranks: Sequence[StepResult]
    comparisons: list[TensorComparison]
    broken_ties: list[BrokenTie]


def find_first_wrong(steps: Sequence[StepComparison]) -> int | None:
    """The index of the first step in which something differs."""
    wrong = (index for index, step in enumerate(steps) if list_wrong(step.comparisons))
    return next(wrong, None)


def list_wrong(comparisons: Sequence[TensorComparison]) -> list[TensorComparison]:
    """The comparisons of tensors that differ, other than parameters."""
    results = without_parameters(comparisons)
    return [result for result in results if result.verdict.agreement not in TOLERABLE]


def without_parameters(comparisons: Sequence[TensorComparison]) -> list[TensorComparison]:
    """The comparisons without parameters, which may rightly have another form."""
    return [result for result in comparisons if result.case.kind is not TensorKind.PARAMETER]


def count_wrong_gradients(comparisons: Sequence[TensorComparison]) -> int:
    """The number of gradients that differ."""
    return sum(result.case.kind is TensorKind.GRADIENT for result in list_wrong(comparisons))


def choose_moment(moments: Sequence[Sequence[TensorComparison]]) -> int:
    """The index of the moment whose comparisons show a cause best; the first, if several do.

    That is one in which all gradients agree. Otherwise it is the first, if all its gradients are
    off by the same factor: in the middle of a pipeline's backward fewer of them are, which says
    less. Otherwise it is the one with the fewest wrong gradients.
    """
    counts = [count_wrong_gradients(comparisons) for comparisons in moments]
    if min(counts) and _has_common_factor(moments[0]):
        return 0
    return counts.index(min(counts))


def _has_common_factor(comparisons: Sequence[TensorComparison]) -> bool:
    """Whether all gradients of parameters, at least two, are off by the same factor."""
    gradients = [
        result
        for result in comparisons
        if result.case.kind is TensorKind.GRADIENT
        and not result.case.name.startswith("inputs")
        and not is_noise(result.verdict)
    ]
    factors = [find_factor(result) for result in gradients]
    known = [factor for factor in factors if factor is not None]
    return 1 < len(known) == len(factors) and all(
        math.isclose(factor, known[0], rel_tol=1e-4) for factor in known
    )


def list_moments(
    runs: Runs, ranks: Sequence[StepResult]
) -> Iterator[tuple[Runs, Sequence[StepResult]]]:
    """The same step with gradients of another moment in one version or both.

    They are taken as backward left them, or as the last collective did. Where a program changes
    gradients by itself, it may reduce them over ranks, which belongs to what is compared before
    clipping, or clip them, which does not.
    """
    if not runs.reference.raw_gradients or not all(rank.raw_gradients for rank in ranks):
        return
    raw_runs = Runs(
        _take_raw(runs.reference),
        None if runs.fp64 is None else _take_raw(runs.fp64),
        tuple(
            (_take_raw(rounded), None if fp64 is None else _take_raw(fp64))
            for rounded, fp64 in runs.perturbed_runs
        ),
        runs.precision,
    )
    raw_ranks = [_take_raw(rank) for rank in ranks]
    reduced_ranks = [
        replace(rank, gradients=rank.reduced_gradients, local_squares=rank.reduced_squares)
        for rank in ranks
    ]
    yield raw_runs, reduced_ranks
    yield raw_runs, raw_ranks
    yield runs, reduced_ranks
    yield runs, raw_ranks
    yield raw_runs, ranks


def _take_raw(result: StepResult) -> StepResult:
    return replace(result, gradients=result.raw_gradients, local_squares=result.raw_squares)
