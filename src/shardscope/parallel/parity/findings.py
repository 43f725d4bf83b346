"""Findings of a comparison: its problems, and differences that are harmless but worth knowing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardscope.numerics import epsilon
from shardscope.parallel.equivalence import TensorComparison, name_dtype
from shardscope.parallel.parity.evidence import MAX_NOISE
from shardscope.parallel.parity.explanation import list_names
from shardscope.parallel.parity.problem import Problem
from shardscope.parallel.parity.recheck import AGREES_IN_FP64, CONFIRMED
from shardscope.parallel.parity.result import ParityResult
from shardscope.record import (
    FINE,
    Agreement,
    Finding,
    Parity,
    Severity,
    TensorKind,
)

_COARSE = 0.1 * epsilon(torch.float16)  # the relative error of a tensor that was rounded to it
_COARSER = 100.0  # times the noise


def list_findings(
    parity_result: ParityResult, parity: Parity, problems: Sequence[Problem]
) -> Iterator[Finding]:
    """Findings for the problems, and for harmless differences worth knowing."""
    for problem in problems:
        yield Finding(
            rule=problem.rule or f"parity-{problem.cause.suspect.replace('_', '-')}",
            severity=Severity.ERROR,
            subject=problem.subject,
            fact=problem.fact,
            remedy=problem.remedy,
            source=problem.source,
        )
    yield from _find_dtypes(parity_result)
    if not problems:
        yield from _find_rounded_gradients(parity_result)
        yield from _find_harmless(parity)
        yield from _find_noisy(parity)
    if not parity.tensors:
        yield Finding(
            rule="parity-nothing",
            severity=Severity.WARNING,
            subject="the step",
            fact="The step produced no outputs, gradients or changed buffers, so nothing was "
            "compared.",
            remedy="Return tensors from the model, or call the model in the step.",
        )


def _find_dtypes(parity_result: ParityResult) -> Iterator[Finding]:
    """Tensors that have another dtype on the ranks; one finding per kind."""
    groups: dict[tuple[TensorKind, torch.dtype, str], list[str]] = {}
    for result in parity_result.comparisons:
        if result.dtype is not None and result.case.kind is not TensorKind.PARAMETER:
            key = (result.case.kind, result.dtype, result.verdict.dtype)
            groups.setdefault(key, []).append(result.case.name or "the output")
    for (kind, dtype, wanted), names in groups.items():
        policy = f"set output_dtype=torch.{wanted} in FSDP's MixedPrecisionPolicy, or "
        what = "the gradient of " if kind is TensorKind.GRADIENT else ""
        remedy = {
            TensorKind.OUTPUT: f"{policy if dtype.is_floating_point else ''}convert the output to "
            f"{wanted}.",
            TensorKind.GRADIENT: f"keep the tensor that it is the gradient of in {wanted} on the "
            "ranks.",
        }.get(kind, f"keep the buffer in {wanted} on the ranks.")
        yield Finding(
            rule="parity-dtype",
            severity=Severity.INFO,
            subject=names[0],
            fact=f"The dtype of {what}{list_names(names)} is {name_dtype(dtype)} "
            f"instead of {wanted}.",
            remedy=f"If {wanted} is needed, {remedy}",
        )


def _find_rounded_gradients(parity_result: ParityResult) -> Iterator[Finding]:
    """Gradients in float32 that were rounded to half precision, though nothing asks for that.

    They were cast before they were reduced. Where a policy or a hook of torch's asks for it, or
    outputs are rounded too, that is on purpose.
    """
    # Of the first step: later ones begin with parameters that these gradients have changed.
    results = [*parity_result.steps, parity_result.comparisons][0]
    is_precise = all(
        result.verdict.agreement in FINE
        for result in results
        if result.case.kind in (TensorKind.OUTPUT, TensorKind.LOSS)
    )
    if not is_precise or any(rank.asks_for_rounding for rank in parity_result.ranks):
        return
    rounded = [result for result in results if _is_rounded_to_half(result)]
    names = list(dict.fromkeys(result.case.name for result in rounded))
    if names:
        error = max(result.verdict.error or 0.0 for result in rounded)
        yield Finding(
            rule="parity-rounding",
            severity=Severity.WARNING,
            subject=_name_modules(parity_result, names),
            fact=f"{list_names(names)} have errors of up to {error:.1e}, although they and all "
            "outputs are float32: these gradients were rounded to a lower precision on their way.",
            remedy="Reduce gradients in float32, or compare with precision=torch.bfloat16 if it is "
            "on purpose.",
        )


def _is_rounded_to_half(result: TensorComparison) -> bool:
    verdict, case = result.verdict, result.case
    if case.kind is not TensorKind.GRADIENT or verdict.agreement is not Agreement.ROUNDED:
        return False
    is_single = verdict.dtype == name_dtype(torch.float32) and result.dtype is None
    error, noise = verdict.error or 0.0, verdict.noise or 0.0
    return is_single and case.precision is None and error > max(_COARSE, _COARSER * noise)


def _name_modules(parity_result: ParityResult, names: Sequence[str]) -> str:
    """The outermost modules of which all gradients are among these; else all gradients."""
    gradients = set(parity_result.reference.gradients)
    inside = {name.partition(".")[0] for name in names}
    is_complete = all(name in names for name in gradients if name.partition(".")[0] in inside)
    return (
        ", ".join(sorted(inside))
        if is_complete and len(names) < len(gradients)
        else ("all gradients" if len(names) == len(gradients) else names[0])
    )


def _find_harmless(parity: Parity) -> Iterator[Finding]:
    rounded = [result for result in parity.tensors if result.agreement is Agreement.ROUNDED]
    has_agreed = all(result.detail.endswith(AGREES_IN_FP64) for result in rounded)
    confirmed = ": in double precision they agree" if has_agreed else ""
    for agreement, fact, remedy in (
        (
            Agreement.RANDOM,
            "differ only in the random numbers that were drawn: without dropout and the like they "
            "agree",
            "Nothing is wrong. Set dropout to 0 to compare without a second run.",
        ),
        (
            Agreement.ROUNDED,
            f"are less accurate than on the single device, by rounding only{confirmed}",
            "Nothing is wrong. If the accuracy matters, raise the precision where the ranks "
            "compute or reduce in less than float32 (in FSDP: param_dtype, reduce_dtype).",
        ),
    ):
        names = [
            result.name or "the output"
            for result in parity.tensors
            if result.agreement is agreement
        ]
        if names:
            yield Finding(
                rule=f"parity-{agreement}",
                severity=Severity.INFO,
                subject=names[0],
                fact=f"{list_names(names)} {fact}.",
                remedy=remedy,
            )


def _find_noisy(parity: Parity) -> Iterator[Finding]:
    """Outputs so noisy that nearly any value would count as close."""
    for result in parity.tensors:
        is_output = result.kind is TensorKind.OUTPUT and result.agreement is Agreement.CLOSE
        if is_output and result.detail != CONFIRMED and (result.noise or 0.0) > MAX_NOISE:
            yield Finding(
                rule="parity-noisy",
                severity=Severity.WARNING,
                subject=result.name or "the output",
                fact=f"It is close, but it changes by {result.noise:.0%} when weights change by "
                "one unit in the last place, and the ranks do not run in double precision: almost "
                "any result would count as close.",
                remedy="Compare fewer layers, or run both versions in float64.",
            )
