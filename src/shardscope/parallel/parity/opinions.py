"""Verdicts reconsidered: in double precision, without random numbers, beside right gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace

from shardscope.numerics.noise import as_exact, epsilon, measure
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.judge import Judged, judge
from shardscope.parallel.parity.outcome import Key
from shardscope.record import FINE, Agreement, Suspect, TensorKind

__all__ = ["CONFIRMED", "accept_own_outputs", "apply_exact", "apply_steady", "is_coarse"]

CONFIRMED = "agrees in double precision too"
"""The detail of a tensor that agrees in both precisions."""
_COARSE = 1e-4  # a last place that hides more than rounding
_NOISY = 1e-3  # a noise that does
_MAX_SAMPLES = 1024  # that are compared each with each
_HARMLESS = (*FINE, Agreement.ROUNDED, Agreement.RANDOM)
_NUMERIC = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE)


def is_coarse(judged: Sequence[Judged]) -> bool:
    """Whether the noise of what was compared may hide an error: of half precision it does.

    So it does where outputs move by much when weights move by little. Gradients that are nothing
    but noise are common: those of a bias before a norm, or of the keys of attention.
    """
    return any(_is_coarse(result) for result in judged)


def _is_coarse(result: Judged) -> bool:
    floor, reference = result.case.floor, result.case.reference
    if floor is None or reference is None:
        return False
    is_noisy = result.case.kind is TensorKind.OUTPUT and floor.rms > _NOISY * floor.scale
    return epsilon(reference.dtype) > _COARSE or is_noisy


def apply_exact(judged: Sequence[Judged], wide: Mapping[Key, Judged]) -> list[Judged]:
    """Verdicts that know both: what agrees exactly is rounded, what differs exactly is wrong."""
    return [_decide(result, wide.get((result.case.kind, result.case.name))) for result in judged]


def _decide(result: Judged, wide: Judged | None) -> Judged:
    if wide is None:
        return result
    is_fine = result.verdict.agreement in FINE
    if wide.verdict.agreement in FINE and result.verdict.agreement in _NUMERIC:
        verdict = replace(
            result.verdict,
            agreement=Agreement.ROUNDED,
            suspect=Suspect.ROUNDING,
            detail="agrees in double precision",
        )
        return Judged(result.case, verdict, result.full, result.layout)
    if is_fine and wide.verdict.agreement in _NUMERIC:
        verdict = replace(
            wide.verdict,
            dtype=result.verdict.dtype,
            detail=f"within the noise of {result.verdict.dtype}, but differs in double precision",
        )
        return Judged(wide.case, verdict, wide.full, wide.layout)
    if is_fine and wide.verdict.agreement in FINE:
        return Judged(result.case, replace(result.verdict, detail=CONFIRMED), layout=result.layout)
    # In double precision there is less noise to see the cause through.
    if is_fine or not wide.full:
        return result
    return Judged(wide.case, result.verdict, wide.full, wide.layout)


def apply_steady(judged: Sequence[Judged], steady: Mapping[Key, Judged]) -> list[Judged]:
    """Verdicts that know what comes of it when nothing is drawn."""
    decided = []
    for result in judged:
        other = steady.get((result.case.kind, result.case.name))
        if other is None or result.verdict.agreement in FINE:
            decided.append(result)
        elif other.verdict.agreement in FINE:
            decided.append(_blame_draw(result))
        else:
            decided.append(other)
    return decided


def _blame_draw(result: Judged) -> Judged:
    """Ranks that drew different numbers for a replicated tensor are wrong; else it is chance."""
    is_replicated = result.verdict.agreement is Agreement.RANKS_DISAGREE
    verdict = replace(
        result.verdict,
        agreement=Agreement.RANKS_DISAGREE if is_replicated else Agreement.RANDOM,
        suspect=Suspect.RANDOMNESS,
        detail="agrees when no random numbers are drawn",
    )
    return Judged(result.case, verdict, result.full, result.layout)


def accept_own_outputs(
    judged: Sequence[Judged], stages: Sequence[Sequence[int]], axes: Mapping[str, int]
) -> list[Judged]:
    """Verdicts on outputs that each rank may have of its own.

    Those are what a pipeline stage returns that does not have the last modules, and, where all
    gradients are right, the loss of a rank's own shard and samples in the order in which ranks
    took them.
    """
    gradients = [result for result in judged if result.case.kind is TensorKind.GRADIENT]
    is_right = bool(gradients) and all(
        result.verdict.agreement in _HARMLESS for result in gradients
    )
    judged = [_accept_stage(result, stages) for result in judged]
    return [_accept(result, axes) if is_right else result for result in judged]


def _accept(result: Judged, axes: Mapping[str, int]) -> Judged:
    if result.case.kind is not TensorKind.OUTPUT or result.verdict.agreement in _HARMLESS:
        return result
    is_scalar = result.case.is_scalar or math.prod(result.verdict.shape) == 1
    if is_scalar and result.verdict.agreement is Agreement.RANKS_DISAGREE:
        cause = explain(result, axes)
        if cause.suspect is Suspect.MISSING_REDUCTION and cause.reduction:
            verb = "summed" if cause.reduction == "sum" else "averaged"
            over = " and ".join(cause.axes)
            return _call_close(result, f"each rank's own; {verb} over {over} they agree")
    elif result.full and _has_same_samples(result):
        return _call_close(result, "agrees, with its samples in another order")
    return result


def _call_close(result: Judged, detail: str) -> Judged:
    verdict = replace(result.verdict, agreement=Agreement.CLOSE, ranks=(), detail=detail)
    return Judged(result.case, verdict, layout=result.layout)


def _accept_stage(result: Judged, stages: Sequence[Sequence[int]]) -> Judged:
    """Of an output that is right on the ranks of one pipeline stage, the last, those count."""
    is_wrong = result.verdict.agreement not in _HARMLESS and result.case.reference is not None
    if result.case.kind is not TensorKind.OUTPUT or not is_wrong or len(stages) < 2:
        return result
    for stage in stages:
        case = result.case.choose_ranks(stage)
        if None not in case.ranks and judge(case).verdict.agreement in FINE:
            return _call_close(result, "agrees on the ranks that have the last modules")
    return result


def _has_same_samples(result: Judged) -> bool:
    """Whether every rank has all samples, if in another order along the batch."""
    target, floor, dim = result.case.target, result.case.floor, result.case.batch_dim
    if target is None or floor is None or target.ndim < 2 or target.shape[dim] > _MAX_SAMPLES:
        return False
    wanted = target.movedim(dim, 0).flatten(1)
    for full in result.full:
        samples = as_exact(full).movedim(dim, 0).flatten(1)
        nearest = torch.cdist(samples, wanted).argmin(1)
        is_each = len(torch.unique(nearest)) == len(wanted)
        if not is_each or not floor.allows(measure(samples, wanted[nearest])):
            return False
    return True
