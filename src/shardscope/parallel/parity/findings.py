"""The record of a comparison, and the findings about its problems and harmless differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from msgspec.structs import replace

from shardscope.parallel.equivalence import (
    TensorComparison,
    name_dtype,
)
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.explanation import list_names
from shardscope.parallel.parity.origin import is_within
from shardscope.parallel.parity.pipeline import ParityResult
from shardscope.parallel.parity.problems import MAX_NOISE, SELF_EXPLANATORY, Problem
from shardscope.parallel.parity.recheck import AGREES_IN_FP64, CONFIRMED
from shardscope.record import (
    TOLERABLE,
    Agreement,
    Axis,
    Divergence,
    Finding,
    Parity,
    Severity,
    TensorKind,
    TensorVerdict,
)

_MAX_ELEMENTS = 2**14  # the largest tensor that gets an explanation of its own


def make_parity(
    parity_result: ParityResult,
    axes: Mapping[str, int],
    problems: Sequence[Problem],
    *,
    is_in_processes: bool,
) -> Parity:
    """The record of the comparison; every tensor that differs gets the cause of a problem."""
    return Parity(
        axes=tuple(Axis(name=name, size=size) for name, size in axes.items()),
        tensors=tuple(
            _explain_verdict(result, axes, problems) for result in parity_result.comparisons
        ),
        divergences=tuple(
            Divergence(
                module=problem.module,
                phase=problem.phase,
                suspect=problem.cause.suspect,
                detail=problem.fact,
                type=parity_result.types.get(problem.module, ""),
                op=problem.op,
                source=problem.source,
                remedy=problem.remedy,
            )
            for problem in problems
            if problem.module is not None
        ),
        num_compared_modules=len(parity_result.types),
        is_in_processes=is_in_processes,
        has_exact=parity_result.has_exact,
        has_backward=bool(parity_result.reference.gradients),
    )


def _explain_verdict(
    result: TensorComparison, axes: Mapping[str, int], problems: Sequence[Problem]
) -> TensorVerdict:
    verdict = result.verdict
    if verdict.agreement in TOLERABLE or not problems:
        return verdict
    problem = next(
        (
            problem
            for problem in problems
            if verdict.name in problem.names
            or (problem.module and is_within(verdict.name, problem.module))
        ),
        problems[0],
    )
    suspect = problem.cause.suspect
    if verdict.name not in problem.names and math.prod(verdict.shape) > _MAX_ELEMENTS:
        return replace(verdict, suspect=suspect)
    explanation = explain(result, axes, batch_axes=result.case.batch_axes)
    if explanation.suspect is not suspect and verdict.name not in problem.names:
        return replace(verdict, suspect=suspect)
    explanation = explanation if explanation.suspect is suspect else problem.cause
    clause = "" if verdict.agreement in SELF_EXPLANATORY else explanation.describe()
    detail = "; ".join(filter(None, (verdict.detail, clause)))
    return replace(verdict, suspect=suspect, ratio=explanation.ratio, detail=detail)


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
