"""Recognizes inputs of the model itself that differ, and samples that belong to another step."""

from __future__ import annotations

import torch

from shardscope.parallel.equivalence import TensorComparison
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
