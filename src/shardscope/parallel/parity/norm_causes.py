"""Explains gradient norms that differ: shards that are not summed, copies that are counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from shardscope.numerics import to_fp64_on_cpu
from shardscope.parallel.equivalence import StepResult, TensorComparison
from shardscope.parallel.parity.evidence import group_ranks, list_sizes
from shardscope.parallel.parity.explanation import Explanation, list_names
from shardscope.parallel.parity.result import ParityResult
from shardscope.record import Suspect, TensorKind
from shardscope.record.layer_names import fold_layers

_RTOL = 1e-5  # of squared norms, which are sums of compared gradients
_RTOL_OF_LARGEST = 1e-3  # clipping adds a small number to the norm
_MIN_LACK = 2e-5  # of the squared norm: less may be noise
_MAX_LACK_REST = 2e-2  # of what is left out
_MAX_GROUPS = 4  # of parameters that are sharded in the same way


def explain_norm(
    values: Sequence[float],
    target: torch.Tensor,
    parity_result: ParityResult,
    axes: Mapping[str, int],
) -> Explanation | None:
    """How the norms of ranks differ: shards are not summed, copies count several times or not.

    Squared norms of the gradients are grouped by the axes that shard them; the norm on the ranks is
    a sum of these groups, each counted a number of times. None if that is not the case.
    """
    references = parity_result.reference.gradients
    gradients = [
        result
        for result in parity_result.comparisons
        if result.case.kind is TensorKind.GRADIENT and result.case.name in references
    ]
    squares = {result.case.name: _square(references[result.case.name]) for result in gradients}
    if not math.isclose(sum(squares.values()), float(target) ** 2, rel_tol=_RTOL):
        return None  # another norm than the square root of a sum of squares
    local = [sum(rank.local_squares.values()) for rank in parity_result.ranks]
    if len(local) == len(values) and all(
        math.isclose(own, value**2, rel_tol=_RTOL) for own, value in zip(local, values, strict=True)
    ):
        return Explanation(
            Suspect.NORM,
            "each rank computes it from its own shards only",
            remedy="Sum the squared norms over the axes that shard the gradients before the square "
            "root, as DTensor's norm and full_tensor() do.",
        )
    groups: dict[tuple[str, ...], list[str]] = {}
    for result in gradients:
        sharded = find_sharding_axes(result.case.name, squares, parity_result.ranks, axes)
        groups.setdefault(sharded, []).append(result.case.name)
    if len({round(value, 12) for value in values}) == 1 and len(groups) <= _MAX_GROUPS:
        counted = _find_counts(
            values[0] ** 2,
            [sum(squares[name] for name in names) for names in groups.values()],
            axes,
        )
        if counted is not None:
            return _describe_counts(counted, groups, axes)
    unsummed = _find_unsummed(values, gradients, squares, parity_result.ranks, axes)
    return unsummed or _find_left_out(values, squares, parity_result.ranks)


def _find_unsummed(
    values: Sequence[float],
    gradients: Sequence[TensorComparison],
    squares: Mapping[str, float],
    ranks: Sequence[StepResult],
    axes: Mapping[str, int],
) -> Explanation | None:
    """Shards whose squares each rank leaves as they are, while it sums those of the others.

    DTensors are in other groups than plain tensors: their norm is complete by itself.
    """
    groups: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for result in gradients:
        sharded = find_sharding_axes(result.case.name, squares, ranks, axes)
        is_distributed = any(result.case.name in rank.distributed for rank in ranks)
        groups.setdefault((sharded, is_distributed), []).append(result.case.name)
    if len(values) != len(ranks) or len(groups) > _MAX_GROUPS:
        return None
    candidates = [key for key in groups if key[0]]
    for count in range(1, len(candidates) + 1):
        for keys in itertools.combinations(candidates, count):
            names = [name for key in keys for name in groups[key]]
            rest = sum(square for name, square in squares.items() if name not in names)
            own = [sum(rank.local_squares.get(name) or 0.0 for name in names) for rank in ranks]
            if all(
                math.isclose(rest + square, value**2, rel_tol=_RTOL)
                for square, value in zip(own, values, strict=True)
            ):
                over = tuple(dict.fromkeys(axis for key in keys for axis in key[0]))
                return Explanation(
                    Suspect.NORM,
                    f"each rank adds the squares of its own shards of {list_names(names)} only, "
                    f"which are not summed over {' and '.join(over)}",
                    over,
                    remedy="Sum the squared norm of plain tensors over the axes that shard them "
                    "before the square root: the norm of DTensors is complete by itself.",
                )
    return None


def _find_left_out(
    values: Sequence[float], squares: Mapping[str, float], ranks: Sequence[StepResult]
) -> Explanation | None:
    """Parameters of one name in all layers that no rank counts, or one rank its own shards of."""
    total = sum(squares.values())
    groups: dict[str, list[str]] = {}
    for name in squares:
        groups.setdefault(fold_layers(name), []).append(name)
    if max(values) - min(values) > _RTOL * max(values):
        return None
    for pattern, names in groups.items():
        right = sum(squares[name] for name in names)
        own = [sum(rank.local_squares.get(name) or 0.0 for name in names) for rank in ranks]
        options = [("no rank counts them", 0.0)]
        options += [(f"only rank {rank} counts its own", square) for rank, square in enumerate(own)]
        for clause, counted in options:
            lack = right - counted
            is_large = abs(lack) > _MIN_LACK * total
            if is_large and abs(total - lack - values[0] ** 2) <= _MAX_LACK_REST * abs(lack):
                return Explanation(
                    Suspect.NORM,
                    f"the norm lacks gradients of {pattern}: {clause}",
                    remedy="Sum the squares of shards over the axes that shard them: what marks a "
                    "parameter as sharded, or as a copy, is wrong for these.",
                )
    return None


def _square(tensor: torch.Tensor) -> float:
    return float(to_fp64_on_cpu(tensor).square().sum())


def find_sharding_axes(
    name: str,
    squares: Mapping[str, float],
    ranks: Sequence[StepResult],
    axes: Mapping[str, int],
) -> tuple[str, ...]:
    """The axes over which the squared norms of what ranks store of a gradient add up to its own."""
    local = [rank.local_squares.get(name) for rank in ranks]
    known = [0.0 if square is None else square for square in local]
    for sharding, lines in ((), [[rank] for rank in range(len(ranks))]), *group_ranks(axes):
        if all(
            math.isclose(sum(known[rank] for rank in line), squares[name], rel_tol=_RTOL)
            for line in lines
        ):
            return sharding
    return ()


def _find_counts(
    square: float, groups: Sequence[float], axes: Mapping[str, int]
) -> list[float] | None:
    """How often each group is counted in a squared norm; the counting that changes fewest."""
    sizes = {size for _, size in list_sizes(axes)}
    options = [1.0, 0.0, *map(float, sizes), *(1 / size for size in sizes)]
    best: list[float] | None = None
    for counts in itertools.product(options, repeat=len(groups)):
        total = sum(count * group for count, group in zip(counts, groups, strict=True))
        if not math.isclose(total, square, rel_tol=_RTOL):
            continue
        if best is None or _num_changed(counts) < _num_changed(best):
            best = list(counts)
    return best if best is not None and _num_changed(best) else None


def _num_changed(counts: Sequence[float]) -> int:
    return sum(count != 1.0 for count in counts)


def _describe_counts(
    counts: Sequence[float], groups: Mapping[tuple[str, ...], list[str]], axes: Mapping[str, int]
) -> Explanation:
    clauses, over = [], []
    for count, (sharded, names) in zip(counts, groups.items(), strict=True):
        if count == 1.0:
            continue
        kind = f"sharded along {' and '.join(sharded)}" if sharded else "replicated"
        what = f"the gradients that are {kind} ({list_names(names)})"
        if count == 0.0:
            clauses.append(f"{what} are left out")
            continue
        size = count if count > 1 else 1 / count
        named = [" and ".join(names) for names, other in list_sizes(axes) if other == size]
        over += named[:1]
        amount = f"{size:.0f} times" if count > 1 else f"1/{size:.0f} times"
        clauses.append(f"{what} are counted {amount}, which is the size of {named[0]}")
    remedy = (
        "Count a gradient that ranks hold as copies once: divide its squared norm by the number "
    )
    remedy += "of copies before the sum over ranks, or sum it over the axes that shard it only."
    return Explanation(Suspect.NORM, "; ".join(clauses), tuple(over), remedy=remedy)


def explain_largest(ratios: Sequence[float], parity_result: ParityResult) -> Explanation | None:
    """How the largest elements of shards are combined where gradients are clipped by them.

    `ratios` are those of the norm of each rank to the norm of the single device.
    """
    largest = [
        max((_find_largest(rank, name) for name in rank.gradients), default=0.0)
        for rank in parity_result.ranks
    ]
    total = max(largest, default=0.0)
    if len(ratios) != len(largest) or not total:
        return None

    def is_near(values: Sequence[float]) -> bool:
        pairs = zip(ratios, values, strict=True)
        return all(math.isclose(a, b / total, rel_tol=_RTOL_OF_LARGEST) for a, b in pairs)

    if is_near([sum(largest)] * len(largest)):
        clause = "it is the sum of what each rank has as its largest element"
    elif is_near(largest):
        clause = "each rank takes the largest element of its own shards"
    else:
        return None
    remedy = "The infinity norm is the maximum over ranks: all-reduce it with ReduceOp.MAX."
    return Explanation(Suspect.NORM, clause, remedy=remedy)


def _find_largest(rank: StepResult, name: str) -> float:
    """The largest element of what a rank stores of a gradient."""
    region = rank.regions.get((TensorKind.GRADIENT, name)) or ()
    stored = rank.gradients[name][tuple(slice(*bounds) for bounds in region)]
    return float(stored.abs().max()) if stored.numel() else 0.0
