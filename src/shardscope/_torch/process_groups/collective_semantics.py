"""What collectives compute: the result of every rank of a group, from the inputs of all ranks.

Used wherever all ranks are in one process: threaded ranks fill the output tensors of each call
(`fill_outputs`), ranks in lockstep take the results as new tensors (`collective_results`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.distributed import ReduceOp

from shardscope.errors import CollectiveError

Tensors = Sequence[torch.Tensor]


@final
@dataclass(frozen=True, eq=False)
class CollectiveRequest:
    """One rank's call of a collective.

    `kind` is `all_reduce`, `reduce`, `broadcast`, `all_gather`, `gather`, `scatter`,
    `reduce_scatter`, `all_to_all`, `all_to_all_single` or `barrier`; `root` is a rank of the group;
    `reduction` is the name of a `ReduceOp`, such as `SUM`; `factor` is that of `PREMUL_SUM`.
    `outputs` are the tensors to be filled, if the caller has some.
    """

    kind: str
    inputs: Tensors
    outputs: Tensors = ()
    root: int = 0
    reduction: str = ""
    factor: float | torch.Tensor = 1.0
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()
    purpose: str = ""  # in words, for shardscope's own collectives

    def describe(self) -> str:
        """`all_reduce of float32 [4, 8]`."""
        if self.purpose:
            return self.purpose
        tensors = self.inputs or self.outputs
        if not tensors:
            return self.kind
        first = tensors[0]
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        dtype = str(first.dtype).removeprefix("torch.")
        return f"{self.kind} of {dtype} {list(first.shape)}{more}"

    @property
    def signature(self) -> tuple[Any, ...]:
        """What all ranks must agree on."""
        return (self.kind, self.root, self.reduction)


def collective_results(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    """By rank of the group, the results of a collective, given the call of each rank.

    Results are new tensors, which ranks may share; only the root of `reduce` and `gather` has any,
    apart from its inputs. Raises where a real group would hang, fail or return garbage.
    """
    first = requests[0]
    for rank, request in enumerate(requests):
        if request.signature != first.signature:
            raise _disagree(requests, rank)
    with torch.no_grad():
        return _KINDS[first.kind](requests)


def fill_outputs(requests: Sequence[CollectiveRequest]) -> None:
    """Fill every rank's outputs with the results of a collective."""
    results = collective_results(requests)
    with torch.no_grad():
        # Results are new tensors: an output may share the memory of an input.
        for rank, (request, result) in enumerate(zip(requests, results, strict=True)):
            for output, value in zip(request.outputs, result, strict=True):
                if output.numel() != value.numel() or output.dtype != value.dtype:
                    raise _disagree(requests, rank)
                output.detach().copy_(value.reshape(output.shape))


def _disagree(requests: Sequence[CollectiveRequest], rank: int) -> CollectiveError:
    reference = 1 if rank == 0 else 0
    sides = "; ".join(
        f"rank {group_rank} of the group issues {requests[group_rank].describe()}"
        for group_rank in sorted({rank, reference})
    )
    return CollectiveError(
        f"ranks disagree on a collective: {sides}. Let every rank of a group issue the same "
        "collectives, on tensors that fit, in the same order."
    )


def _reduce(requests: Sequence[CollectiveRequest], index: int) -> torch.Tensor:
    """Reduce the input `index` of all ranks, in the order of the ranks.

    16-bit floats are accumulated in float32 and rounded once, so that the error does not grow with
    the number of ranks.
    """
    parts = [request.inputs[index] for request in requests]
    for rank, part in enumerate(parts):
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
            raise _disagree(requests, rank)
    reduction = requests[0].reduction
    if reduction not in _REDUCTIONS:
        raise CollectiveError(
            f"{requests[0].kind} reduces by {reduction}, which ranks in one process cannot. Use "
            "SUM, AVG, MAX, MIN or PRODUCT, or run the ranks as processes."
        )
    if reduction == "PREMUL_SUM":
        parts = [request.inputs[index] * request.factor for request in requests]
    dtype = parts[0].dtype
    is_16_bit = dtype.is_floating_point and dtype.itemsize == 2
    total = parts[0].to(torch.float32 if is_16_bit else dtype, copy=True)
    for part in parts[1:]:
        total = _REDUCTIONS[reduction](total, part)
    if reduction == "AVG":
        total.div_(len(parts))
    return total.to(dtype)


# Each reduces the second tensor into the first, in place where torch can.
_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PREMUL_SUM": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


def name_reduction(op: Any) -> str:
    """The name of a `ReduceOp` or `RedOpType`."""
    names = (name for name, reduce_op in ReduceOp.RedOpType.__members__.items() if op == reduce_op)
    return next(names, "a custom reduction")


def read_factor(op: Any) -> float | torch.Tensor:
    """The factor by which `PREMUL_SUM` multiplies each input; 1 for any other reduction."""
    is_scaled = isinstance(op, ReduceOp) and op == ReduceOp.RedOpType.PREMUL_SUM
    factor: float | torch.Tensor = op.__getstate__()[1] if is_scaled else 1.0
    return factor


def _all_reduce(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    _check_counts(requests)
    totals = [_reduce(requests, index) for index in range(len(requests[0].inputs))]
    return [totals for _ in requests]


def _reduce_to_root(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    totals = _all_reduce(requests)
    return [
        totals[rank] if rank == requests[0].root else request.inputs
        for rank, request in enumerate(requests)
    ]


def _broadcast(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    _check_counts(requests)
    sources = [tensor.clone() for tensor in requests[requests[0].root].inputs]
    return [sources for _ in requests]


def _all_gather(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    """Outputs are ordered by input, then by rank."""
    _check_counts(requests)
    count = len(requests[0].inputs)
    gathered = [request.inputs[index].clone() for index in range(count) for request in requests]
    return [gathered for _ in requests]


def _gather(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    gathered = [request.inputs[0].clone() for request in requests]
    return [gathered if rank == requests[0].root else [] for rank in range(len(requests))]


def _scatter(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    sources = requests[requests[0].root].inputs
    return [[sources[rank].clone()] for rank in range(len(requests))]


def _reduce_scatter(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    """Inputs are ordered by output, then by rank."""
    _check_counts(requests)
    size = len(requests)
    totals = [_reduce(requests, index) for index in range(len(requests[0].inputs))]
    return [totals[rank::size] for rank in range(size)]


def _all_to_all(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    _check_counts(requests)
    return [[request.inputs[rank].clone() for request in requests] for rank in range(len(requests))]


def _all_to_all_single(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    """Rank i receives the i-th split of every rank's input, concatenated in the ranks' order."""
    sent = [split_for_ranks(r.inputs[0], len(requests), r.input_splits) for r in requests]
    results: list[Tensors] = []
    for rank, request in enumerate(requests):
        received = [parts[rank] for parts in sent]
        if request.output_splits:
            expected = list(request.output_splits)
        else:  # equal splits, of the output if there is one
            outputs = request.outputs or request.inputs
            expected = [part.shape[0] for part in split_for_ranks(outputs[0], len(requests))]
        if [part.shape[0] for part in received] != expected:
            raise _disagree(requests, rank)
        results.append([torch.cat(received)])
    return results


def split_for_ranks(
    tensor: torch.Tensor, num_ranks: int, sizes: Sequence[int] = ()
) -> list[torch.Tensor]:
    """A tensor's parts for each rank along the first dim, of these sizes or of equal size."""
    if sizes:
        return list(tensor.split(list(sizes)))
    if not tensor.shape[0]:
        return [tensor] * num_ranks
    return list(tensor.split(tensor.shape[0] // num_ranks))


def _barrier(requests: Sequence[CollectiveRequest]) -> list[Tensors]:
    return [[] for _ in requests]


def _check_counts(requests: Sequence[CollectiveRequest]) -> None:
    for rank, request in enumerate(requests):
        if len(request.inputs) != len(requests[0].inputs):
            raise _disagree(requests, rank)


_KINDS: dict[str, Callable[[Sequence[CollectiveRequest]], list[Tensors]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce_to_root,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}
