"""Suggests a remedy for a cause and the kind of tensor that differs."""

from __future__ import annotations

from shardscope.parallel.parity.causes import Explanation
from shardscope.parallel.parity.locate import Kind
from shardscope.record import Suspect

_FIXED = {
    Suspect.WRONG_SLICE: "Give each rank its own shard: slice by the rank along the axis "
    "(mesh.get_local_rank(axis)), not by the global rank, and offset by the ranks before it.",
    Suspect.PERMUTED: "Concatenate shards along the dim they were split along, in the order of the "
    "ranks; undo a zigzag or striped order, and give labels and positions the same order.",
    Suspect.STALE: "Check that it is used, that nothing is detached or frozen on the ranks, and "
    "that the weights were loaded.",
    Suspect.RANDOMNESS: "Use the same seed on all ranks where a tensor is replicated, and "
    "different seeds where it is sharded.",
}


def suggest(cause: Explanation, kind: Kind) -> str:
    """The remedy in a sentence or two; `kind` is the tensor that differs first."""
    if cause.remedy:
        return cause.remedy
    over = " and ".join(cause.axes) or "the axis"
    match cause.suspect:
        case Suspect.MISSING_REDUCTION:
            return _suggest_reduction(cause, kind, over)
        case Suspect.DOUBLE_REDUCTION:
            return _suggest_single_reduction(cause, kind, over)
        case Suspect.SCALED if cause.axes:
            return (
                f"Compute the factor over all ranks of {over}, not on each rank by itself: "
                "all-reduce the number of samples or valid tokens, or the norm, first."
            )
        case Suspect.SCALED:
            return (
                "Look for a factor that only one version applies: the number of micro-batches, of "
                "tokens or of ranks, or a mean over a shard."
            )
        case Suspect.STALE if kind is Kind.LOSS:
            return (
                "Check that the ranks run backward, that nothing is detached or frozen there, and "
                "that gradients are synchronised in the last micro-batch: FSDP has no gradients "
                "before set_requires_gradient_sync(True)."
            )
        case Suspect.WRONG_GROUP:
            return f"Pass the process group of {over} to the collective."
        case Suspect.WRONG_DIM:
            return (
                f"Shard the other dim: divide the number of heads by the size of {over} on each "
                "rank, or let view() infer it from the size of a head."
            )
    if cause.suspect in _FIXED:
        return _FIXED[cause.suspect]
    return "Compare this code on one rank with the single device, starting with its inputs."


def _suggest_reduction(cause: Explanation, kind: Kind, over: str) -> str:
    if not cause.reduction and kind is Kind.LOSS:
        return (
            f"Gather the output over {over} before the loss, or use a loss that reduces over "
            f"{over}, such as loss_parallel."
        )
    if not cause.reduction:
        return (
            f"Gather the input over {over} first, or reduce inside over {over}, as SyncBatchNorm "
            "and loss_parallel do."
        )
    if cause.reduction == "sum":
        return {
            Kind.GRADIENT_OF_PARAMETER: f"Sum the gradient over {over}: "
            "to_local(grad_placements=[Partial()]) for a DTensor, or a hook that all-reduces it.",
            Kind.GRADIENT_OF_INPUT: f"All-reduce the gradient of its input over {over} in "
            "backward, as a column-wise layer does.",
            Kind.GRADIENT_OF_OUTPUT: f"All-reduce that gradient over {over} in backward.",
            Kind.LOSS: f"Sum the gradients over {over} with an all-reduce after backward.",
            Kind.BUFFER: f"Sum what is written into the buffer over {over} with an all-reduce.",
        }.get(
            kind,
            f"Sum its output over {over}: output_layouts=Replicate() for a row-wise layer, or an "
            "all_reduce in a forward written by hand.",
        )
    return {
        Kind.GRADIENT_OF_PARAMETER: f"Average the gradient over {over}: let fully_shard or DDP "
        "manage the parameter, or all-reduce its gradient with ReduceOp.AVG.",
        Kind.GRADIENT_OF_INPUT: f"Average the gradient of its input over {over} in backward.",
        Kind.GRADIENT_OF_OUTPUT: f"Average that gradient over {over} in backward.",
        Kind.LOSS: f"Average the gradients over {over}: with DDP or fully_shard on that axis "
        "(synchronised at least in the last micro-batch), or an all-reduce after backward.",
        Kind.BUFFER: f"Average what is written into the buffer over {over}: with SyncBatchNorm, or "
        "an all-reduce.",
    }.get(kind, f"Average its output over {over} with an all-reduce.")


def _suggest_single_reduction(cause: Explanation, kind: Kind, over: str) -> str:
    is_forward = kind in (Kind.OUTPUT, Kind.INPUT)
    if cause.ratio is None:
        return "Add the bias once: after the reduction, or on one rank only."
    if cause.reduction == "mean":
        if is_forward:
            return f"Sum over {over} instead of averaging, or divide by its size only once."
        return (
            f"Divide by the size of {over} only once: FSDP and DDP average gradients, so the loss "
            "must not be divided by it as well; or sum gradients instead of averaging them."
        )
    if is_forward:
        return (
            f"Remove one of its reductions over {over}, or mark its input as Replicate() and not "
            "as Partial()."
        )
    if kind is Kind.LOSS:
        return (
            f"Average gradients over {over} instead of summing them, or divide the loss by the "
            f"size of {over}."
        )
    return (
        f"Reduce the gradient over {over} only once: the backward of an all_reduce from "
        "torch.distributed.nn all-reduces again, and FSDP and DDP average by themselves."
    )
