"""Verdicts reconsidered: in double precision, without random numbers, beside right gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace

from shardscope.numerics.noise import as_exact, epsilon, measure
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.judge import Judged, describe_dtype, judge, name_dtype
from shardscope.parallel.parity.outcome import Key
from shardscope.record import FINE, TOLERABLE, Agreement, Suspect, TensorKind

__all__ = [
    "AGREES_EXACTLY",
    "CONFIRMED",
    "accept_own_outputs",
    "apply_exact",
    "apply_steady",
    "is_coarse",
]

CONFIRMED = "agrees in double precision too"
"""The detail of a tensor that agrees in both precisions."""
AGREES_EXACTLY = "agrees in double precision"
"""What the detail of a tensor ends with that is less accurate, and agrees in double precision."""
_COARSE = 1e-4  # a last place that hides more than rounding
_NOISY = 1e-3  # a noise that does
_MAX_SAMPLES = 1024  # that are compared each with each
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
    return epsilon(result.dtype or reference.dtype) > _COARSE or is_noisy


def apply_exact(judged: Sequence[Judged], wide: Mapping[Key, Judged]) -> list[Judged]:
    """Verdicts that know both: what agrees exactly is rounded, what differs exactly is wrong."""
    return [_decide(result, wide.get((result.case.kind, result.case.name))) for result in judged]


def _decide(result: Judged, wide: Judged | None) -> Judged:
    if wide is None:
        return result
    agreement, exact = result.verdict.agreement, wide.verdict.agreement
    is_rounded = agreement is Agreement.ROUNDED or agreement in _NUMERIC
    is_close = agreement in FINE or agreement is Agreement.ROUNDED
    if is_rounded and exact in FINE:
        detail = AGREES_EXACTLY
        if result.dtype is not None:
            detail = f"{describe_dtype(result)}; {detail}"
        verdict = replace(
            result.verdict, agreement=Agreement.ROUNDED, suspect=Suspect.ROUNDING, detail=detail
        )
        return dataclasses.replace(result, verdict=verdict)
    if is_close and exact in _NUMERIC:
        dtype = result.verdict.dtype if result.dtype is None else name_dtype(result.dtype)
        verdict = replace(
            wide.verdict,
            dtype=result.verdict.dtype,
            detail=f"within the noise of {dtype}, but differs in double precision",
        )
        return dataclasses.replace(wide, verdict=verdict, dtype=result.dtype)
    if agreement in FINE and exact in FINE and result.dtype is None:
        verdict = replace(result.verdict, detail=CONFIRMED)
        return dataclasses.replace(result, verdict=verdict)
    # In double precision there is less noise to see the cause through.
    if is_close or not wide.full:
        return result
    return dataclasses.replace(wide, verdict=result.verdict, dtype=result.dtype)


def apply_steady(judged: Sequence[Judged], steady: Mapping[Key, Judged]) -> list[Judged]:
    """Verdicts that know what comes of it when nothing is drawn."""
    decided = []
    for result in judged:
        other = steady.get((result.case.kind, result.case.name))
        if other is None or result.verdict.agreement in TOLERABLE:
            decided.append(result)
        elif other.verdict.agreement in TOLERABLE:
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
    return dataclasses.replace(result, verdict=verdict)


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
        result.verdict.agreement in TOLERABLE for result in gradients
    )
    judged = [_accept_stage(result, stages) for result in judged]
    return [_accept(result, axes) if is_right else result for result in judged]


def _accept(result: Judged, axes: Mapping[str, int]) -> Judged:
    if result.case.kind is not TensorKind.OUTPUT or result.verdict.agreement in TOLERABLE:
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
    return dataclasses.replace(result, verdict=verdict, full=())


def _accept_stage(result: Judged, stages: Sequence[Sequence[int]]) -> Judged:
    """Of an output that is right on the ranks of one pipeline stage, the last, those count."""
    is_wrong = result.verdict.agreement not in TOLERABLE and result.case.reference is not None
    if result.case.kind is not TensorKind.OUTPUT or not is_wrong or len(stages) < 2:
        return result
    for stage in stages:
        case = result.case.choose_ranks(stage)
        if None not in case.ranks and judge(case).verdict.agreement in TOLERABLE:
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
