"""Recognizes tensors that are a multiple of the right one, or off by a bias or a residual."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shardscope.numerics import NoiseFloor, find_rms, measure, to_fp64_on_cpu
from shardscope.parallel.equivalence import UPDATED, StepResult, TensorComparison
from shardscope.parallel.parity.evidence import (
    Evidence,
    find_median_ratio,
    list_sizes,
    mask_nonfinite,
    pair_stored,
    sharding_axes,
    target_in_fp64,
)
from shardscope.parallel.parity.explanation import MAX_LISTED, Explanation
from shardscope.parallel.parity.first_op import Term, WrongOp
from shardscope.parallel.parity.norm_causes import explain_largest
from shardscope.parallel.parity.result import Origin, OriginKind, ParityResult
from shardscope.record import TOLERABLE, Suspect

_MAX_REST = 1e-4  # of gradients that a sum over micro-batches may leave unexplained
_MIN_CONSTRAINTS = 8  # numbers that the factors of rows must explain
_MIN_SPREAD = 1e-2  # between the factors of micro-batches


def find_ratio(evidence: Evidence) -> Iterator[Explanation]:
    """The same factor on all ranks."""
    ratios = [find_median_ratio(tensor, evidence.target) for tensor in evidence.ranks]
    ratio = ratios[0]
    if ratio is None or math.isclose(ratio, 1.0, rel_tol=1e-6):
        return
    if not all(
        rank_ratio is not None and math.isclose(rank_ratio, ratio, rel_tol=1e-6)
        for rank_ratio in ratios
    ):
        return
    if all(
        evidence.is_near(tensor, evidence.target * ratio, abs(ratio)) for tensor in evidence.ranks
    ):
        yield _describe_ratio(ratio, evidence.axes)


def _describe_ratio(ratio: float, axes: Mapping[str, int]) -> Explanation:
    """The explanation of a tensor that is `ratio` times as large as it should be."""
    for names, size in list_sizes(axes):
        is_large = _is_near_number(ratio, size)
        if not is_large and not _is_near_number(1 / ratio if ratio else 0.0, size):
            continue
        same = [" and ".join(names) for names, product in list_sizes(axes) if product == size]
        amount = f"{size} times as large as" if is_large else f"1/{size} of what"
        named = ", or of ".join(same)
        return Explanation(
            Suspect.DOUBLE_REDUCTION,
            "",
            names if len(same) == 1 else (),
            "sum" if is_large else "mean",
            ratio,
            predicate=f"is {amount} it should be, and {size} is the size of {named}",
        )
    predicate = f"is {ratio:.4g} times what it should be"
    return Explanation(Suspect.SCALED, ratio=ratio, predicate=predicate)


def _is_near_number(ratio: float, number: int) -> bool:
    return math.isclose(ratio, number, rel_tol=1e-2)


def find_ratio_of_each_rank(evidence: Evidence) -> Iterator[Explanation]:
    """Shards with a different factor on each rank, such as means over different counts."""
    case, layout = evidence.case, evidence.layout
    if case.floor is None:
        return  # integers, such as positions and counts, are not scaled
    if layout is not None and not case.calls:
        shards = evidence.shards
        parts = layout.split(evidence.target, shards)
        yield from _match_ratios(evidence, shards, parts, sharding_axes(layout, evidence.axes))
    if layout is None and not evidence.are_identical() and evidence.target.numel() > 1:
        targets = [evidence.target] * len(evidence.ranks)
        yield from _match_ratios(evidence, evidence.ranks, targets, tuple(evidence.axes))
    if layout is None and evidence.are_identical():
        for name, size, dim in evidence.sharded_dims():
            wanted = evidence.target.chunk(size, dim)
            if 1 < size == len(wanted):
                chunks = evidence.ranks[0].chunk(size, dim)
                yield from _match_ratios(evidence, chunks, wanted, (name,))


def find_ratio_of_each_row(evidence: Evidence) -> Iterator[Explanation]:
    """Rows, such as samples or tokens, with different factors, such as means over other counts."""
    target = evidence.target
    size = target.shape[-1] if target.ndim > 1 else 0
    # A row of two columns is weak evidence, and many of them are strong.
    num_constraints = (size - 1) * (target.numel() // max(size, 1))
    if evidence.case.floor is None or num_constraints < _MIN_CONSTRAINTS:
        return
    rows = target.reshape(-1, size)
    is_used = rows.abs().amax(1) > 0
    factors: list[torch.Tensor] = []
    for tensor in evidence.ranks:
        values = tensor.reshape(-1, size)
        ratios = (values * rows).sum(1) / rows.square().sum(1).clamp_min(1e-300)
        scale = float(ratios.abs().max().clamp_min(1.0))
        if not evidence.is_near(values, rows * ratios.unsqueeze(1), scale):
            return
        factors.append(ratios[is_used])
    known = torch.cat(factors)
    least, largest = float(known.min()), float(known.max())
    present = known[known.abs() > _MIN_SPREAD]
    num_zero = len(known) - len(present)
    if num_zero and len(present) and float(present.max() - present.min()) <= _MIN_SPREAD:
        num_rows = len(known) // len(factors)
        yield Explanation(
            Suspect.STALE,
            predicate=f"is zero in {num_zero // len(factors):,} of {num_rows:,} rows, such as "
            f"tokens, and {float(present.median()):.4g} times what it should be in the others",
            remedy="Look for what leaves these rows out on the ranks: a mask, labels, padding or a "
            "capacity that each rank applies to its own part by itself, where the single device "
            "has all of the sequence or batch.",
        )
    elif len(known) > 1 and largest - least > _MIN_SPREAD:
        distinct = len({round(float(value), 4) for value in known})
        yield Explanation(
            Suspect.SCALED,
            predicate=f"has rows that are multiplied by different factors, {distinct:,} of them "
            f"from {least:.4g} to {largest:.4g}",
            remedy="Look for what differs between samples, tokens or micro-batches and is counted "
            "on each rank, or in each micro-batch, by itself: divide by the count of all of them, "
            "once; or for weights that are not normalised.",
        )


def _match_ratios(
    evidence: Evidence,
    shards: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    axes: tuple[str, ...],
) -> Iterator[Explanation]:
    ratios = []
    for shard, part in zip(shards, parts, strict=True):
        ratio = find_median_ratio(shard, part)
        is_near = ratio is not None and evidence.is_near(shard, part * ratio, abs(ratio))
        is_zero = ratio is None and not bool(shard.any())
        if not is_near and not is_zero:
            return
        ratios.append(ratio)
    known = [(rank, ratio) for rank, ratio in enumerate(ratios) if ratio is not None]
    if len({round(ratio, 6) for _, ratio in known}) > 1:
        listed = ", ".join(f"{ratio:.4g} on rank {rank}" for rank, ratio in known[:MAX_LISTED])
        more = ", …" if len(known) > MAX_LISTED else ""
        clause = f"each rank's shard is off by a different factor: {listed}{more}"
        yield Explanation(Suspect.SCALED, clause, axes)


def find_bias_multiple(evidence: Evidence, value: torch.Tensor, scale: float = 1.0) -> float | None:
    """How many times a bias was added too often along the last dim, if that explains all."""
    rows = evidence.target.numel() // max(1, evidence.target.shape[-1] if value.ndim else 1)
    if value.ndim < 2 or rows < 2:
        return None
    row = (value - evidence.target).flatten(0, -2).mean(0)
    for bias in evidence.biases:
        times = float(row @ bias) / max(float(bias @ bias), 1e-300)
        if times and evidence.is_near(value - times * bias, evidence.target, scale):
            return times
    return None


def find_bias(evidence: Evidence) -> Iterator[Explanation]:
    """A bias that no rank adds, or that every rank adds, or that alone is not reduced twice."""
    if not evidence.are_identical():
        return
    times = find_bias_multiple(evidence, evidence.ranks[0])
    if times is not None and times < 0:
        yield Explanation(Suspect.STALE, "the bias is missing")
    elif times is not None:
        yield Explanation(
            Suspect.DOUBLE_REDUCTION,
            reduction="sum",
            predicate="is off by a multiple of the bias, which every rank adds before the "
            "reduction",
        )
    for _, size in list_sizes(evidence.axes):
        for ratio in (float(size), 1 / size):
            rest = evidence.ranks[0] - (ratio - 1) * evidence.target
            if find_bias_multiple(evidence, rest, max(ratio, 1.0)) is not None:
                explanation = _describe_ratio(ratio, evidence.axes)
                yield replace(
                    explanation,
                    clause=f"apart from the bias {explanation.describe()}",
                    predicate="",
                )


def find_residual(evidence: Evidence) -> Iterator[Explanation]:
    """The module's own input, which was added too often, or not at all."""
    if not evidence.are_identical():
        return
    for residual in evidence.inputs:
        scale = float((residual * residual).sum())
        times = float(((evidence.ranks[0] - evidence.target) * residual).sum()) / max(scale, 1e-300)
        count = round(times)
        rest = evidence.ranks[0] - count * residual
        if not count or not evidence.is_near(rest, evidence.target, evidence.scale):
            continue
        if count < 0:
            clause = "its input is not added to its output, or is subtracted"
            remedy = "Add the residual once, in the module or in the wrapper around it."
            yield Explanation(Suspect.STALE, clause, remedy=remedy)
            continue
        often = "once" if count == 1 else f"{count} times"
        over = [
            " and ".join(names) for names, size in list_sizes(evidence.axes) if size - 1 == count
        ]
        also = f", as if each rank of {over[0]} added it before a sum" if over and count > 1 else ""
        remedy = "Add the residual once: in the module or in the wrapper around it, not in both"
        remedy += f"; before a sum over {over[0]}, on one of its ranks only." if over else "."
        yield Explanation(
            Suspect.DOUBLE_REDUCTION,
            reduction="sum",
            remedy=remedy,
            predicate=f"is too large by its input, which is added {often} too often{also}",
        )


def explain_terms(
    origin: Origin, op: WrongOp | None, axes: Mapping[str, int]
) -> Explanation | None:
    """Recognize an output that contains too much, or too little, of one of its terms.

    Such as what a module inside returns, or an op. A number that the op takes on the ranks, such as
    a scale, tells whether the term is multiplied by it, or added several times.
    """
    full, case = origin.comparison.full_in_fp64(), origin.comparison.case
    if origin.kind is not OriginKind.OUTPUT or not full or case.target is None:
        return None
    terms = [Term(f"the output of `{name}`", tensor) for name, tensor in origin.terms.items()]
    of_ops = () if op is None else op.terms
    terms += [replace(term, name=f"what {term.name} returns") for term in reversed(of_ops)]
    known = [
        (term, factor)
        for term in terms
        if (factor := _find_term_factor(term.tensor, full, target_in_fp64(case), case.floor))
    ]
    # Of ops that multiply each other's results, the one that takes another number is to blame.
    causes = [_describe_term(term, 1.0 + factor, axes) for term, factor in known]
    changed = (cause for (term, _), cause in zip(known, causes, strict=True) if term.changed)
    return next((cause for cause in changed if cause.remedy), next(iter(causes), None))


def _find_term_factor(
    tensor: torch.Tensor,
    full: Sequence[torch.Tensor],
    target: torch.Tensor,
    floor: NoiseFloor | None,
) -> float:
    """How many times a term is added too often, if that explains every rank's output; else 0."""
    part = to_fp64_on_cpu(tensor)
    size = float(part.square().sum())
    if floor is None or part.shape != target.shape or not size or floor.covers(part, target):
        return 0.0
    times = float((part * (full[0] - target)).sum()) / size
    limit = floor.scale_by(4.0 * max(1.0, abs(times)))
    is_explained = all(limit.covers(value - times * part, target) for value in full)
    return times if is_explained and abs(times) >= _MIN_SPREAD else 0.0


def _describe_term(term: Term, factor: float, axes: Mapping[str, int]) -> Explanation:
    """The explanation of an output that contains a term `factor` times."""
    clause = f"it contains {term.name} {factor:.4g} times, and should contain it once"
    for argument, single, rank in term.changed:
        if single and math.isclose(rank / single, factor, rel_tol=1e-3):
            clause += f": its argument {argument} is {rank:.6g} on the ranks and {single:.6g} on "
            clause += "the single device"
            remedy = "Use the same value on the ranks; if it follows from a size, take that of the "
            remedy += "full model, not that of a shard."
            return Explanation(Suspect.SCALED, clause, ratio=factor, remedy=remedy)
    over = [
        " and ".join(names) for names, size in list_sizes(axes) if _is_near_number(factor, size)
    ]
    if over:
        clause += f"; {factor:.0f} is the size of {over[0]}, as if each rank added it before a sum"
        remedy = f"Add it after the sum over {over[0]}, or on one of its ranks only."
        return Explanation(
            Suspect.DOUBLE_REDUCTION, clause, (over[0],), "sum", factor, remedy=remedy
        )
    if abs(factor) < _MIN_SPREAD:
        return Explanation(
            Suspect.STALE, f"it lacks {term.name}", remedy="Add it on the ranks, too."
        )
    return Explanation(Suspect.SCALED, clause, ratio=factor)


def find_factor(comparison: TensorComparison) -> float | None:
    """The factor of a gradient on all ranks, if it is another than 1."""
    if comparison.verdict.agreement in TOLERABLE or not comparison.full:
        return None
    target = comparison.case.target
    assert target is not None
    ratios = [find_median_ratio(full, to_fp64_on_cpu(target)) for full in comparison.full_in_fp64()]
    ratio = ratios[0]
    is_same = ratio and all(r is not None and math.isclose(r, ratio, rel_tol=1e-6) for r in ratios)
    return float(f"{ratio:.6g}") if is_same and math.isfinite(ratio or 0) else None


def find_scaling(result: StepResult) -> float | None:
    """The factor by which a step multiplies all gradients after backward; None if there is none."""
    ratios = [
        find_median_ratio(to_fp64_on_cpu(result.gradients[name]), to_fp64_on_cpu(raw))
        for name, raw in result.raw_gradients.items()
        if name in result.gradients and bool(raw.any())
    ]
    ratio = ratios[0] if ratios else None
    if ratio is None or math.isclose(ratio, 1.0, rel_tol=1e-6):
        return None
    is_common = all(
        of_tensor is not None and math.isclose(of_tensor, ratio, rel_tol=1e-4)
        for of_tensor in ratios
    )
    return ratio if is_common else None


def explain_clipping_by_hand(
    parity_result: ParityResult, gradients: Sequence[TensorComparison]
) -> Explanation | None:
    """Recognize gradients that the program scales after backward, on ranks by other factors.

    On each rank, all gradients are then off by one factor.
    """
    known = [result for result in gradients if result.full and result.case.target is not None]
    single = find_scaling(parity_result.reference)
    if single is None or len(known) < 2:
        return None
    factors: list[float] = []
    for result in known:
        pairs = pair_stored(result)
        ratios = [find_median_ratio(value, target) or 0.0 for value, target in pairs]
        factors = factors or ratios
        if len(ratios) != len(factors) or not all(
            math.isclose(ratio, factor, rel_tol=1e-4)
            and measure(value, target * factor).rms <= _MAX_REST * find_rms(value)
            for ratio, factor, (value, target) in zip(ratios, factors, pairs, strict=True)
        ):
            return None
    values = list(dict.fromkeys(f"{factor * single:.4g}" for factor in factors))
    listed = ", ".join(values[:MAX_LISTED]) + (", …" if len(values) > MAX_LISTED else "")
    how = f"after backward the program multiplies every gradient by {listed} on the ranks, and by "
    how += f"{single:.4g} on the single device"
    norm = explain_largest([1 / factor for factor in factors if factor], parity_result)
    if norm is not None:
        return replace(norm, clause=f"{how}: the norm is wrong, as {norm.clause}", ratio=factors[0])
    return Explanation(
        Suspect.CLIPPING,
        how,
        ratio=factors[0],
        remedy="Compute the norm that gradients are clipped with over all ranks: sum the squares "
        "of shards over the axes that shard them, count copies once, and take the root last.",
    )


def explain_leftovers(
    parity_result: ParityResult, gradients: Sequence[TensorComparison]
) -> Explanation | None:
    """Recognize gradients to which those of the step before, or the weights, are added."""
    previous = parity_result.previous
    known = [result for result in gradients if result.full]
    if previous is None or not known:
        return None
    excess = torch.cat([_flatten_first(r) - target_in_fp64(r.case).flatten() for r in known])
    remedy = "Clear gradients, and buffers that hold them, before the first backward of each step."
    for named, what, suspect in (
        (previous.gradients, "that of the step before, which was not cleared", Suspect.STALE),
        (
            previous.training.tables.get(UPDATED, {}),
            "the weight itself, as from a buffer that is used for both",
            Suspect.OVERWRITTEN,
        ),
    ):
        if any(result.case.name not in named for result in known):
            continue
        column = torch.cat([to_fp64_on_cpu(named[r.case.name]).flatten() for r in known])
        factor = float(column @ excess / column.square().sum().clamp_min(1e-300))
        rest = float((excess - factor * column).norm() / excess.norm().clamp_min(1e-300))
        if rest <= _MAX_REST:
            clause = f"every gradient contains {factor:.4g} times {what}"
            return Explanation(suspect, clause, ratio=factor, remedy=remedy)
    return None


def _flatten_first(comparison: TensorComparison) -> torch.Tensor:
    """The full tensor of the first rank, flattened."""
    return mask_nonfinite(comparison.full_in_fp64()[0]).flatten()


def explain_contributions(
    parity_result: ParityResult, gradients: Sequence[TensorComparison]
) -> Explanation | None:
    """Recognize gradients that are a sum over micro-batches with wrong weights.

    None if the weights are equal, since the cause may then be another, or explain nothing.
    """
    parts = parity_result.contributions
    known = [
        result
        for result in gradients
        if result.full
        and all(
            result.case.name in part and part[result.case.name].shape == result.full[0].shape
            for part in parts
        )
    ]
    if len(parts) < 2 or not known:
        return None
    columns = [torch.cat([part[r.case.name].flatten() for r in known]) for part in parts]
    values = torch.cat([_flatten_first(result) for result in known])
    matrix = torch.stack(columns, 1)
    weights = torch.linalg.lstsq(matrix, values.unsqueeze(1), driver="gelsd").solution.flatten()
    targets = torch.cat([target_in_fp64(r.case).flatten() for r in known])
    right = torch.linalg.lstsq(matrix, targets.unsqueeze(1), driver="gelsd").solution.flatten()
    rest = max(
        float((matrix @ factors - wanted).norm() / wanted.norm().clamp_min(1e-300))
        for factors, wanted in ((weights, values), (right, targets))
    )
    factors = [float(a / b) for a, b in zip(weights, right, strict=True)]
    if rest > _MAX_REST or max(factors) - min(factors) < _MIN_SPREAD:
        return None
    listed = ", ".join(f"{factor:.3g}" for factor in factors[:MAX_LISTED])
    more = ", …" if len(factors) > MAX_LISTED else ""
    missing = [str(index + 1) for index, factor in enumerate(factors) if abs(factor) < _MIN_SPREAD]
    if missing and missing[-1] == str(len(factors)):
        return Explanation(
            Suspect.MISSING_REDUCTION,
            f"the gradients of micro-batch {', '.join(missing)} are missing, the last: they are "
            "not reduced",
            remedy="Synchronise gradients in the last micro-batch: run its backward outside of "
            "no_sync(), or after set_requires_gradient_sync(True).",
        )
    if missing:
        return Explanation(
            Suspect.STALE,
            f"the gradients of micro-batch {', '.join(missing)} are lost",
            remedy="Clear gradients once before the first micro-batch, and synchronise those of "
            "all micro-batches: each no_sync() needs a backward outside of it before the step.",
        )
    return Explanation(
        Suspect.SCALED,
        f"the gradients of the micro-batches are multiplied by different factors: {listed}{more}",
        remedy="Scale the gradients, or the loss, of each micro-batch once: what scales gradients "
        "that are accumulated scales those of earlier micro-batches again.",
    )
