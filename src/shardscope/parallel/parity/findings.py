"""Records of what was examined: verdicts with their causes, divergences, findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from msgspec.structs import replace

from shardscope.numerics.noise import as_exact, measure
from shardscope.parallel.parity.causes import Explanation, explain
from shardscope.parallel.parity.examine import Examined
from shardscope.parallel.parity.judge import Judged
from shardscope.parallel.parity.locate import Parting, is_within
from shardscope.parallel.parity.opinions import CONFIRMED
from shardscope.parallel.parity.ops import WrongOp
from shardscope.parallel.parity.outcome import Outcome, tie_names
from shardscope.parallel.parity.remedies import describe_parting, suggest
from shardscope.record import (
    FINE,
    Agreement,
    Axis,
    Divergence,
    Finding,
    Parity,
    Phase,
    Severity,
    Suspect,
    TensorKind,
    TensorVerdict,
)

__all__ = ["find_problems", "make_parity"]

_EXPLAINABLE = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE)
_PHASES = {
    TensorKind.OUTPUT: Phase.FORWARD,
    TensorKind.GRADIENT: Phase.BACKWARD,
    TensorKind.BUFFER: Phase.FORWARD,
}
_MAX_ELEMENTS = 2**14
_NOISY = 0.1  # relative, of an output
_NAMED = 3  # tensors that a finding names


def make_parity(examined: Examined, axes: Mapping[str, int], *, is_in_processes: bool) -> Parity:
    """The record."""
    torn = _find_torn_ties(examined.reference, examined.judged)
    return Parity(
        axes=tuple(Axis(name=name, size=size) for name, size in axes.items()),
        tensors=tuple(_explained(one, examined, axes, torn) for one in examined.judged),
        divergences=tuple(
            _diverge(
                one,
                examined,
                _explain_parting(one, examined, axes, torn),
                examined.op if index == 0 else None,
            )
            for index, one in enumerate(examined.partings)
        ),
        num_compared_modules=len(examined.types),
        is_in_processes=is_in_processes,
        has_exact=examined.has_exact,
        has_backward=bool(examined.reference.gradients),
    )


def _explained(
    one: Judged, examined: Examined, axes: Mapping[str, int], torn: Mapping[str, str]
) -> TensorVerdict:
    verdict = one.verdict
    if verdict.agreement not in _EXPLAINABLE or verdict.suspect is not None:
        return verdict
    # Where it is known where it begins, what is large and elsewhere only follows from it.
    is_there = any(is_within(one.case.name, parting.module) for parting in examined.partings)
    if examined.partings and not is_there and math.prod(verdict.shape) > _MAX_ELEMENTS:
        return replace(verdict, suspect=Suspect.UNKNOWN)
    found = explain(one, axes)
    if one.case.kind is TensorKind.GRADIENT and one.case.name in torn:
        found = Explanation(Suspect.TORN_TIE, torn[one.case.name])
    detail = "; ".join(filter(None, (verdict.detail, found.detail)))
    return replace(verdict, suspect=found.suspect, ratio=found.ratio, detail=detail)


def _find_torn_ties(reference: Outcome, judged: Sequence[Judged]) -> dict[str, str]:
    """Parameters that were one, and whose gradients together are what that one's was."""
    wrong = {
        one.case.name: one
        for one in judged
        if one.case.kind is TensorKind.GRADIENT and one.verdict.agreement not in FINE
    }
    ties: dict[str, list[str]] = {}
    for name, first in tie_names(reference.gradients).items():
        ties.setdefault(first, []).append(name)
    torn: dict[str, str] = {}
    for names in ties.values():
        if len(names) > 1 and all(name in wrong for name in names) and _add_up(wrong, names):
            fact = f"{' and '.join(names)} were one tensor and are now separate: each has a part"
            torn |= dict.fromkeys(names, fact)
    return torn


def _add_up(wrong: Mapping[str, Judged], names: Sequence[str]) -> bool:
    cases = [wrong[name].case for name in names]
    parts = [as_exact(wrong[name].wholes[0]) for name in names if wrong[name].wholes]
    target, floor = cases[0].target, cases[0].floor
    if len(parts) < len(names) or target is None or floor is None:
        return False
    return floor.at(4.0).allows(measure(torch.stack(parts).sum(0), target))


def _diverge(
    parting: Parting, examined: Examined, found: Explanation, op: WrongOp | None
) -> Divergence:
    return Divergence(
        module=parting.module,
        phase=parting.phase,
        suspect=found.suspect,
        detail=describe_parting(parting, found.detail),
        type=examined.types.get(parting.module, ""),
        op="" if op is None else op.name,
        source=None if op is None else op.source,
        remedy=suggest(found.suspect, parting.phase),
    )


def _explain_parting(
    parting: Parting, examined: Examined, axes: Mapping[str, int], torn: Mapping[str, str]
) -> Explanation:
    if parting.judged.verdict.agreement is Agreement.NONFINITE:
        return Explanation(Suspect.UNKNOWN, parting.judged.verdict.detail)
    if parting.judged.case.kind is TensorKind.GRADIENT and parting.judged.case.name in torn:
        return Explanation(Suspect.TORN_TIE, torn[parting.judged.case.name])
    for one in examined.judged:
        if one.case.kind is TensorKind.PARAMETER and is_within(one.case.name, parting.module):
            cause = explain(one, axes)
            return Explanation(cause.suspect, f"its {one.case.name} is wrong, {cause.detail}")
    found = explain(parting.judged, axes)
    is_drawn = any(one.verdict.suspect is Suspect.RANDOMNESS for one in examined.judged)
    if found.suspect is Suspect.UNKNOWN and is_drawn:
        return Explanation(Suspect.RANDOMNESS, "ranks drew different numbers for the same value")
    return found


def find_problems(parity: Parity) -> Iterator[Finding]:
    """What a user should act on: the place where it begins, or, without one, what differs."""
    wrong = [one for one in parity.tensors if _severity(one.agreement) is Severity.ERROR]
    for one in parity.divergences:
        yield Finding(
            rule=f"parity-{one.suspect.replace('_', '-')}",
            severity=Severity.ERROR,
            subject=one.module or "the model itself",
            fact=f"{one.detail}.{f' The first op to differ is {one.op}.' if one.op else ''}",
            remedy=one.remedy,
            source=one.source,
        )
    if wrong and not parity.divergences:
        yield from _find_weights([one for one in wrong if one.kind is TensorKind.PARAMETER])
        yield from _find_tensors(wrong)
    if not wrong:
        yield from _find_harmless(parity)
        yield from _find_noisy(parity)
    if not parity.tensors:
        yield Finding(
            rule="parity-nothing",
            severity=Severity.WARNING,
            subject="the step",
            fact="it produced no outputs, gradients or changed buffers, so nothing was compared.",
            remedy="Return tensors from the model, or let the step call it.",
        )


def _find_weights(parameters: Sequence[TensorVerdict]) -> Iterator[Finding]:
    if not parameters:
        return
    first = parameters[0]
    suspect = first.suspect or Suspect.UNKNOWN
    yield Finding(
        rule="parity-weights",
        severity=Severity.ERROR,
        subject=first.name,
        fact=f"before the step, {_name_some(parameters)} {_is_are(parameters)} not what the "
        f"original has{f': {first.detail}' if first.detail else ''}.",
        remedy=suggest(suspect, Phase.FORWARD),
    )


def _find_tensors(wrong: Sequence[TensorVerdict]) -> Iterator[Finding]:
    groups: dict[tuple[TensorKind, Agreement, Suspect | None], list[TensorVerdict]] = {}
    for one in wrong:
        if one.kind is not TensorKind.PARAMETER:
            groups.setdefault((one.kind, one.agreement, one.suspect), []).append(one)
    for (kind, agreement, suspect), some in groups.items():
        rule = (suspect or agreement).replace("_", "-")
        detail = f": {some[0].detail}" if some[0].detail else ""
        yield Finding(
            rule=f"parity-{rule}",
            severity=Severity.ERROR,
            subject=some[0].name or "the output",
            fact=f"{kind} {agreement.replace('_', ' ')} of {_name_some(some)}{detail}.",
            remedy=suggest(suspect or Suspect.UNKNOWN, _PHASES[kind]),
        )


def _find_harmless(parity: Parity) -> Iterator[Finding]:
    for agreement, fact, remedy in (
        (
            Agreement.RANDOM,
            "differ only in what was drawn at random: with dropout and the like off they agree",
            "Nothing is wrong; set dropout to 0 to compare without a second run.",
        ),
        (
            Agreement.ROUNDED,
            "differ more than a single device does, by rounding only: in double precision they "
            "agree",
            "Nothing is wrong; reduce in float32 if it matters.",
        ),
    ):
        some = [one for one in parity.tensors if one.agreement is agreement]
        if some:
            yield Finding(
                rule=f"parity-{agreement}",
                severity=Severity.INFO,
                subject=some[0].name or "the output",
                fact=f"{_name_some(some)} {fact}.",
                remedy=remedy,
            )


def _find_noisy(parity: Parity) -> Iterator[Finding]:
    """Outputs that are so noisy that nearly anything would be called close."""
    for one in parity.tensors:
        is_output = one.kind is TensorKind.OUTPUT and one.agreement is Agreement.CLOSE
        if is_output and one.detail != CONFIRMED and (one.noise or 0.0) > _NOISY:
            yield Finding(
                rule="parity-noisy",
                severity=Severity.WARNING,
                subject=one.name or "the output",
                fact=f"it is close, but moves by {one.noise:.0%} when weights change in their last "
                "place, and double precision could not be asked: nearly anything would be close.",
                remedy="Compare fewer layers, or let both versions run in float64.",
            )


def _severity(agreement: Agreement) -> Severity:
    harmless = (*FINE, Agreement.RANDOM, Agreement.ROUNDED)
    return Severity.INFO if agreement in harmless else Severity.ERROR


def _name_some(some: Sequence[TensorVerdict]) -> str:
    names = [one.name or "the output" for one in some[:_NAMED]]
    more = f" and {len(some) - _NAMED} more" if len(some) > _NAMED else ""
    return ", ".join(names) + more


def _is_are(some: Sequence[TensorVerdict]) -> str:
    return "is" if len(some) == 1 else "are"
