"""Recognizes reductions that are missing, or that are over the wrong axes of the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardscope.numerics import to_fp64_on_cpu
from shardscope.parallel.equivalence import TensorComparison
from shardscope.parallel.parity.evidence import (
    Evidence,
    find_median_ratio,
    group_ranks,
    mask_nonfinite,
    shards_in_fp64,
    target_in_fp64,
)
from shardscope.parallel.parity.explanation import MAX_LISTED, Explanation
from shardscope.parallel.parity.scale_causes import find_bias_multiple
from shardscope.record import Suspect

_MAX_REST = 1e-5  # of a gradient that parts of ranks may leave unexplained
_MIN_WEIGHT = 1e-3  # of a part, relative to what it should be


def find_missing_reductions(evidence: Evidence) -> Iterator[Explanation]:
    """Partial sums: reduced over an axis, the ranks agree."""
    if evidence.are_identical():
        return
    scale = evidence.scale
    for names, lines in evidence.groups():
        over = " and ".join(names)
        sums = [torch.stack([evidence.ranks[rank] for rank in line]).sum(0) for line in lines]
        means = [total / len(lines[0]) for total in sums]
        if all(evidence.is_near(total, evidence.target, scale) for total in sums):
            yield Explanation(
                Suspect.MISSING_REDUCTION,
                f"each rank holds only its partial sum; summed over {over} they match",
                names,
                "sum",
            )
        if evidence.is_forward:
            yield from _find_other_group(evidence, names, sums)
        if all(evidence.is_near(mean, evidence.target, scale) for mean in means):
            yield Explanation(
                Suspect.MISSING_REDUCTION,
                f"each rank has its own value; averaged over {over} they match",
                names,
                "mean",
            )
        yield from _find_other_group(evidence, names, sums)
        times = [find_bias_multiple(evidence, total, scale) for total in sums]
        known = [count for count in times if count is not None]
        if len(known) == len(times):
            is_added = all(count > 0 for count in known)
            yield Explanation(
                Suspect.MISSING_REDUCTION,
                f"each rank holds only its partial sum; summed over {over} they match, except for "
                f"the bias{', which every rank adds' if is_added else ''}",
                names,
                "sum",
            )


def find_divisors(evidence: Evidence) -> Iterator[Explanation]:
    """Quotients whose divisor, such as a number of tokens, is a partial sum on each rank.

    The sum of the ranks' reciprocals is the reciprocal of the right value.
    """
    is_zero = any(bool((tensor == 0).any()) for tensor in evidence.ranks)
    if is_zero or evidence.are_identical() or evidence.case.floor is None:
        return
    for names, lines in evidence.groups():
        totals = [sum(evidence.ranks[rank].reciprocal() for rank in line) for line in lines]
        quotients = [torch.as_tensor(total).reciprocal() for total in totals]
        if all(evidence.is_near(quotient, evidence.target) for quotient in quotients):
            over = " and ".join(names)
            yield Explanation(
                Suspect.MISSING_REDUCTION,
                f"what each rank divides by is not summed over {over}, while what it divides is: "
                f"the reciprocals of the ranks' values, summed over {over}, match",
                names,
                remedy=f"Sum the divisor, such as the number of tokens, over {over} too, or count "
                "before the tokens are divided over the ranks.",
            )


def _find_other_group(
    evidence: Evidence, names: tuple[str, ...], sums: Sequence[torch.Tensor]
) -> Iterator[Explanation]:
    """Partial sums that were summed over other axes, along which all ranks had the same value."""
    for group_axes, lines in evidence.groups():
        if set(group_axes) & set(names) or not evidence.are_identical(lines):
            continue
        count = len(lines[0])
        over, group_over = " and ".join(names), " and ".join(group_axes)
        num_summed = len(evidence.ranks) // len(sums)
        if all(evidence.is_near(total / count, evidence.target) for total in sums):
            yield Explanation(
                Suspect.WRONG_GROUP,
                axes=names,
                reduction="sum",
                predicate=f"is summed over {group_over} instead of {over}: summed over {over} and "
                f"divided by {count} the ranks match",
            )
        means = [total / count / num_summed for total in sums]
        if all(evidence.is_near(mean, evidence.target) for mean in means):
            yield Explanation(
                Suspect.WRONG_GROUP,
                axes=names,
                reduction="mean",
                predicate=f"is summed over {group_over} and not reduced over {over}: averaged over "
                f"{over} and divided by {count} the ranks match",
            )


def find_reduced_shards(evidence: Evidence) -> Iterator[Explanation]:
    """Shards that were reduced over the axis that shards them: each is the sum or mean of all."""
    axes_by_reduction: dict[tuple[int, str], list[str]] = {}
    for name, size, dim in evidence.sharded_dims():
        wanted = evidence.target.chunk(size, dim)
        if not 1 < size == len(wanted) or evidence.target.shape[dim] % size:
            continue
        total = torch.stack(wanted).sum(0)
        for divisor, verb in ((1, "summed"), (size, "averaged")):
            if all(
                evidence.is_near(chunk, total / divisor, size)
                for tensor in evidence.ranks
                for chunk in tensor.chunk(size, dim)
            ):
                axes_by_reduction.setdefault((dim, verb), []).append(name)
    for (dim, verb), names in axes_by_reduction.items():
        # Samples are sharded along the batch axes, and parameters along the other axes.
        likely = [name for name in names if (name in evidence.batch_axes) is evidence.is_forward]
        axes = tuple(likely or names)
        over = " or ".join(axes)
        yield Explanation(
            Suspect.WRONG_GROUP,
            axes=axes,
            reduction="sum" if verb == "summed" else "mean",
            remedy=f"Leave {over} out of the process group of the reduction; where all shards are "
            "needed, gather them."
            if evidence.is_forward
            else _suggest_smaller_group(over),
            predicate=f"is {verb} over {over}, although each rank of {over} has another shard of "
            f"it (dim {dim})",
        )


def find_scattered(evidence: Evidence) -> Iterator[Explanation]:
    """Partial sums that were reduce-scattered over one axis and gathered over another."""
    for name, size, dim in evidence.sharded_dims():
        wanted = evidence.target.chunk(size, dim)
        if not 1 < size == len(wanted) or evidence.target.shape[dim] % size:
            continue
        totals = [torch.stack(tensor.chunk(size, dim)).sum(0) for tensor in evidence.ranks]
        for group_axes, lines in evidence.groups():
            index_of = {rank: index for line in lines for index, rank in enumerate(line)}
            if name in group_axes or len(lines[0]) != size:
                continue
            for divisor in (1, size, size * size):
                if all(
                    evidence.is_near(total / divisor, wanted[index_of[rank]])
                    for rank, total in enumerate(totals)
                ):
                    group_over = " and ".join(group_axes)
                    yield Explanation(
                        Suspect.WRONG_GROUP,
                        axes=(name,),
                        reduction="sum" if divisor == 1 else "mean",
                        predicate=f"is reduced and scattered over {group_over} instead of {name}: "
                        f"the sum of its chunks along dim {dim} is, up to a factor, the chunk of "
                        f"each rank's index along {group_over}",
                    )


def explain_wrong_group(
    partial: TensorComparison, result: TensorComparison, cause: Explanation, axes: Mapping[str, int]
) -> Explanation | None:
    """Recognize partial sums of an op that are summed over other axes than those of `cause`.

    Ranks along those axes may have different samples, so that `result` by itself is no
    evidence. The same bias may have been added to all rows of it.
    """
    if None in partial.case.ranks or None in result.case.ranks:
        return None
    terms, totals = shards_in_fp64(partial.case), shards_in_fp64(result.case)
    floor = result.case.floor
    if floor is None or {term.numel() for term in terms} != {total.numel() for total in totals}:
        return None
    over = " and ".join(cause.axes)
    for group_axes, lines in group_ranks(axes):
        size = len(lines[0])
        sums = {
            rank: torch.stack([terms[member].flatten() for member in line]).sum(0)
            for line in lines
            for rank in line
        }
        rests = [
            (total - sums[rank].view_as(total)).reshape(-1, total.shape[-1] if total.ndim else 1)
            for rank, total in enumerate(totals)
        ]
        if group_axes != cause.axes and all(
            len(rest) > 1 and floor.scale_by(4.0 * size).covers(rest + total, rest.mean(0) + total)
            for rest, total in zip(
                rests, (total.reshape(rests[0].shape) for total in totals), strict=True
            )
        ):
            clause = (
                f"its partial sums are summed over {' and '.join(group_axes)} instead of {over}"
            )
            return Explanation(Suspect.WRONG_GROUP, clause, cause.axes, "sum")
    return None


def explain_parts(
    comparison: TensorComparison, raw_gradients: Sequence[torch.Tensor | None]
) -> Explanation | None:
    """Recognize a gradient that lacks parts of other ranks, or gives them other weights.

    `raw_gradients` are those of each rank before they are reduced; None if they do not tell.
    """
    raw = [tensor for tensor in raw_gradients if tensor is not None]
    full = comparison.full_in_fp64() if comparison.full else []
    if len(raw) < len(raw_gradients) or len(full) != len(raw) or comparison.case.target is None:
        return None
    target = target_in_fp64(comparison.case)
    if any(tensor.shape != target.shape for tensor in raw):
        return None
    matrix = torch.stack([to_fp64_on_cpu(tensor).flatten() for tensor in raw], 1)
    if torch.linalg.matrix_rank(matrix, rtol=1e-6) < len(raw):
        return None  # the same on several ranks, or too few elements
    right = _fit(matrix, target)
    weights = [_fit(matrix, tensor) for tensor in full]
    if right is None or any(fitted is None for fitted in weights):
        return None
    lacking: dict[int, list[int]] = {}  # parts that a rank does not have
    for rank, fitted in enumerate(weights):
        for part, (weight, wanted) in enumerate(zip(fitted or (), right, strict=False)):
            if abs(weight) < _MIN_WEIGHT * abs(wanted):
                lacking.setdefault(rank, []).append(part)
    if not lacking:
        return None
    parts = next(iter(lacking.values()))
    ranks = ", ".join(map(str, lacking))
    return Explanation(
        Suspect.MISSING_REDUCTION,
        f"rank {ranks} lacks the part of rank {', '.join(map(str, parts))}, which it should add "
        "to its own",
        reduction="sum",
        remedy="Check that each rank receives the gradients of all others before the optimizer "
        "steps: a transfer that was lost, not waited for, or overwritten leaves only a part.",
    )


def _fit(matrix: torch.Tensor, value: torch.Tensor) -> list[float] | None:
    """The weights with which the columns add up to a tensor; None if they do not."""
    column = value.flatten().unsqueeze(1)
    weights = torch.linalg.lstsq(matrix, column, driver="gelsd").solution
    rest = (matrix @ weights - column).norm() / column.norm().clamp_min(1e-300)
    return weights.flatten().tolist() if float(rest) < _MAX_REST else None


def explain_mixed(
    results: Sequence[TensorComparison], axes: Mapping[str, int]
) -> Iterator[tuple[TensorComparison, Explanation]]:
    """Recognize gradients of different parameters, such as experts, that were reduced together.

    Ranks have different parameters under one name, so that each gradient is the sum of all, up
    to a factor.
    """
    groups: list[list[tuple[TensorComparison, torch.Tensor]]] = []
    for comparison in results:
        if not comparison.full or comparison.case.target is None or comparison.case.floor is None:
            continue
        value, floor = mask_nonfinite(comparison.full_in_fp64()[0]), comparison.case.floor
        same = (
            group
            for group in groups
            if group[0][1].shape == value.shape and floor.scale_by(4.0).covers(value, group[0][1])
        )
        group = next(same, None)
        if group is None:
            groups.append([(comparison, value)])
        else:
            group.append((comparison, value))
    for group in groups:
        targets = [target_in_fp64(comparison.case) for comparison, _ in group]
        total, value = torch.stack(targets).sum(0), group[0][1]
        ratio = find_median_ratio(value, total)
        floors = [comparison.case.floor for comparison, _ in group if comparison.case.floor]
        floor = max(floors, key=lambda floor: floor.scale)
        if len(group) < 2 or not ratio or not bool(torch.isfinite(total).all()):
            continue
        if not floor.scale_by(4.0 * len(group)).covers(value, total * ratio):
            continue
        over = next((name for name, size in axes.items() if size == len(group)), "")
        names = ", ".join(comparison.case.name for comparison, _ in group[:MAX_LISTED])
        more = ", …" if len(group) > MAX_LISTED else ""
        for comparison, _ in group:
            yield (
                comparison,
                Explanation(
                    Suspect.WRONG_GROUP,
                    axes=(over,) if over else (),
                    reduction="sum",
                    remedy=_suggest_smaller_group(
                        over or "the axis along which they are distributed"
                    ),
                    predicate=f"is, up to a factor, the sum of the gradients of several parameters "
                    f"({names}{more}): it is reduced over {over or 'ranks'}, although each rank "
                    "has another one of them",
                ),
            )


def _suggest_smaller_group(over: str) -> str:
    return (
        "Reduce the gradients of sharded parameters and of experts over those axes only along "
        f"which they are replicated, not over {over}: give DDP or the all-reduce another process "
        "group, or leave these parameters out."
    )
