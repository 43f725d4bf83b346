"""Runs and compares both versions; where something differs, runs them again to locate it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from shardscope.errors import CollectiveError, ParityError, RankError
from shardscope.parallel.equivalence import (
    DRAWN,
    MARKED,
    Case,
    Key,
    Mesh,
    RandomNumbers,
    Runs,
    StepResult,
    TensorComparison,
    TracedWeights,
    Variant,
    compare_case,
    find_common_seeds,
    find_stages,
    is_cleared,
    is_unclear,
    make_cases,
    run_all,
    run_fp64,
)
from shardscope.parallel.parity.explanation import list_names
from shardscope.parallel.parity.locator import Locator
from shardscope.parallel.parity.moments import (
    StepComparison,
    choose_moment,
    count_wrong_gradients,
    find_first_wrong,
    list_moments,
    list_wrong,
    without_parameters,
)
from shardscope.parallel.parity.recheck import (
    ONLY_IN_OWN,
    accept_own_values,
    is_coarse,
    recheck_fp64,
    recheck_without_rng,
)
from shardscope.parallel.parity.result import ParityResult
from shardscope.parallel.parity.scale_causes import find_scaling
from shardscope.parallel.parity.ties import find_broken_ties
from shardscope.parallel.parity.version import Report, Version
from shardscope.record import TOLERABLE, Agreement, Suspect, TensorKind

# Parameters may rightly have another shape.
_WRONG_VALUES = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)


def check_parity(
    version: Version,
    *,
    precision: torch.dtype | None,
    report: Report,
    report_progress: Callable[[str], None],
) -> ParityResult:
    """Run and compare both versions, and locate the first difference, if any."""
    session = _Session(version, precision, report, report_progress)
    steps = session.compare()
    rng = DRAWN
    if find_first_wrong(steps) is not None and session.has_drawn:
        steps, rng = session.compare_without_rng(steps)
    index = find_first_wrong(steps)
    if index is None:
        return ParityResult(
            without_parameters(steps[0].comparisons),
            steps[0].reference,
            session.has_exact,
            ranks=steps[0].ranks,
            steps=[without_parameters(step.comparisons) for step in steps],
            is_training=version.task.training is not None,
        )
    step = steps[index]
    # If ranks drew different numbers, keep the RNG, to locate the draw.
    if any(r.verdict.suspect is Suspect.RANDOMNESS for r in list_wrong(step.comparisons)):
        rng = DRAWN
    parity_result = ParityResult(
        step.comparisons,
        step.reference,
        session.has_exact,
        missing_elements=session.find_missing_elements(),
        num_calls=max(rank.num_calls for rank in step.ranks),
        num_cleared=max(rank.num_cleared for rank in step.ranks),
        broken_ties=step.broken_ties,
        index=index,
        ranks=step.ranks,
        steps=[without_parameters(compared.comparisons) for compared in steps],
        is_training=version.task.training is not None,
        previous=steps[index - 1].reference if index else None,
    )
    return session.make_locator(rng).locate(parity_result)


@final
class _Session:
    def __init__(
        self,
        version: Version,
        precision: torch.dtype | None,
        report: Report,
        report_progress: Callable[[str], None],
    ) -> None:
        self._version = version
        self._precision = precision
        self._report = report
        self._report_progress = report_progress
        self.has_exact = True  # both versions run in double precision
        self.has_drawn = False  # random numbers that may differ between the versions
        self.kept_seeds: frozenset[int] = frozenset()  # of generators that draw the same in both
        self._traced: TracedWeights | None = None
        self._is_clear = False  # names and shapes determine which rank holds which weights

        names = list(version.axes)
        self._mesh = Mesh(
            tuple(version.axes.values()),
            tuple(names.index(axis) for axis in version.batch_axes),
            version.batch_dim,
        )

    def compare(self, rng: RandomNumbers = DRAWN) -> list[StepComparison]:
        """The comparisons of each step."""
        version = self._version
        self._report_progress("running the original")
        runs = run_all(
            version.model,
            version.task,
            rng=rng,
            precision=self._precision,
            report=self._report,
        )
        self.has_exact &= runs[0].fp64 is not None
        self._report_progress("running all ranks")
        ranks = _list_by_step(version.run(Variant(rng=rng)))
        if rng == DRAWN:
            self._note_draws(runs, ranks)
        self._trace_weights(runs[0].reference, ranks[0])
        steps = list(map(self._compare_step, runs, ranks))
        if self.has_exact and self._is_unsure(steps):
            steps = self._reconsider(steps, rng)
        for single, step_ranks in zip(runs, ranks, strict=True):
            self._report_uncompared([single.reference, *step_ranks])
        stages = find_stages(runs[0].reference.parameters, ranks[0])
        accepted = accept_own_values(
            [step.comparisons for step in steps],
            stages,
            version.axes,
            [step.reference.training for step in steps],
        )
        return [
            replace(step, comparisons=comparisons)
            for step, comparisons in zip(steps, accepted, strict=True)
        ]

    def _is_unsure(self, steps: Sequence[StepComparison]) -> bool:
        """Whether verdicts in the model's own precision need those in double precision.

        Those of training do: an optimizer amplifies the noise of small gradients.
        """
        return self._version.task.training is not None or any(
            is_coarse(step.comparisons) or bool(list_wrong(step.comparisons)) for step in steps
        )

    def _compare_step(self, runs: Runs, ranks: Sequence[StepResult]) -> StepComparison:
        resolved = ranks if self._traced is None else self._traced.apply(ranks)
        comparison = self._compare_gradients_at(runs, resolved)
        if not count_wrong_gradients(comparison.comparisons):
            return comparison
        compared = [self._compare_gradients_at(*moment) for moment in list_moments(runs, resolved)]
        # If gradients are only scaled after collectives, those before that show a cause better.
        is_clipped = find_scaling(runs.reference) is not None and all(
            find_scaling(replace(rank, raw_gradients=rank.reduced_gradients)) is not None
            for rank in resolved
        )
        compared = [*compared, comparison] if is_clipped else [comparison, *compared]
        return compared[choose_moment([step.comparisons for step in compared])]

    def _compare_gradients_at(self, runs: Runs, resolved: Sequence[StepResult]) -> StepComparison:
        return StepComparison(
            runs.reference,
            resolved,
            self._compare_tensors(runs, resolved),
            list(find_broken_ties(runs.reference, resolved)),
        )

    def _report_uncompared(self, step_results: Sequence[StepResult]) -> None:
        """Report gaps: outputs that cannot be kept, and gradients of which none is left."""
        if any(run.num_transformed for run in step_results):
            self._report(
                "outputs",
                "not compared where the step calls the model in a transform of torch.func, such as "
                "vmap; what it computes from them is",
            )
        if all(run.num_backwards and is_cleared(run.gradients.values()) for run in step_results):
            self._report(
                "gradients",
                "not compared: the step runs backward, but no gradient is left when it returns, as "
                "after zero_grad(); call zero_grad() at the start of the step instead",
            )

    def _note_draws(self, runs: Sequence[Runs], ranks: Sequence[Sequence[StepResult]]) -> None:
        """Note whether a run has drawn numbers, and which generators draw the same in all runs."""
        steps = zip(runs, ranks, strict=True)
        self.kept_seeds, self.has_drawn = find_common_seeds(
            [[result.draws for result in (single.reference, *rest)] for single, rest in steps]
        )

    def compare_without_rng(
        self, steps: list[StepComparison]
    ) -> tuple[list[StepComparison], RandomNumbers]:
        """The verdicts after runs without random numbers, and how these got theirs."""
        rng = RandomNumbers(is_replaced=True, kept_seeds=self.kept_seeds)
        try:
            deterministic = self.compare(rng)
        except (RankError, CollectiveError, ParityError) as error:
            fact = f"a run without random numbers failed ({error!s:.200})"
            self._report("randomness", fact)
            return steps, DRAWN
        return [
            replace(
                step, comparisons=recheck_without_rng(step.comparisons, _by_key(again.comparisons))
            )
            for step, again in zip(steps, deterministic, strict=True)
        ], rng

    def find_missing_elements(self) -> Mapping[str, str]:
        """Weights of which no rank holds some elements."""
        return {} if self._traced is None else self._traced.find_missing_elements()

    def make_locator(self, rng: RandomNumbers) -> Locator:
        """What finds the first difference, with runs that get random numbers in this way."""
        traced = self._traced
        ranks = range(math.prod(self._mesh.sizes))
        renamed = {} if traced is None else {rank: traced.rename_modules(rank) for rank in ranks}
        return Locator(
            self._version,
            self._mesh,
            renamed,
            Variant(is_fp64=self.has_exact, rng=rng),
            self._report,
            self._report_progress,
        )

    def _trace_weights(self, reference: StepResult, ranks: Sequence[StepResult]) -> None:
        """Find out which weights each rank holds, if names and shapes do not determine it."""
        if self._is_clear or self._traced is not None or not is_unclear(reference, ranks):
            self._is_clear = self._traced is None
            return
        self._report_progress("tracing the weights")
        try:
            marked = self._version.run(MARKED)
        except (RankError, CollectiveError) as error:
            self._is_clear = True
            self._report(
                "weights",
                f"which rank holds which of them is inferred from names and shapes: sharding a "
                f"model with other weights failed ({error!s:.200})",
            )
            return
        first = [steps[0] for steps in marked]
        self._traced = TracedWeights(reference.parameters, first, self._mesh.sizes)
        added = sorted(set().union(*(rank.added for rank in self._traced.apply(ranks))))
        if added:
            fact = f"only in the parallel model, and not compared: {list_names(added)}"
            self._report("parameters and buffers", fact)

    def _compare_tensors(
        self, runs: Runs, resolved: Sequence[StepResult]
    ) -> list[TensorComparison]:
        sizes, batch_axes, batch_dim = self._mesh
        comparisons = [
            _compare_scaled(compare_case(case), case)
            for case in make_cases(
                runs, resolved, sizes, batch_axes=batch_axes, batch_dim=batch_dim
            )
        ]
        odd = [
            result
            for result in comparisons
            if self._is_incomparable(result, runs.reference, resolved)
        ]
        states = [result for result in odd if result.case.kind is TensorKind.STATE]
        others = [result for result in odd if result.case.kind is not TensorKind.STATE]
        if states:
            fact = (
                "not compared where the optimizers of the ranks hold other tensors, such as main "
            )
            fact += f"parameters: {list_names([result.case.name for result in states])}"
            self._report("the optimizer's state", fact)
        if others:
            fact = "only in the original, or changed by every call, and not compared: "
            self._report(
                "parameters and buffers", fact + list_names([result.case.name for result in others])
            )
        return [
            result
            for result in comparisons
            if result not in odd
            and (
                result.case.kind is not TensorKind.PARAMETER
                or result.verdict.agreement in _WRONG_VALUES
            )
        ]

    @staticmethod
    def _is_incomparable(
        result: TensorComparison, reference: StepResult, ranks: Sequence[StepResult]
    ) -> bool:
        """Whether a difference is no evidence of an error.

        A parameter may now be computed from others, as in a reparametrization; a buffer that
        every call changes differs if the ranks call the model more or less often; and optimizers
        may hold main parameters, which updated parameters show to be right or wrong.
        """
        if result.case.kind is TensorKind.STATE:
            return result.verdict.agreement is Agreement.MISSING
        if result.case.kind is TensorKind.BUFFER and result.verdict.agreement not in TOLERABLE:
            return any(rank.num_calls != reference.num_calls for rank in ranks)
        if result.case.kind is not TensorKind.GRADIENT or result.verdict.agreement in TOLERABLE:
            return False
        module, _, parameter = result.case.name.rpartition(".")
        is_absent = result.verdict.agreement is Agreement.MISSING and all(
            result.case.name in rank.absent for rank in ranks
        )
        prefixes = [f"{module}.parametrizations.{parameter}.", *([f"{module}."] * is_absent)]
        added = {name for rank in ranks for name in rank.added}
        return any(name.startswith(tuple(prefixes)) for name in added)

    def _reconsider(self, steps: list[StepComparison], rng: RandomNumbers) -> list[StepComparison]:
        """Repeat the comparison in double precision, where noise may hide or mimic an error."""
        version = self._version
        self._report_progress("running all ranks in double precision")
        try:
            ranks = version.run(Variant(is_fp64=True, rng=rng))
        except (RankError, CollectiveError) as error:
            self.has_exact = False
            self._report(
                "double precision",
                f"the parallel version does not run in it ({error!s:.200}), so rounding cannot be "
                "distinguished from other differences",
            )
            return steps
        fp64 = run_fp64(version.model, version.task, rng=rng)
        exact = list(map(self._compare_step, fp64, _list_by_step(ranks)))
        rechecked = [
            replace(again, comparisons=recheck_fp64(step.comparisons, _by_key(again.comparisons)))
            for step, again in zip(steps, exact, strict=True)
        ]
        others = [
            r for step in rechecked for r in step.comparisons if r.verdict.detail == ONLY_IN_OWN
        ]
        if others:
            names = list_names([result.case.name or "the output" for result in others])
            self._report(
                "double precision",
                f"not compared in it, as the original gives other results in it: {names}",
            )
        return rechecked


def _list_by_step(ranks: Sequence[Sequence[StepResult]]) -> list[list[StepResult]]:
    """The results of all ranks, for each step."""
    return [list(step) for step in zip(*ranks, strict=True)]


def _compare_scaled(comparison: TensorComparison, case: Case) -> TensorComparison:
    """Accept the gradient of a sharded input without the average over ranks."""
    is_input = case.kind is TensorKind.GRADIENT and case.name.startswith("inputs")
    if comparison.verdict.agreement in TOLERABLE or not is_input or not case.batch_axes:
        return comparison
    count = math.prod(case.sizes[axis] for axis in case.batch_axes)
    ranks = tuple(None if tensor is None else tensor / count for tensor in case.ranks)
    scaled = compare_case(replace(case, ranks=ranks))
    return scaled if scaled.verdict.agreement in TOLERABLE else comparison


def _by_key(comparisons: Sequence[TensorComparison]) -> dict[Key, TensorComparison]:
    return {(result.case.kind, result.case.name): result for result in comparisons}
