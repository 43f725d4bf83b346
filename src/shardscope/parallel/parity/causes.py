"""Infers the probable cause of a difference from the values of a tensor on each rank.

Each family of mistakes has a file: `reduction_causes.py` (a reduction that is missing, or over the
wrong axes), `scale_causes.py` (a factor, a bias, a residual) and `slice_causes.py` (wrong slices,
dims and orders). A cause counts only if it explains the values up to the noise floor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shardscope.parallel.equivalence import TensorComparison, shard_layouts
from shardscope.parallel.parity.evidence import MAX_ELEMENTS, Evidence
from shardscope.parallel.parity.explanation import UNKNOWN, Explanation
from shardscope.parallel.parity.reduction_causes import (
    find_divisors,
    find_missing_reductions,
    find_reduced_shards,
    find_scattered,
)
from shardscope.parallel.parity.scale_causes import (
    find_bias,
    find_ratio,
    find_ratio_of_each_rank,
    find_ratio_of_each_row,
    find_residual,
)
from shardscope.parallel.parity.slice_causes import (
    find_order,
    find_shuffled_values,
    find_slices,
    find_slices_of_each_rank,
    find_wrong_dim,
)
from shardscope.record import Agreement, Suspect

_MAX_LAYOUTS = 12


def explain(
    comparison: TensorComparison,
    axes: Mapping[str, int],
    biases: Sequence[torch.Tensor] = (),
    inputs: Sequence[torch.Tensor] = (),
    *,
    is_forward: bool = False,
    batch_axes: Sequence[int] = (),
) -> Explanation:
    """The likeliest cause of a difference.

    `biases` and `inputs` are tensors that may have been added too often, or not at all. A
    result of forward is rarely a mean over ranks, but gradients often are. `batch_axes` are the
    indices of the axes along which the batch is sharded.
    """
    case = comparison.case
    if comparison.verdict.agreement is Agreement.MISSING:
        return Explanation(Suspect.STALE, comparison.verdict.detail)
    if case.target is None or not comparison.full:
        return UNKNOWN
    if len(case.ranks) != math.prod(axes.values()):  # some ranks of the mesh do not have it
        axes = dict(zip(axes, case.sizes, strict=True))
    first = Evidence(
        comparison,
        axes,
        biases=biases,
        inputs=inputs,
        is_forward=is_forward,
        batch_axes=batch_axes,
    )
    wrong_dim = next(find_wrong_dim(first), None)
    if wrong_dim is not None:
        return wrong_dim
    unknown, evidence = UNKNOWN, first
    relaid = (first.with_ranks(full) for full in _other_layouts(comparison))
    for evidence in itertools.islice(itertools.chain([first], relaid), _MAX_LAYOUTS):
        explanation = next(_explanations(evidence), None)
        if explanation is not None:
            return explanation
        unknown = unknown if unknown.describe() else _describe_right_ranks(evidence)
    finders = (
        find_slices_of_each_rank,
        find_ratio_of_each_rank,
        find_ratio_of_each_row,
        find_shuffled_values,
    )
    layouts = (first,) if evidence is first else (first, evidence)
    causes = (find(layout) for find in finders for layout in layouts)
    return next(itertools.chain.from_iterable(causes), unknown)


def _other_layouts(comparison: TensorComparison) -> Iterator[Sequence[torch.Tensor]]:
    """The full tensors that the shards make up in other layouts than the comparison's."""
    case = comparison.case
    shards = [tensor for tensor in case.ranks if tensor is not None]
    if comparison.layout is None or case.target is None or case.calls:
        return
    for layout in shard_layouts(shards, case.target.shape, case.sizes):
        joined = layout.join(shards) if layout != comparison.layout else None
        if joined is not None and all(full.shape == case.target.shape for full in joined):
            yield joined


def _explanations(evidence: Evidence) -> Iterator[Explanation]:
    """The causes that explain the full tensors of the ranks, likeliest first."""
    if not any(bool(tensor.any()) for tensor in evidence.ranks):
        yield Explanation(Suspect.STALE, predicate="is zero on every rank", ratio=0.0)
    yield from find_missing_reductions(evidence)
    yield from find_divisors(evidence)
    yield from find_ratio(evidence)
    yield from find_bias(evidence)
    yield from _explain_without_bias(evidence)
    yield from find_residual(evidence)
    if evidence.target.numel() <= MAX_ELEMENTS:
        yield from find_reduced_shards(evidence)
        yield from find_slices(evidence)
        yield from find_scattered(evidence)
        yield from find_order(evidence)


def _explain_without_bias(evidence: Evidence) -> Iterator[Explanation]:
    """A reduction, or a factor, before the bias was added."""
    for bias in evidence.biases if evidence.is_forward else ():
        without = evidence.without(bias)
        for explanation in itertools.chain(find_missing_reductions(without), find_ratio(without)):
            clause = f"apart from the bias {explanation.describe()}"
            yield replace(explanation, clause=clause, predicate="")


def _describe_right_ranks(evidence: Evidence) -> Explanation:
    """No cause; if the tensor is right on some ranks only, an explanation that lists them."""
    is_right = [evidence.is_near(tensor, evidence.target) for tensor in evidence.ranks]
    if not any(is_right) or all(is_right):
        return UNKNOWN
    right = ", ".join(str(rank) for rank, is_right_here in enumerate(is_right) if is_right_here)
    return Explanation(Suspect.UNKNOWN, predicate=f"matches on rank {right} only")
