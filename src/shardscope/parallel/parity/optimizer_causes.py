"""Explains parameters that an optimizer updates wrongly, though it gets the right gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shardscope.numerics import find_rms, to_fp64_on_cpu
from shardscope.parallel.equivalence import UPDATED, TensorComparison
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.evidence import (
    find_median_ratio,
    pair_stored,
    target_in_fp64,
)
from shardscope.parallel.parity.explanation import (
    MAX_LISTED,
    Explanation,
    list_by_rank,
    list_names,
)
from shardscope.parallel.parity.norm_causes import find_sharding_axes
from shardscope.parallel.parity.result import ParityResult
from shardscope.record import TOLERABLE, Agreement, Suspect, TensorKind

_RTOL = 1e-5  # by which a parameter that is not updated may change
_MAX_REST = 2e-3  # of an update that a factor may leave unexplained: it is a difference
_MIN_SPREAD = 1e-3  # between the factors of updates
_MIN_ELEMENTS = 4  # that a factor has to explain
_SAME_SETTINGS = (
    "Look for a number that the optimizer keeps or computes by itself on the ranks, such as a "
    "count of steps, or a norm of what one rank holds: it should be that of the single device."
)


def explain_optimizer(
    updated: Sequence[TensorComparison],
    names: Sequence[str],
    parity_result: ParityResult,
    axes: Mapping[str, int],
) -> Explanation:
    """Why updated parameters, or the state of the optimizer, differ; `names` are the parameters."""
    changed = {result.case.name for result in updated if _is_changed(result, parity_result)}
    unchanged = [name for name in names if name not in changed]
    cause = _explain_steps(unchanged, parity_result) or _explain_unchanged(updated, parity_result)
    cause = cause or explain(updated[0], axes)
    if cause.suspect is Suspect.UNKNOWN:
        cause = _explain_exchanged_state(parity_result) or cause
    if cause.suspect is Suspect.UNKNOWN:
        cause = _explain_factors(updated, parity_result, axes) or cause
    if cause.suspect is Suspect.UNKNOWN:
        cause = _explain_shards(updated, parity_result, axes) or cause
    disagrees = updated[0].verdict.agreement is Agreement.RANKS_DISAGREE
    if cause.suspect is Suspect.UNKNOWN and disagrees:
        return replace(
            cause,
            suspect=Suspect.OUT_OF_SYNC,
            remedy="Look for code that changes it on some ranks only, such as on rank 0, or "
            "from what a rank alone sees, and run it on all ranks alike.",
        )
    return cause


def _is_changed(result: TensorComparison, parity_result: ParityResult) -> bool:
    """Whether a parameter is another one than before the step on every rank."""
    old = _find_old(result, parity_result)
    return old is not None and not any(
        torch.allclose(full, old, rtol=_RTOL, atol=0.0) for full in result.full_in_fp64()
    )


def _explain_steps(names: Sequence[str], parity_result: ParityResult) -> Explanation | None:
    """Whether the optimizer of the ranks holds other tensors, or steps another number of times.

    `names` are parameters that differ and may be as they were before the step.
    """
    ranks, reference = parity_result.ranks, parity_result.reference
    stale = [
        name
        for name in names
        if all(name in rank.training.stale or name in rank.absent for rank in ranks)
        and name not in reference.training.stale
    ]
    if stale:
        holds = "does not hold it" if len(stale) == 1 else f"does not hold {list_names(stale)}"
        return Explanation(
            Suspect.STALE,
            f"the optimizer of the ranks {holds}: it was given other tensors, such as those "
            "from before the model was sharded, moved or materialized",
            remedy="Make the optimizer after the model is sharded and materialized, from the "
            "parameters that the model then has.",
        )
    counts = [rank.training.num_optimizer_steps for rank in ranks]
    single_count = reference.training.num_optimizer_steps
    if len(set(counts)) > 1 or counts[0] < single_count:
        return Explanation(
            Suspect.STALE,
            "the number of times that the optimizer steps is "
            f"{list_by_rank(counts)} and {single_count} on the single device",
            remedy="Decide on all ranks alike whether the optimizer steps: reduce the flag, "
            "such as that a gradient is not finite, over all ranks first.",
        )
    return None


def _find_old(comparison: TensorComparison, parity_result: ParityResult) -> torch.Tensor | None:
    """The parameter before it was updated, in float64; None if that is not known."""
    previous, reference = parity_result.previous, parity_result.reference
    before = previous.training.tables.get(UPDATED, {}) if previous else reference.parameters
    old = before.get(comparison.case.name)
    if comparison.case.kind is not TensorKind.UPDATED or old is None or not comparison.full:
        return None
    return to_fp64_on_cpu(old) if old.shape == target_in_fp64(comparison.case).shape else None


def _explain_unchanged(
    updated: Sequence[TensorComparison], parity_result: ParityResult
) -> Explanation | None:
    """Which ranks leave parameters as they were that the single device changes."""
    is_changed = {rank: False for result in updated for rank in range(len(result.full))}
    for result in updated:
        old = _find_old(result, parity_result)
        if old is None or torch.equal(old, target_in_fp64(result.case)):
            return None
        for rank, full in enumerate(result.full_in_fp64()):
            is_changed[rank] |= not torch.allclose(full, old, rtol=_RTOL, atol=0.0)
    unchanged = [rank for rank, changed in is_changed.items() if not changed]
    if not unchanged:
        return _explain_unchanged_elements(updated, parity_result)
    is_all = len(unchanged) == len(is_changed)
    what = "it as it was" if len(updated) == 1 else "them as they were"
    who = "the ranks leave" if is_all else f"rank {', '.join(map(str, unchanged))} leaves"
    return Explanation(
        Suspect.STALE,
        f"{who} {what}, and the single device updates {'it' if len(updated) == 1 else 'them'}",
        remedy="Update it on every rank that holds it, or broadcast it after the update.",
    )


def _explain_unchanged_elements(
    updated: Sequence[TensorComparison], parity_result: ParityResult
) -> Explanation | None:
    """Whether ranks leave some elements as they were, and update the others rightly."""
    num_unchanged, num_elements = 0, 0
    for result in updated:
        old, target = _find_old(result, parity_result), target_in_fp64(result.case)
        full = result.full_in_fp64()
        if old is None or any(tensor.shape != target.shape for tensor in full):
            return None
        is_right = [torch.isclose(tensor, target, rtol=_RTOL, atol=0.0) for tensor in full]
        is_old = [torch.isclose(tensor, old, rtol=_RTOL**2, atol=0.0) for tensor in full]
        if not all(bool((a | b).all()) for a, b in zip(is_right, is_old, strict=True)):
            return None
        num_unchanged += max(int((~right).sum()) for right in is_right)
        num_elements += target.numel()
    return Explanation(
        Suspect.STALE,
        f"{num_unchanged:,} of {num_elements:,} elements are left as they were before the step, "
        "the others are updated as on the single device",
        remedy="Check that the parts of all ranks together have every element of the parameters: "
        "a size that is not divisible by the number of ranks is to be rounded up.",
    )


def _explain_exchanged_state(parity_result: ParityResult) -> Explanation | None:
    """Whether a parameter has the state that another one had before the step."""
    if parity_result.previous is None:
        return None
    tables = parity_result.previous.training.tables
    for result in parity_result.comparisons:
        name, _, entry = result.case.name.partition(" ")
        known = tables.get((TensorKind.STATE, entry), {})
        is_wrong = result.case.kind is TensorKind.STATE and bool(result.full)
        if not is_wrong or name not in known or result.full[0].shape != known[name].shape:
            continue
        own, excess = to_fp64_on_cpu(known[name]), result.full_in_fp64()[0]
        excess = excess - target_in_fp64(result.case)
        for other, tensor in known.items():
            if tensor.shape != own.shape or own.numel() < _MIN_ELEMENTS:
                continue
            change = to_fp64_on_cpu(tensor) - own
            decay = float((change * excess).sum() / change.square().sum().clamp_min(1e-300))
            rest = find_rms(excess - decay * change)
            if 0.0 < decay <= 1.0 + _MIN_SPREAD and rest <= _MAX_REST * find_rms(excess):
                return Explanation(
                    Suspect.PERMUTED,
                    f"the state {entry} of {name} is that of {other}",
                    remedy="Restore the optimizer's state by the names of parameters: the order "
                    "of parameters, and so their index, is another one on the ranks.",
                )
    return None


def _list_factors(
    result: TensorComparison, old: torch.Tensor, axes: Mapping[str, int]
) -> Iterator[list[float]]:
    """The factor of the update of each shard, for each way to shard that factors explain.

    `old` is the parameter before the update.
    """
    before = pair_stored(replace(result, case=replace(result.case, target=old)))
    shards = [(*pair, part) for pair, (_, part) in zip(pair_stored(result), before, strict=True)]
    ways = [shards]
    if result.layout is None and all(part.shape == old.shape for _, _, part in shards):
        # Each rank has all of it by now; which part it has updated is not known.
        ways += [
            list(zip(*(tensor.chunk(size, dim) for tensor in shards[0]), strict=True))
            for size, dim in itertools.product(set(axes.values()), range(old.ndim))
            if 1 < size <= old.shape[dim]
        ]
    for way in ways:
        factors = [_find_factor(value - part, wanted - part) for value, wanted, part in way]
        known = [factor for factor in factors if factor is not None]
        if len(known) == len(factors):
            yield known


def _find_factor(change: torch.Tensor, wanted: torch.Tensor) -> float | None:
    """By what a shard's update is multiplied; None if no factor explains it."""
    ratio = find_median_ratio(change, wanted)
    if ratio is None or wanted.numel() < _MIN_ELEMENTS:
        return None
    is_explained = find_rms(change - ratio * wanted) <= _MAX_REST * abs(ratio) * find_rms(wanted)
    return ratio if is_explained else None


def _explain_factors(
    updated: Sequence[TensorComparison], parity_result: ParityResult, axes: Mapping[str, int]
) -> Explanation | None:
    """Updates that are multiples of the right ones, for most parameters or on each rank."""
    factors: dict[str, list[float]] = {}
    for result in updated:
        old = _find_old(result, parity_result)
        if old is None:
            return None
        of_ranks = next(_list_factors(result, old, axes), None)
        if of_ranks is not None:
            factors[result.case.name] = of_ranks
    known = {
        name: values
        for name, values in factors.items()
        if any(not math.isclose(value, 1.0, rel_tol=_MIN_SPREAD) for value in values)
    }
    if not known or 2 * len(known) < len(updated):
        return None
    name, values = next(iter(known.items()))
    largest, least = max(map(max, known.values())), min(map(min, known.values()))
    if max(values) - min(values) > _MIN_SPREAD * max(values):
        how = f"{list_by_rank([float(f'{value:.4g}') for value in values])} for {name}"
        clause = f"each rank multiplies the update of its shard by a factor of its own: {how}"
    elif largest - least > _MIN_SPREAD * largest:
        shown = list(known.items())[:MAX_LISTED]
        listed = ", ".join(f"{factor[0]:.4g} for {other}" for other, factor in shown)
        clause = f"the updates are multiplied by different factors: {listed}"
    else:
        clause = f"the update is {values[0]:.4g} times what it should be"
    return Explanation(Suspect.SCALED, clause, ratio=values[0], remedy=_SAME_SETTINGS)


def _explain_shards(
    updated: Sequence[TensorComparison], parity_result: ParityResult, axes: Mapping[str, int]
) -> Explanation | None:
    """Updates that are right nowhere but where ranks have all of a parameter.

    An optimizer that treats each element by itself gives a shard what it gives the full tensor.
    """
    reference, ranks = parity_result.reference, parity_result.ranks
    has_state = any(
        result.case.kind is TensorKind.STATE and result.verdict.agreement not in TOLERABLE
        for result in parity_result.comparisons
    )
    names = [result.case.name for result in updated]
    if has_state or not set(names) <= reference.gradients.keys():
        return None
    squares = {
        name: float(to_fp64_on_cpu(reference.gradients[name]).square().sum()) for name in names
    }
    sharded = [find_sharding_axes(name, squares, ranks, axes) for name in names]
    over = sharded[0]
    if not all(sharded):
        return None
    return Explanation(
        Suspect.MISSING_REDUCTION,
        "gradients, settings and state agree, and the parameters that differ are sharded"
        f" over {' and '.join(over)}: the update of an element depends on "
        "other elements, as with a norm or an orthogonal matrix, and each rank has only those of "
        "its shard",
        over,
        remedy="Compute what the update needs of the entire parameter over the axes that shard it: "
        "sum squares before the root, or gather the matrix first.",
    )
