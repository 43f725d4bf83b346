"""Explains inputs of the model that differ: which samples the ranks get, and of which step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from shardscope.parallel.equivalence import TensorComparison
from shardscope.parallel.parity.explanation import UNKNOWN, Explanation
from shardscope.parallel.parity.result import Origin, OriginKind, ParityResult
from shardscope.record import Suspect

_MAX_SAMPLES = 4096
_REMEDY = (
    "Let all ranks draw one order of the samples, from the same seed and epoch, and take "
    "different parts of it: DistributedSampler with set_epoch(), or the rank along the axis of "
    "the batch as its rank."
)


def is_passed(origin: Origin, parity_result: ParityResult) -> bool:
    """Whether the input of a module that differs is an input of the model itself on every rank."""
    if origin.kind is not OriginKind.INPUT or origin.module != "":
        return False
    ranks, tensors = parity_result.ranks, origin.comparison.case.ranks
    return len(ranks) == len(tensors) and all(
        tensor is not None and any(_is_equal(tensor, given) for given in rank.inputs)
        for rank, tensor in zip(ranks, tensors, strict=True)
    )


def _is_equal(tensor: torch.Tensor, given: torch.Tensor) -> bool:
    return tensor.shape == given.shape and torch.equal(tensor.double(), given.double())


def explain_inputs(comparison: TensorComparison, parity_result: ParityResult) -> Explanation:
    """Which samples the ranks get, if they are not those of the single device's step."""
    case, dim = comparison.case, comparison.case.batch_dim
    target, parts = case.target, [tensor for tensor in case.ranks if tensor is not None]
    if target is None or len(parts) < len(case.ranks) or target.ndim < 2 or target.ndim <= dim:
        return UNKNOWN
    if any(part.ndim != target.ndim for part in parts) or target.shape[dim] > _MAX_SAMPLES:
        return UNKNOWN
    places = {sample: index for index, sample in enumerate(_list_samples(target, dim))}
    of_ranks = [[places.get(sample) for sample in _list_samples(part, dim)] for part in parts]
    known = [[index for index in indices if index is not None] for indices in of_ranks]
    if any(len(indices) < len(every) for indices, every in zip(known, of_ranks, strict=True)):
        return _explain_other_samples(parts, dim, parity_result)
    size = target.shape[dim]
    unused = size - len(set().union(*known))
    if not unused:
        return UNKNOWN
    distinct = {tuple(indices) for indices in known}
    if len(distinct) == 1 and len(parts) > 1:
        clause = f"all ranks get the same {len(known[0])} of {size} samples"
    else:
        counts = Counter(index for indices in distinct for index in set(indices))
        repeated = sum(count > 1 for count in counts.values())
        clause = f"of {size} samples {repeated} are on several ranks and {unused} on none"
    return Explanation(Suspect.WRONG_SLICE, clause, remedy=_REMEDY)


def _explain_other_samples(
    parts: Sequence[torch.Tensor], dim: int, parity_result: ParityResult
) -> Explanation:
    """The samples of the ranks are not those of this step; perhaps those of the step before."""
    previous = [] if parity_result.previous is None else parity_result.previous.inputs
    earlier = {
        sample
        for given in previous
        if given.ndim == parts[0].ndim
        for sample in _list_samples(given, dim)
    }
    own = [sample for part in parts for sample in _list_samples(part, dim)]
    if earlier and earlier.issuperset(own):
        clause = "the ranks get the samples of the step before again"
        return Explanation(Suspect.STALE, clause, remedy=_REMEDY)
    return UNKNOWN


def _list_samples(tensor: torch.Tensor, dim: int) -> list[bytes]:
    """The values of each sample along a dim, as a key."""
    rows = tensor.detach().cpu().double().movedim(dim, 0).flatten(1).contiguous()
    return [bytes(row.numpy().data) for row in rows]
