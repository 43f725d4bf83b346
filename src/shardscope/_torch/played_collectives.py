"""What each collective does, computed for all ranks of a group at once, on tensors with data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.distributed import ReduceOp

from shardscope.errors import CollectiveError

__all__ = ["Posted", "carry_out", "name_reduction"]

Tensors = Sequence[torch.Tensor]


@final
@dataclass(frozen=True, eq=False)
class Posted:
    """One rank's part in a collective: what it puts in, and where it wants what comes out."""

    kind: str
    inputs: Tensors
    outputs: Tensors
    root: int = 0
    reduction: str = ""
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()
    purpose: str = ""  # in words, of our own collectives, which the user did not write

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


def carry_out(posts: Sequence[Posted]) -> None:
    """Fill every rank's outputs; raises where a real group would hang, fail or garble."""
    first = posts[0]
    for rank, post in enumerate(posts):
        if post.signature != first.signature:
            raise _disagree(posts, rank)
    with torch.no_grad():
        results = _KINDS[first.kind](posts)
        # Results are new tensors: an output may be the very memory of some input.
        for rank, (post, result) in enumerate(zip(posts, results, strict=True)):
            for output, value in zip(post.outputs, result, strict=True):
                if output.numel() != value.numel() or output.dtype != value.dtype:
                    raise _disagree(posts, rank)
                output.detach().copy_(value.reshape(output.shape))


def _disagree(posts: Sequence[Posted], rank: int) -> CollectiveError:
    other = 1 if rank == 0 else 0
    sides = "; ".join(
        f"rank {one} of the group issues {posts[one].describe()}" for one in sorted({rank, other})
    )
    return CollectiveError(
        f"ranks disagree on a collective: {sides}. Let every rank of a group issue the same "
        "collectives, on tensors that fit, in the same order."
    )


def _reduce(posts: Sequence[Posted], index: int) -> torch.Tensor:
    parts = [post.inputs[index] for post in posts]
    for rank, part in enumerate(parts):
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
            raise _disagree(posts, rank)
    reduction = posts[0].reduction
    if reduction not in _REDUCTIONS:
        raise CollectiveError(
            f"{posts[0].kind} reduces by {reduction}, which ranks in one process cannot. Use SUM, "
            "AVG, MAX, MIN or PRODUCT, or run the ranks as processes."
        )
    total = parts[0].clone()
    for part in parts[1:]:
        _REDUCTIONS[reduction](total, part)
    return total.div_(len(parts)) if reduction == "AVG" else total


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MAX": lambda total, part: torch.maximum(total, part, out=total),
    "MIN": lambda total, part: torch.minimum(total, part, out=total),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


def name_reduction(op: Any) -> str:
    """What a reduction is called, of torch's two kinds of objects for it."""
    names = (name for name, known in ReduceOp.RedOpType.__members__.items() if op == known)
    return next(names, "a reduction of its own")


def _all_reduce(posts: Sequence[Posted]) -> list[Tensors]:
    _check_counts(posts)
    totals = [_reduce(posts, index) for index in range(len(posts[0].inputs))]
    return [totals for _ in posts]


def _reduce_to_root(posts: Sequence[Posted]) -> list[Tensors]:
    totals = _all_reduce(posts)
    return [
        totals[rank] if rank == posts[0].root else post.inputs for rank, post in enumerate(posts)
    ]


def _broadcast(posts: Sequence[Posted]) -> list[Tensors]:
    _check_counts(posts)
    sources = [one.clone() for one in posts[posts[0].root].inputs]
    return [sources for _ in posts]


def _all_gather(posts: Sequence[Posted]) -> list[Tensors]:
    """Outputs are one for each rank, for each input."""
    _check_counts(posts)
    count = len(posts[0].inputs)
    gathered = [post.inputs[index].clone() for index in range(count) for post in posts]
    return [gathered for _ in posts]


def _gather(posts: Sequence[Posted]) -> list[Tensors]:
    gathered = [post.inputs[0].clone() for post in posts]
    return [gathered if rank == posts[0].root else [] for rank in range(len(posts))]


def _scatter(posts: Sequence[Posted]) -> list[Tensors]:
    sources = posts[posts[0].root].inputs
    return [[sources[rank].clone()] for rank in range(len(posts))]


def _reduce_scatter(posts: Sequence[Posted]) -> list[Tensors]:
    """Inputs are one for each rank, for each output."""
    _check_counts(posts)
    size = len(posts)
    totals = [_reduce(posts, index) for index in range(len(posts[0].inputs))]
    return [totals[rank::size] for rank in range(size)]


def _all_to_all(posts: Sequence[Posted]) -> list[Tensors]:
    _check_counts(posts)
    return [[post.inputs[rank].clone() for post in posts] for rank in range(len(posts))]


def _all_to_all_single(posts: Sequence[Posted]) -> list[Tensors]:
    sent = [_split(post.inputs[0], post.input_splits, len(posts)) for post in posts]
    results: list[Tensors] = []
    for rank, post in enumerate(posts):
        received = [parts[rank] for parts in sent]
        wanted = _split(post.outputs[0], post.output_splits, len(posts))
        if any(one.shape != other.shape for one, other in zip(received, wanted, strict=True)):
            raise _disagree(posts, rank)
        results.append([torch.cat(received)])
    return results


def _split(tensor: torch.Tensor, sizes: Sequence[int], num_ranks: int) -> Tensors:
    if sizes:
        return list(tensor.split(list(sizes)))
    if not tensor.shape[0]:
        return [tensor] * num_ranks
    return list(tensor.split(tensor.shape[0] // num_ranks))


def _barrier(posts: Sequence[Posted]) -> list[Tensors]:
    return [[] for _ in posts]


def _check_counts(posts: Sequence[Posted]) -> None:
    for rank, post in enumerate(posts):
        if len(post.inputs) != len(posts[0].inputs):
            raise _disagree(posts, rank)


_KINDS: dict[str, Callable[[Sequence[Posted]], list[Tensors]]] = {
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
