"""Recognizes inputs of the model itself that differ, and samples that belong to another step."""

from __future__ import annotations

import torch

from shardscope.parallel.equivalence import Layout, TensorComparison
from shardscope.parallel.parity.evidence import shards_in_fp64, target_in_fp64
from shardscope.parallel.parity.explanation import UNKNOWN, Explanation
from shardscope.parallel.parity.result import Origin, OriginKind, ParityResult
from shardscope.record import Suspect

_MAX_SAMPLES = 4096
_REMEDY = (
    "Advance the order of the samples on the ranks as on the single device: call set_epoch() of "
    "a DistributedSampler in each epoch, and keep one iterator of the data over all steps."
)


def is_passed(origin: Origin, parity_result: ParityResult) -> bool:
    """Whether the input of a module that differs is an input of the model itself on every rank."""
    if origin.kind is not OriginKind.INPUT or origin.module != "":
        return False
    ranks, tensors = parity_result.ranks, origin.comparison.case.ranks
    return len(ranks) == len(tensors) and all(
        tensor is not None and any(_has_same_values(tensor, value) for value in rank.inputs)
        for rank, tensor in zip(ranks, tensors, strict=True)
    )


def _has_same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, of whatever dtypes."""
    return a.shape == b.shape and torch.equal(a.double(), b.double())


def explain_inputs(comparison: TensorComparison, parity_result: ParityResult) -> Explanation:
    """Whether inputs are positions of a part of the sequence, or samples of the step before."""
    if comparison.layout is not None and _are_counted_anew(comparison, comparison.layout):
        return Explanation(
            Suspect.WRONG_SLICE,
            "each rank counts positions from the start of its own part of the sequence, so that "
            "what began before that part starts anew in it",
            remedy="Compute positions from the entire sequence, and then give each rank its part.",
        )
    return _explain_stale_inputs(comparison, parity_result)


def _are_counted_anew(comparison: TensorComparison, layout: Layout) -> bool:
    """Whether integers that count up along a dim begin with 0 in each rank's shard of it.

    Beside the first element of a shard, they have to start anew where they should.
    """
    case, shards = comparison.case, shards_in_fp64(comparison.case)
    dims = {dim for dim in layout.dims if dim not in (None, case.batch_dim)}
    if case.floor is not None or case.calls or len(dims) != 1 or not layout.is_contiguous:
        return False
    (dim,) = dims
    assert dim is not None
    for shard, part in zip(shards, layout.split(target_in_fp64(case), shards), strict=True):
        value, wanted = shard.movedim(dim, 0), part.movedim(dim, 0)
        counts = [torch.where(wanted[1:] == 0, 0, tensor[:-1] + 1) for tensor in (value, wanted)]
        is_counted = torch.equal(value[1:], counts[0]) and torch.equal(wanted[1:], counts[1])
        if len(value) < 2 or not is_counted or bool(value[0].any()):
            return False
    return True


def _explain_stale_inputs(comparison: TensorComparison, parity_result: ParityResult) -> Explanation:
    """Whether the samples of the ranks are those of the single device's step before."""
    dim = comparison.case.batch_dim
    parts = [tensor for tensor in comparison.case.ranks if tensor is not None]
    previous = [] if parity_result.previous is None else parity_result.previous.inputs
    if not parts or any(not dim < part.ndim or part.ndim < 2 for part in parts):
        return UNKNOWN
    if sum(len(part) for part in parts) > _MAX_SAMPLES:
        return UNKNOWN
    earlier = {
        sample
        for tensor in previous
        if tensor.ndim == parts[0].ndim
        for sample in _list_samples(tensor, dim)
    }
    if not earlier.issuperset(sample for part in parts for sample in _list_samples(part, dim)):
        return UNKNOWN
    clause = "the ranks get the samples of the step before again"
    return Explanation(Suspect.STALE, clause, remedy=_REMEDY)


def _list_samples(tensor: torch.Tensor, dim: int) -> list[bytes]:
    """The values of each sample along a dim, as a key."""
    rows = tensor.detach().cpu().double().movedim(dim, 0).flatten(1).contiguous()
    return [bytes(row.numpy().data) for row in rows]
