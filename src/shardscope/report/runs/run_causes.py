"""What the samples tell about the first tensor that deviates between two runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from shardscope.record import (
    Collective,
    Finding,
    Recording,
    RunComparison,
    RunDeviation,
    Severity,
    ValueKind,
    ValueSample,
    format_ranks,
    name_axis,
)
from shardscope.report.runs.full_values import FullValue, read_partial_sum
from shardscope.report.runs.tensor_comparison import NOUNS

_MAX_COLLECTIVES = 4
_GRADIENTS = (ValueKind.GRADIENT, ValueKind.CLIPPED)


def has_random_numbers(module: str, recording: Recording) -> bool:
    """Whether a module of this name draws random numbers, as dropout does."""
    return any(
        record.name == module and "dropout" in record.type.lower() for record in recording.modules
    )


def describe_difference(
    kind: ValueKind,
    a: FullValue,
    b: FullValue,
    *,
    limit: float,
    samples: tuple[Sequence[ValueSample], Sequence[ValueSample]],
    partial: str = "",
    has_copies: bool = False,
) -> str:
    """What relates two tensors that deviate, in a sentence; empty if nothing known does."""
    if bool(a.num_nonfinite) != bool(b.num_nonfinite):
        return f"run {'A' if a.num_nonfinite else 'B'} has NaN or infinite values"
    if partial:
        return (
            f"before that, the output of `{partial}` agrees only as the sum of the ranks' tensors, "
            "and nothing has reduced it"
        )
    if has_copies and kind not in _GRADIENTS:
        return ""
    for run, own, full in (("B", samples[1], a), ("A", samples[0], b)):
        terms = read_partial_sum(own)
        if terms is None or terms.num_elements != full.num_elements or terms.sum is None:
            continue
        if full.sum is not None and _is_close(terms.sum, full, limit):
            return f"the ranks of run {run} hold partial sums: summed, they agree"
        num_ranks = len(terms.ranks)
        if num_ranks and full.sum is not None and _is_close(terms.sum / num_ranks, full, limit):
            return f"the mean over the ranks of run {run} agrees: they were not averaged"
    return ""


def _is_close(number: float, full: FullValue, limit: float) -> bool:
    """Whether a sum of elements is that of the full tensor, and not just near zero like it."""
    assert full.sum is not None
    error = abs(number - full.sum)
    scale = (full.norm or abs(full.sum)) * math.sqrt(max(1, full.num_elements))
    return error <= limit * scale and error <= 0.01 * abs(full.sum)


def find_problems(result: RunComparison, a: Recording, b: Recording) -> tuple[Finding, ...]:
    """The finding on the first deviation; copies that differ are one, too."""
    if not result.deviations:
        return ()
    first = result.deviations[0]
    facts = [_describe_place(first), _describe_figures(first)]
    if first.detail:
        facts.append(f"{first.detail[0].upper()}{first.detail[1:]}.")
    if (factor := _find_common_factor(result)) is not None:
        facts.append(f"All gradients that deviate are off by the same factor, {factor:.4g}.")
    if hint := _compare_collectives(first, a, b):
        facts.append(hint)
    copies = _find_copies(result, first)
    if copies is not None:
        facts.append(
            f"Rank {format_ranks(copies.ranks)} of run {copies.disagreeing_run} has another "
            f"copy of {NOUNS[copies.kind]} `{copies.name}` than the others."
        )
    problem = "differs" if first.suspect else _choose_problem(copies or first)
    remedy = REMEDIES[problem]
    if first.suspect:
        remedy = "Sum that output over the ranks before it is used."
    elif copies is None and first.kind in _GRADIENTS and first.detail:
        remedy = "Look for what keeps it from being reduced: no_sync(), or a hook that is lost."
    return (
        Finding(
            rule=f"run-{problem}",
            severity=Severity.ERROR,
            subject=first.suspect or name_deviation(first),
            fact=" ".join(facts),
            remedy=remedy,
        ),
    )


def _find_copies(result: RunComparison, first: RunDeviation) -> RunDeviation | None:
    """A buffer or parameter of the first module of which ranks have different copies."""
    if first.kind is not ValueKind.OUTPUT:
        return None
    within = f"{first.name}." if first.name else ""
    return next(
        (
            deviation
            for deviation in result.deviations
            if deviation.ranks
            and deviation.name.startswith(within)
            and deviation.kind in (ValueKind.BUFFER, ValueKind.UPDATED)
        ),
        None,
    )


def name_deviation(deviation: RunDeviation) -> str:
    """`layers.0.wq, output, step 3`."""
    name = deviation.name or "the model"
    path = f"[{deviation.path}]" if deviation.path else ""
    call = f", call {deviation.call}" if deviation.call else ""
    kind = NOUNS[deviation.kind]
    return f"{name}{path}, {kind}{call}, step {deviation.step}"


def _describe_place(first: RunDeviation) -> str:
    if first.suspect:
        name = first.name or "the model"
        return f"The output of `{name}` is the first to deviate, in step {first.step}."
    if first.ranks:
        return (
            f"Ranks disagree in step {first.step}: rank {format_ranks(first.ranks)} of run "
            f"{first.disagreeing_run} has another copy than the others."
        )
    return f"It is the first tensor that deviates, in step {first.step}."


def _describe_figures(first: RunDeviation) -> str:
    if first.kind is ValueKind.SETTING:
        return f"{first.sum_a:g} in A, {first.sum_b:g} in B."
    figures = []
    if first.norm_a is not None and first.norm_b is not None:
        figures.append(f"Norm {first.norm_a:.6g} in A, {first.norm_b:.6g} in B.")
    elif first.sum_a is not None and first.sum_b is not None:
        figures.append(f"Sum {first.sum_a:.6g} in A, {first.sum_b:.6g} in B.")
    if first.deviation is not None and first.limit is not None and not first.ranks:
        figures.append(f"Relative deviation {first.deviation:.1e}, noise up to {first.limit:.1e}.")
    return " ".join(figures)


def _find_common_factor(result: RunComparison) -> float | None:
    """The factor that all deviating gradients share; None if there is none."""
    gradients = [
        deviation for deviation in result.deviations if deviation.kind is ValueKind.GRADIENT
    ]
    ratios = [deviation.ratio for deviation in gradients]
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < 2 or len(known) < len(ratios):
        return None
    limit = max(deviation.limit or 0.0 for deviation in gradients)
    is_common = max(known) - min(known) <= 2 * limit * max(known)
    return known[0] if is_common else None


def _compare_collectives(first: RunDeviation, a: Recording, b: Recording) -> str:
    """A sentence on collectives that only one run issues for the module."""
    module = first.name
    if first.kind not in (ValueKind.OUTPUT, ValueKind.OUTPUT_GRADIENT):
        module = first.name.rpartition(".")[0]
    counts = [_count_collectives(recording, module) for recording in (a, b)]
    sides = []
    for run, own, others in (("A", *counts), ("B", *reversed(counts))):
        if only := [f"{kind}[{axis}]" for kind, axis in own if (kind, axis) not in others]:
            sides.append(f"{', '.join(only[:_MAX_COLLECTIVES])} in {run} only")
    return f"Collectives of {module or 'the model'}: {'; '.join(sides)}." if sides else ""


def _count_collectives(recording: Recording, module: str) -> Counter[tuple[str, str]]:
    def belongs(call: Collective) -> bool:
        owner = call.owner
        return owner is not None and (owner == module or owner.startswith(f"{module}."))

    return Counter(
        (call.kind.value, name_axis(call, recording.run.world_size))
        for call in recording.collectives
        if module and belongs(call)
    )


def _choose_problem(first: RunDeviation) -> str:
    if first.ranks:
        return "ranks-disagree"
    return _PROBLEMS.get(first.kind, "differs")


_PROBLEMS = {
    ValueKind.INPUT: "inputs",
    ValueKind.WEIGHT: "weights",
    ValueKind.SETTING: "setting",
}
REMEDIES = {
    "differs": "Compare what both runs do in this module; shardscope parity locates the op, with "
    "the model and this layout. Random numbers, as of dropout, differ between layouts.",
    "ranks-disagree": "Initialize and update it in the same way on all ranks, or broadcast it from "
    "one.",
    "inputs": "Give both runs the same global batch: the same data, seed and order of samples.",
    "weights": "Start both runs from the same checkpoint or seed; if they diverge in earlier "
    "steps, sample those.",
    "setting": "Set it to the same value in both runs; a schedule may count other steps.",
}
"""What to do about the first deviation, by the end of its finding's rule."""
