"""Verdicts reconsidered: in double precision, and with no random numbers drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from shardscope.numerics.noise import epsilon
from shardscope.parallel.parity.judge import Judged
from shardscope.parallel.parity.outcome import Key
from shardscope.record import FINE, Agreement, Suspect, TensorKind

__all__ = ["CONFIRMED", "apply_exact", "apply_steady", "is_coarse"]

CONFIRMED = "agrees in double precision too"
"""The detail of a tensor that agrees in both precisions."""
_COARSE = 1e-4  # a last place that hides more than rounding
_NOISY = 1e-3  # a noise that does
_NUMERIC = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE)


def is_coarse(judged: Sequence[Judged]) -> bool:
    """Whether the noise of what was compared may hide an error: of half precision it does.

    So it does where outputs move by much when weights move by little. Gradients that are nothing
    but noise are common: those of a bias before a norm, or of the keys of attention.
    """
    return any(_is_coarse(one) for one in judged)


def _is_coarse(one: Judged) -> bool:
    floor, reference = one.case.floor, one.case.reference
    if floor is None or reference is None:
        return False
    is_noisy = one.case.kind is TensorKind.OUTPUT and floor.rms > _NOISY * floor.scale
    return epsilon(reference.dtype) > _COARSE or is_noisy


def apply_exact(judged: Sequence[Judged], wide: Mapping[Key, Judged]) -> list[Judged]:
    """Verdicts that know both: what agrees exactly is rounded, what differs exactly is wrong."""
    return [_decide(one, wide.get((one.case.kind, one.case.name))) for one in judged]


def _decide(one: Judged, wide: Judged | None) -> Judged:
    if wide is None:
        return one
    is_fine = one.verdict.agreement in FINE
    if wide.verdict.agreement in FINE and one.verdict.agreement in _NUMERIC:
        verdict = replace(
            one.verdict,
            agreement=Agreement.ROUNDED,
            suspect=Suspect.ROUNDING,
            detail="agrees in double precision",
        )
        return Judged(one.case, verdict, one.full, one.layout)
    if is_fine and wide.verdict.agreement in _NUMERIC:
        verdict = replace(
            wide.verdict,
            dtype=one.verdict.dtype,
            detail=f"within the noise of {one.verdict.dtype}, but differs in double precision",
        )
        return Judged(wide.case, verdict, wide.full, wide.layout)
    if is_fine and wide.verdict.agreement in FINE:
        return Judged(one.case, replace(one.verdict, detail=CONFIRMED), layout=one.layout)
    # In double precision there is less noise to see the cause through.
    if is_fine or not wide.full:
        return one
    return Judged(wide.case, one.verdict, wide.full, wide.layout)


def apply_steady(judged: Sequence[Judged], steady: Mapping[Key, Judged]) -> list[Judged]:
    """Verdicts that know what comes of it when nothing is drawn."""
    decided = []
    for one in judged:
        other = steady.get((one.case.kind, one.case.name))
        if other is None or one.verdict.agreement in FINE:
            decided.append(one)
        elif other.verdict.agreement in FINE:
            decided.append(_blame_draw(one))
        else:
            decided.append(other)
    return decided


def _blame_draw(one: Judged) -> Judged:
    """Ranks that drew different numbers for what each has whole are wrong; else it is chance."""
    is_torn = one.verdict.agreement is Agreement.RANKS_DISAGREE
    verdict = replace(
        one.verdict,
        agreement=Agreement.RANKS_DISAGREE if is_torn else Agreement.RANDOM,
        suspect=Suspect.RANDOMNESS,
        detail="agrees when no random numbers are drawn",
    )
    return Judged(one.case, verdict, one.full, one.layout)
