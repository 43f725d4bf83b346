"""Revises verdicts: by double precision, without random numbers, or by correct gradients."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from msgspec.structs import replace

from shardscope.numerics import Distance, epsilon, to_fp64_on_cpu
from shardscope.parallel.equivalence import (
    OF_A_RANK,
    Key,
    TensorComparison,
    TrainingValues,
    compare_case,
    describe_dtype,
    name_dtype,
    ranks_along,
)
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.evidence import list_sizes
from shardscope.record import FINE, TOLERABLE, Agreement, Suspect, TensorKind

CONFIRMED = "agrees in double precision too"
"""The detail of a tensor that agrees in both precisions."""
AGREES_IN_FP64 = "agrees in double precision"
"""What the detail of a tensor ends with that is less accurate, and agrees in double precision."""
ONLY_IN_OWN = "agrees in its own precision; the single device's result in double is another"
"""The detail of a tensor of which double precision says nothing, as the original differs in it."""
_COARSE = 1e-4  # a machine epsilon that may hide an error
_MAX_ROUNDING = 0.5  # the relative error above which a tensor has other values, not rounded ones
_NOISY = 1e-3  # a relative noise that may hide an error
_LEAST_FP64 = 1e-10  # the relative error in double precision below which it is rounding
_MAX_SAMPLES = 1024  # largest number of samples that are compared pairwise
_EXACT = 1e-4  # how far from a multiple a number may be
_NUMERIC = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE)


def is_coarse(comparisons: Sequence[TensorComparison]) -> bool:
    """Whether the noise of any compared tensor may hide an error.

    It may in half precision, and where small changes of weights change outputs by much.
    Gradients that are nothing but noise do not count, as they are common: those of a bias
    before a norm, or of the keys of attention.
    """
    return any(_is_coarse(result) for result in comparisons)


def _is_coarse(result: TensorComparison) -> bool:
    floor, reference = result.case.floor, result.case.reference
    if floor is None or reference is None:
        return False
    is_noisy = result.case.kind is TensorKind.OUTPUT and floor.rms > _NOISY * floor.scale
    return result.epsilon > _COARSE or is_noisy


def recheck_fp64(
    comparisons: Sequence[TensorComparison], fp64_comparisons: Mapping[Key, TensorComparison]
) -> list[TensorComparison]:
    """Verdicts that use double precision: agreement there is rounding, a difference an error."""
    return [_decide(result, _find_again(result, fp64_comparisons)) for result in comparisons]


def _find_again(
    result: TensorComparison, comparisons: Mapping[Key, TensorComparison]
) -> TensorComparison | None:
    """The comparison of the same tensor in another run; None if it was not compared there.

    Where a run has no gradient after clipping, the gradient is that which the optimizer gets.
    """
    kind, name = result.case.kind, result.case.name
    same = comparisons.get((kind, name))
    if same is None and kind is TensorKind.CLIPPED:
        return comparisons.get((TensorKind.GRADIENT, name))
    return same


def _decide(result: TensorComparison, fp64_result: TensorComparison | None) -> TensorComparison:
    if fp64_result is None:
        return result
    agreement, fp64_agreement = result.verdict.agreement, fp64_result.verdict.agreement
    is_rounded = agreement is Agreement.ROUNDED or agreement in _NUMERIC
    is_close = agreement in FINE or agreement is Agreement.ROUNDED
    if is_rounded and fp64_agreement in FINE and _is_small(result):
        detail = AGREES_IN_FP64
        if result.dtype is not None:
            detail = f"{describe_dtype(result)}; {detail}"
        verdict = replace(
            result.verdict, agreement=Agreement.ROUNDED, suspect=Suspect.ROUNDING, detail=detail
        )
        return dataclasses.replace(result, verdict=verdict)
    if is_close and fp64_agreement in _NUMERIC and result.is_near_own:
        verdict = replace(result.verdict, detail=ONLY_IN_OWN)
        return dataclasses.replace(result, verdict=verdict)
    if is_close and fp64_agreement in _NUMERIC and not _is_fp64_rounding(result, fp64_result):
        dtype = result.verdict.dtype if result.dtype is None else name_dtype(result.dtype)
        verdict = replace(
            fp64_result.verdict,
            dtype=result.verdict.dtype,
            detail=f"within the noise of {dtype}, but differs in double precision",
        )
        return dataclasses.replace(fp64_result, verdict=verdict, dtype=result.dtype)
    if agreement in FINE and fp64_agreement in FINE and result.dtype is None:
        verdict = replace(result.verdict, detail=CONFIRMED)
        return dataclasses.replace(result, verdict=verdict)
    # Double precision has less noise, so its tensors show the cause better.
    if is_close or not fp64_result.full:
        return result
    return dataclasses.replace(fp64_result, verdict=result.verdict, dtype=result.dtype)


def _is_fp64_rounding(result: TensorComparison, fp64_result: TensorComparison) -> bool:
    """Whether an error in double precision is one of its rounding, however little is expected.

    An optimizer that divides by the size of a gradient makes rounding of small gradients larger. A
    gradient that is zero in exact arithmetic may, by chance, be the same in perturbed runs: the
    noise of `result`, in the model's own precision, says how large its rounding can be.
    """
    verdict, floor = fp64_result.verdict, fp64_result.case.floor
    if verdict.max_error is None or floor is None:
        return False
    rms = verdict.max_error if verdict.error is None else verdict.error * floor.scale
    own, reference = result.case.floor, result.case.reference
    if own is not None and reference is not None:
        finer = own.scale_by(epsilon(torch.float64) / epsilon(reference.dtype))
        if finer.allows(Distance(rms, verdict.max_error)):
            return True
    if verdict.error is None:
        return False
    return verdict.error <= _LEAST_FP64 and verdict.max_error <= _LEAST_FP64 * floor.top


def _is_small(result: TensorComparison) -> bool:
    """Whether rounding can explain an error: ranks may take another path in double precision.

    It can where the tensor is nothing but noise on the single device, as the gradient of a bias of
    keys: the ranks may compute in a much lower precision.
    """
    error, noise = result.verdict.error, result.verdict.noise
    if error is None or noise is None or noise > _MAX_ROUNDING:
        return True
    return error <= max(_MAX_ROUNDING, 100 * noise)


def recheck_without_rng(
    comparisons: Sequence[TensorComparison],
    deterministic_comparisons: Mapping[Key, TensorComparison],
) -> list[TensorComparison]:
    """Verdicts that use runs without random numbers: agreement there means randomness."""
    decided = []
    for result in comparisons:
        deterministic_result = _find_again(result, deterministic_comparisons)
        if deterministic_result is None or result.verdict.agreement in TOLERABLE:
            decided.append(result)
        elif deterministic_result.verdict.agreement in TOLERABLE:
            is_own = _is_own(result, deterministic_result)
            decided.append(_attribute_to_rng(result, is_own=is_own))
        else:
            decided.append(deterministic_result)
    return decided


def _is_own(result: TensorComparison, deterministic_result: TensorComparison) -> bool:
    """Whether a number is that of each rank's own samples, and differs only between those."""
    case, floor = result.case, result.case.floor
    if not deterministic_result.reduction or not case.batch_axes or floor is None:
        return False
    values = [None if value is None else to_fp64_on_cpu(value) for value in case.ranks]
    lines = (
        line
        for axis in range(len(case.sizes))
        if axis not in case.batch_axes
        for line in ranks_along(case.sizes, axis)
    )
    return all(
        value is not None and first is not None and floor.covers(value, first)
        for first, value in ((values[line[0]], values[rank]) for line in lines for rank in line)
    )


def _attribute_to_rng(result: TensorComparison, *, is_own: bool) -> TensorComparison:
    """An error if ranks drew different numbers for a replicated tensor, otherwise harmless."""
    is_replicated = result.verdict.agreement is Agreement.RANKS_DISAGREE and not is_own
    verdict = replace(
        result.verdict,
        agreement=Agreement.RANKS_DISAGREE if is_replicated else Agreement.RANDOM,
        suspect=Suspect.RANDOMNESS,
        detail="agrees when no random numbers are drawn",
    )
    return dataclasses.replace(result, verdict=verdict)


_OF_TRAINING = (
    TensorKind.GRADIENT,
    TensorKind.NORM,
    TensorKind.CLIPPED,
    TensorKind.SETTING,
    TensorKind.STATE,
    TensorKind.UPDATED,
)
"""The kinds of tensors by which the parallel version trains as the single device does."""


def accept_own_values(
    steps: Sequence[Sequence[TensorComparison]],
    stages: Sequence[Sequence[int]],
    axes: Mapping[str, int],
    references: Sequence[TrainingValues],
) -> list[list[TensorComparison]]:
    """Accept values of each step that may rightly differ between ranks.

    These are the outputs of pipeline stages without the last modules and, if the model is trained
    as on the single device until then, a loss or a count of a rank's own shard, the loss of a
    micro-batch with another scale, and samples in the order in which ranks took them. Numbers that
    a program reads to compute with, and that are neither a loss nor a norm, belong to how it
    computes. Gradients may be reduced elsewhere than in `.grad`, as by an optimizer of shards, if
    all updates agree.
    """
    if _are_updates_right(steps):
        steps = [[_accept_own_part(result, axes) for result in step] for step in steps]
    decided, is_right, has_gradients = [], True, False
    for step, reference in zip(steps, references, strict=True):
        of_training = [
            result
            for result in step
            if result.case.kind in _OF_TRAINING and not _is_scalar_state(result)
        ]
        has_gradients |= any(result.case.kind is TensorKind.GRADIENT for result in of_training)
        # A step that is wrong makes those after it wrong, and not those before it.
        is_right &= all(result.verdict.agreement in TOLERABLE for result in of_training)
        is_trained = is_right and has_gradients
        logged = reference.find_logged()
        accepted = (
            _accept_reading(_accept_stage(result, stages), axes, logged, is_right=is_trained)
            for result in step
        )
        decided.append([_accept(result, axes, is_right=is_trained) for result in accepted])
    return decided


def _are_updates_right(steps: Sequence[Sequence[TensorComparison]]) -> bool:
    """Whether parameters with wrong gradients are changed by the steps, and all rightly."""
    updated: dict[str, list[TensorComparison]] = {}
    wrong: set[str] = set()
    for result in itertools.chain.from_iterable(steps):
        is_wrong = result.verdict.agreement not in TOLERABLE
        if result.case.kind is TensorKind.UPDATED:
            updated.setdefault(result.case.name, []).append(result)
            if is_wrong:
                return False
        if result.case.kind is TensorKind.GRADIENT and is_wrong:
            wrong.add(result.case.name)
    values = [[result.case.reference for result in updated.get(name, ())] for name in wrong]
    return bool(wrong) and all(
        len(of_steps) > 1
        and any(
            first is not None and second is not None and not torch.equal(first, second)
            for first, second in itertools.pairwise(of_steps)
        )
        for of_steps in values
    )


def _accept_own_part(result: TensorComparison, axes: Mapping[str, int]) -> TensorComparison:
    """Accept a gradient of which each rank has its own part."""
    is_gradient = result.case.kind in (TensorKind.GRADIENT, TensorKind.CLIPPED)
    if not is_gradient or result.verdict.agreement is not Agreement.RANKS_DISAGREE:
        return result
    cause = explain(result, axes)
    if cause.suspect is not Suspect.MISSING_REDUCTION or not cause.reduction:
        return result
    return call_close(result, "each rank's own part; all updated parameters agree")


def _accept_reading(
    result: TensorComparison, axes: Mapping[str, int], logged: Collection[Key], *, is_right: bool
) -> TensorComparison:
    """Accept a number that is no loss or norm, or a sum over ranks that may be divided later."""
    case = result.case
    is_read = case.kind is TensorKind.REPORTED and not case.name.startswith("returned")
    is_wrong = result.verdict.agreement not in TOLERABLE
    if not is_right or not is_read or not is_wrong:
        return result
    if (case.kind, case.name) in logged:
        number = _find_multiple(result, axes)
        is_multiple = result.verdict.agreement is Agreement.DIFFERS and number is not None
        return call_close(result, f"summed over {number} ranks") if is_multiple else result
    return call_close(result, "neither a loss nor a norm; all that is trained agrees")


def _find_multiple(result: TensorComparison, axes: Mapping[str, int]) -> int | None:
    """The number of ranks that a number is a multiple by on every rank; None if there is none."""
    target = result.case.target
    if target is None or not result.full or not bool(target.all()):
        return None
    ratios = torch.cat([full.double().reshape(-1) / target.reshape(-1) for full in result.full])
    return next(
        (size for _, size in list_sizes(axes) if bool(((ratios / size - 1).abs() < _EXACT).all())),
        None,
    )


def _is_scalar_state(result: TensorComparison) -> bool:
    """Whether it is a number that an optimizer keeps, such as the last loss of LBFGS."""
    return result.case.kind is TensorKind.STATE and math.prod(result.verdict.shape) == 1


def _accept(
    result: TensorComparison, axes: Mapping[str, int], *, is_right: bool
) -> TensorComparison:
    is_own = result.case.kind in OF_A_RANK or _is_scalar_state(result)
    if not is_own or result.verdict.agreement in TOLERABLE or not is_right:
        return result
    if result.case.kind is TensorKind.LOSS:
        return call_close(result, "has another scale on the ranks; all gradients agree")
    is_scalar = result.case.is_scalar or math.prod(result.verdict.shape) == 1
    if is_scalar and result.verdict.agreement is Agreement.RANKS_DISAGREE:
        cause = explain(result, axes)
        if cause.suspect is Suspect.MISSING_REDUCTION and cause.reduction:
            verb = "summed" if cause.reduction == "sum" else "averaged"
            over = " and ".join(cause.axes)
            return call_close(result, f"each rank's own; {verb} over {over} they agree")
        if result.case.kind is not TensorKind.OUTPUT and _is_between(result):
            return call_close(result, "each rank's own; the single device's is between them")
    elif result.case.kind is TensorKind.OUTPUT and result.full and _has_same_samples(result):
        return call_close(result, "agrees, with its samples in another order")
    return result


def _is_between(result: TensorComparison) -> bool:
    """Whether the single device's value is between the least and the largest of the ranks."""
    target = result.case.target
    if target is None or not result.full:
        return False
    values = torch.stack([full.double().reshape(target.shape) for full in result.full])
    return bool(((values.amin(0) <= target) & (target <= values.amax(0))).all())


def call_close(result: TensorComparison, detail: str) -> TensorComparison:
    """Accept a tensor, for a reason that its detail says."""
    verdict = replace(result.verdict, agreement=Agreement.CLOSE, ranks=(), detail=detail)
    return dataclasses.replace(result, verdict=verdict, full=())


def _accept_stage(result: TensorComparison, stages: Sequence[Sequence[int]]) -> TensorComparison:
    """Accept an output that agrees on the ranks of one pipeline stage, the last.

    Or that the single device does not have, and one stage, such as the last, does not have either.
    """
    is_wrong = result.verdict.agreement not in TOLERABLE
    if result.case.kind is not TensorKind.OUTPUT or not is_wrong or len(stages) < 2:
        return result
    for stage in stages:
        case = result.case.choose_ranks(stage)
        if result.case.reference is None and not any(tensor is not None for tensor in case.ranks):
            return call_close(result, "an output of another pipeline stage than the last")
        if None not in case.ranks and compare_case(case).verdict.agreement in TOLERABLE:
            return call_close(result, "agrees on the ranks that have the last modules")
    return result


def _has_same_samples(result: TensorComparison) -> bool:
    """Whether every rank has all samples, in any order along the batch."""
    target, floor, dim = result.case.target, result.case.floor, result.case.batch_dim
    if target is None or floor is None or target.ndim < 2 or target.shape[dim] > _MAX_SAMPLES:
        return False
    wanted = target.movedim(dim, 0).flatten(1)
    for full in result.full_in_fp64():
        samples = full.movedim(dim, 0).flatten(1)
        nearest = torch.cdist(samples, wanted).argmin(1)
        is_each = len(torch.unique(nearest)) == len(wanted)
        if not is_each or not floor.covers(samples, wanted[nearest]):
            return False
    return True
