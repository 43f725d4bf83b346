"""The probable cause of a difference in words: the evidence, the location and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from shardscope.parallel.parity.result import Origin, OriginKind
from shardscope.record import Suspect

Reduction = Literal["sum", "mean", ""]
MAX_LISTED = 4
"""How many ranks or parameters an explanation lists."""
_MAX_NAMES = 3  # tensors that a sentence names


@final
@dataclass(frozen=True)
class Explanation:
    """A suspected cause with the evidence for it.

    The evidence is a `clause`, such as "the bias is missing", or a `predicate` of the tensor,
    such as "is zero on every rank". `reduction` over `axes` is the reduction that is missing,
    or applied twice; `ratio` is the factor by which the tensor is too large. `remedy` is set
    where the evidence asks for one of its own.
    """

    suspect: Suspect
    clause: str = ""
    axes: tuple[str, ...] = ()
    reduction: Reduction = ""
    ratio: float | None = None
    remedy: str = ""
    predicate: str = ""

    def describe(self, subject: str = "it") -> str:
        """The evidence as a clause; empty if there is none."""
        return f"{subject} {self.predicate}" if self.predicate else self.clause

    def to_sentence(self, subject: str = "it") -> str:
        """The evidence as a sentence; empty if there is none."""
        return make_sentence(self.describe(subject))

    @property
    def group_key(self) -> tuple[object, ...]:
        """Equal for tensors that differ for the same reason."""
        ratio = None if self.ratio is None else round(self.ratio, 3)
        return self.suspect, self.axes, self.reduction, ratio


UNKNOWN = Explanation(Suspect.UNKNOWN)
OWN_VALUES = Explanation(
    Suspect.OUT_OF_SYNC,
    "each rank has its own value, computed from what it alone sees",
    remedy="Reduce what it is computed from over the ranks that have other samples, tokens or "
    "experts, before it is updated.",
)


def make_sentence(clause: str) -> str:
    """The clause with a capital letter and a full stop."""
    return f"{clause[:1].upper()}{clause[1:]}." if clause else ""


def list_names(names: Sequence[str]) -> str:
    """The first names as text, and how many more there are."""
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _MAX_NAMES} more" if len(unique) > _MAX_NAMES else ""
    return ", ".join(unique[:_MAX_NAMES]) + more


def list_by_rank(values: Sequence[float]) -> str:
    """The values of the ranks, by rank if they differ."""
    if len(set(values)) == 1:
        return f"{values[0]:.6g} on the ranks"
    listed = [f"{value:.6g} on rank {rank}" for rank, value in enumerate(values[:4])]
    return ", ".join([*listed, *(["…"] if len(values) > 4 else [])])


def describe_location(origin: Origin) -> str:
    """A sentence about where the versions diverge; it states only what was compared."""
    named_module = f"`{origin.named_module}`" if origin.named_module else "the model"
    code_module = f"`{origin.module}`" if origin.module else "the model"
    which = f" ({origin.path})" if origin.path not in ("", "[0]") else ""
    match origin.kind:
        case OriginKind.OUTPUT if origin.named_module:
            agree = "; its inputs agree" if origin.is_first else ""
            return f"{named_module} is the first module whose output{which} differs{agree}."
        case OriginKind.OUTPUT:
            agree = "; what its modules return agrees" if origin.is_first else ""
            return f"The output of the model{which} is the first tensor that differs{agree}."
        case OriginKind.INPUT if origin.module is None:
            return f"The input of the model{which} differs already."
        case OriginKind.INPUT:
            agree = ", while what it is computed from agrees" if origin.is_first else ""
            return (
                f"The first tensor that differs is the input{which} of {named_module}{agree}: the "
                f"two versions diverge in the code of {code_module} itself."
            )
        case OriginKind.GRADIENT_OF_INPUT:
            fact = f"The first gradient that differs is that of the input{which} of {named_module}"
            return f"{fact}, which its backward returns."
        case OriginKind.LOSS:
            return (
                "The gradient of the model's output differs already, so the two versions diverge "
                "in the loss."
            )
        case _:
            return (
                f"The first gradient that differs is that of the output{which} of {named_module}: "
                f"the two versions diverge in the code of {code_module} itself."
            )


def name_location(origin: Origin) -> str:
    """The module whose code it is, or what it is called outside the modules.

    Between the stages of a pipeline, where that is the model itself, the module behind it.
    """
    if origin.module == "" and origin.is_of_stage:
        return origin.named_module
    if origin.module is None:
        return "the loss" if origin.kind is OriginKind.LOSS else "the inputs of the model"
    return origin.module or "the model itself"


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


def suggest_remedy(cause: Explanation, kind: OriginKind) -> str:
    """The remedy in a sentence or two; `kind` is the tensor that differs first."""
    if cause.remedy:
        return cause.remedy
    over = " and ".join(cause.axes) or "that axis"
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
        case Suspect.STALE if kind is OriginKind.LOSS:
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


def _suggest_reduction(cause: Explanation, kind: OriginKind, over: str) -> str:
    if not cause.reduction and kind is OriginKind.LOSS:
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
            OriginKind.GRADIENT_OF_PARAMETER: f"Sum the gradient over {over}: "
            "to_local(grad_placements=[Partial()]) for a DTensor, or a hook that all-reduces it.",
            OriginKind.GRADIENT_OF_INPUT: f"All-reduce the gradient of its input over {over} in "
            "backward, as a column-wise layer does.",
            OriginKind.GRADIENT_OF_OUTPUT: f"All-reduce that gradient over {over} in backward.",
            OriginKind.LOSS: f"Sum the gradients over {over} with an all-reduce after backward.",
            OriginKind.BUFFER: f"Sum what is written into the buffer over {over} with an "
            "all-reduce.",
        }.get(
            kind,
            f"Sum its output over {over}: output_layouts=Replicate() for a row-wise layer, or an "
            "all_reduce in a forward written by hand.",
        )
    return {
        OriginKind.GRADIENT_OF_PARAMETER: f"Average the gradient over {over}: let fully_shard or "
        "DDP manage the parameter, or all-reduce its gradient with ReduceOp.AVG.",
        OriginKind.GRADIENT_OF_INPUT: f"Average the gradient of its input over {over} in backward.",
        OriginKind.GRADIENT_OF_OUTPUT: f"Average that gradient over {over} in backward.",
        OriginKind.LOSS: f"Average the gradients over {over}: with DDP or fully_shard on that axis "
        "(synchronised at least in the last micro-batch), or an all-reduce after backward.",
        OriginKind.BUFFER: f"Average what is written into the buffer over {over}: with "
        "SyncBatchNorm, or an all-reduce.",
    }.get(kind, f"Average its output over {over} with an all-reduce.")


def _suggest_single_reduction(cause: Explanation, kind: OriginKind, over: str) -> str:
    is_forward = kind in (OriginKind.OUTPUT, OriginKind.INPUT)
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
    if kind is OriginKind.LOSS:
        return (
            f"Average gradients over {over} instead of summing them, or divide the loss by the "
            f"size of {over}."
        )
    if kind is OriginKind.GRADIENT_OF_PARAMETER and cause.ratio > 1:
        return (
            f"Reduce the gradient over {over} only once, or divide it by all ranks whose samples "
            "it is summed over: FSDP of experts divides by its own mesh only, unless "
            "set_gradient_divide_factor() says otherwise."
        )
    return (
        f"Reduce the gradient over {over} only once: the backward of an all_reduce from "
        "torch.distributed.nn all-reduces again, and FSDP and DDP average by themselves."
    )
