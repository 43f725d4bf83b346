"""Explains differences between the steps of a program's ranks and those of a single process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from shardscope.numerics import to_fp64_on_cpu
from shardscope.parallel.equivalence import StepResult
from shardscope.parallel.parity.captured_data import DataUse, group_by_data
from shardscope.parallel.parity.captured_steps import CapturedStep, CapturedTraining, ReplayPlan
from shardscope.parallel.parity.captured_training import TrainingComparison
from shardscope.parallel.parity.evidence import find_median_ratio
from shardscope.parallel.parity.explanation import Explanation
from shardscope.parallel.parity.problem import Problem
from shardscope.record import (
    TOLERABLE,
    Finding,
    Phase,
    Severity,
    Source,
    Suspect,
    TensorKind,
)
from shardscope.record.ranks import list_ranks

_CONSISTENT = 1e-2  # how far a gradient may be from another times their ratio
_EQUAL = 1e-3  # how far factors may be apart that are taken for one
_MAX_NUMBERS = 6  # that a finding lists
Gradients = Sequence[Sequence[torch.Tensor | None]]
"""Those that backward sends into the outputs of each call of the model."""


def describe_loss(
    steps: Sequence[CapturedStep],
    single: CapturedTraining,
    plan: ReplayPlan,
    *,
    index: int,
    is_summed: bool,
    names: Sequence[str],
) -> Problem:
    """The problem of gradients that are right for each rank's samples, but not for all together.

    `index` is the step that was captured and differs. `is_summed` says that gradients are summed
    over ranks with other samples, not averaged.
    """
    factors = _find_factors(steps, single.output_gradients[index], plan, is_summed=is_summed)
    how = "sum" if is_summed else "mean"
    fact = (
        "The gradients of each rank are right for its own loss, and reduced over the ranks to "
        f"their {how}. That is not the gradient of the loss that a single process computes of all "
        "samples."
    )
    remedy = (
        "Divide the loss by what all ranks have together: all-reduce the number of samples or "
        "valid tokens first, and multiply by the number of ranks if gradients are averaged."
    )
    clause = ""
    if factors:
        listed = ", ".join(f"{factor:.4g} on {name_ranks(group)}" for group, factor in factors)
        values = [factor for _, factor in factors]
        is_uniform = all(math.isclose(value, values[0], rel_tol=_EQUAL) for value in values)
        if is_uniform and math.isclose(values[0], 1.0, rel_tol=_EQUAL):
            remedy = (
                "Look for what is added to the loss, or to gradients, outside the model, and "
                "depends on the samples of all ranks."
            )
        elif is_uniform and is_summed:
            clause = f"the loss of every rank has {values[0]:.4g} times the weight that it should"
            remedy = (
                "Average the gradients (ReduceOp.AVG, or divide them by the number of ranks), or "
                "divide the loss of each rank by the number of samples or tokens of all ranks."
            )
        elif is_uniform:
            clause = f"the loss of every rank has {values[0]:.4g} times the weight that it should"
            remedy = (
                "Look for a factor that only one version applies: the number of ranks or of "
                "micro-batches, or a loss that is summed on the ranks."
            )
        else:
            clause = f"the loss of a rank is weighted with a factor of its own: {listed}"
    cause = Explanation(
        Suspect.SCALED, clause, tuple(plan.axes) if len(plan.axes) == 1 else (), remedy=remedy
    )
    return Problem(
        cause,
        "the loss",
        f"{fact} {cause.to_sentence()}".strip(),
        remedy,
        phase=Phase.BACKWARD,
        names=tuple(names),
        source=_find_source(steps[0].training.results[index], TensorKind.LOSS, "loss"),
    )


def describe_stale(steps: Sequence[CapturedStep]) -> Problem | None:
    """The problem that no optimizer holds any parameter that has a gradient, in a single process
    as on the ranks.
    """
    first = [step.training.results[0] for step in steps if step.training.results]
    names = list(first[0].gradients) if first else []
    if not names or any(set(names) - result.training.stale for result in first):
        return None
    cause = Explanation(
        Suspect.STALE,
        "the optimizer steps, but holds none of the model's parameters: it was given other "
        "tensors, such as those from before the model was sharded, moved or materialized",
        remedy="Make the optimizer after the model is sharded and materialized, from the "
        "parameters that the model then has.",
    )
    return Problem(
        cause,
        "the optimizer",
        f"No parameter is trained. {cause.to_sentence()}",
        cause.remedy,
        phase=Phase.OPTIMIZER,
        names=tuple(names),
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """These ranks in words, such as `rank 0` and `ranks 0-3`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {list_ranks(ranks)}"


def _find_source(result: StepResult, kind: TensorKind, name: str) -> Source | None:
    return result.training.sources.get((kind, name))


def _find_factors(
    steps: Sequence[CapturedStep],
    of_single: Gradients,
    plan: ReplayPlan,
    *,
    is_summed: bool,
) -> list[tuple[list[int], float]]:
    """How much more the loss of each group of ranks weighs than in the single process.

    From the gradients that backward sends into what the model returns, if these all show it.
    """
    groups = group_by_data([step.training.data for step in steps])
    share = 1.0 if is_summed else 1 / len(groups)
    factors = []
    for index, group in enumerate(groups):
        own = [call.gradients for call in steps[group[0]].calls]
        shapes = [[call.gradients for call in steps[g[0]].calls] for g in groups]
        wanted = _choose_gradients(of_single, shapes, index, plan)
        factor = None if wanted is None else _find_common_ratio(own, wanted)
        if factor is None:
            return []
        factors.append((group, factor * share))
    return factors


def _choose_gradients(
    of_single: Gradients, of_groups: Sequence[Gradients], index: int, plan: ReplayPlan
) -> Gradients | None:
    """The part of the single process's gradients, in each call, that is of a group's samples."""
    num_groups, num_calls = len(of_groups), len(of_groups[index])
    if plan.data.use is DataUse.SEQUENCE:
        chosen = of_single[index::num_groups]
        return chosen if len(chosen) == num_calls else None
    if len(of_single) != num_calls or any(len(calls) != num_calls for calls in of_groups):
        return None
    parts = []
    for call, gradients in enumerate(of_single):
        part: list[torch.Tensor | None] = []
        for position, gradient in enumerate(gradients):
            rows = [calls[call][position] for calls in of_groups]
            part.append(_choose_rows(gradient, rows, index, plan.data.dim))
        parts.append(part)
    return parts


def _choose_rows(
    gradient: torch.Tensor | None, rows: Sequence[torch.Tensor | None], index: int, dim: int
) -> torch.Tensor | None:
    known = [tensor for tensor in rows if tensor is not None and tensor.ndim]
    if gradient is None or gradient.ndim == 0 or len(known) < len(rows):
        return None
    dim = min(dim, gradient.ndim - 1)
    sizes = [tensor.shape[dim] for tensor in known]
    if sum(sizes) != gradient.shape[dim]:
        return None
    return torch.split(gradient, sizes, dim)[index]


def _find_common_ratio(own: Gradients, wanted: Gradients) -> float | None:
    """The factor between gradients; None if there is no single one."""
    pairs = [
        (to_fp64_on_cpu(a).flatten(), to_fp64_on_cpu(b).flatten())
        for first, second in zip(own, wanted, strict=True)
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None and a.shape == b.shape
    ]
    if not pairs:
        return None
    values, targets = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    ratio = find_median_ratio(values, targets)
    if ratio is None:
        return None
    rest = (values - ratio * targets).norm()
    return ratio if float(rest) <= _CONSISTENT * float(values.norm()) else None


def find_same_samples(steps: Sequence[CapturedStep]) -> Finding | None:
    """A finding if ranks that average their gradients are all trained on the same samples."""
    for ranks in dict.fromkeys(group for step in steps for group in step.training.data_parallel):
        inputs = [steps[rank].training.inputs for rank in ranks]
        if len(ranks) > 1 and _are_same(inputs) and _has_distinct_samples(inputs[0]):
            return Finding(
                rule="parity-same-samples",
                severity=Severity.WARNING,
                subject="the data",
                fact=f"In every step, {name_ranks(ranks)} call the model with the same samples, "
                "although their gradients are averaged: all but one of them compute nothing new.",
                remedy="Give each rank its own part of the data: a DistributedSampler, whose epoch "
                "is set before each, or slices by rank; or seed random data with the rank.",
            )
    return None


def _are_same(inputs: Sequence[list[list[list[torch.Tensor]]]]) -> bool:
    flat = [[tensor for calls in steps for call in calls for tensor in call] for steps in inputs]
    return all(
        len(tensors) == len(flat[0])
        and all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(tensors, flat[0], strict=True)
        )
        for tensors in flat[1:]
    )


def _has_distinct_samples(steps: Sequence[Sequence[Sequence[torch.Tensor]]]) -> bool:
    """Whether the data is not constant, as in a benchmark."""
    return any(
        tensor.ndim > 0 and len(tensor) > 1 and not bool((tensor == tensor[:1]).all())
        for calls in steps
        for call in calls
        for tensor in call
    )


def list_own_numbers(training: TrainingComparison) -> Iterator[Finding]:
    """A finding about numbers that ranks read, and that are those of their own samples."""
    facts, sources = {}, []
    for comparisons, ranks in zip(training.steps, training.ranks, strict=True):
        for result in comparisons:
            case = result.case
            if result.verdict.agreement not in TOLERABLE or case.kind is not TensorKind.REPORTED:
                continue
            key = (case.kind, case.name)
            values = {
                rank: float(step.training.scalars[key][0])
                for rank, step in enumerate(ranks)
                if step.training.scalars.get(key)
            }
            single = None if case.target is None else float(case.target.reshape(-1)[0])
            if single is None or not values or case.name in facts:
                continue
            if all(math.isclose(value, single, rel_tol=_EQUAL) for value in values.values()):
                continue
            listed = ", ".join(f"{v:.5g} on rank {r}" for r, v in list(values.items())[:4])
            facts[case.name] = f"{case.name} reads {listed}, and {single:.5g} in a single process"
            sources += [s for s in [_find_source(ranks[0], *key)] if s is not None]
    if facts:
        yield Finding(
            rule="parity-own-numbers",
            severity=Severity.INFO,
            subject="numbers that the program reads",
            fact=f"They are those of a rank's own samples: "
            f"{'; '.join(list(facts.values())[:_MAX_NUMBERS])}.",
            remedy="If they are logged or decide what the program does, reduce them over the ranks "
            "first.",
            source=sources[0] if sources else None,
        )
