"""What to say of a divergence, and what to do about it."""

from __future__ import annotations

from shardscope.parallel.parity.locate import Parting
from shardscope.record import Phase, Suspect

__all__ = ["describe_parting", "suggest"]

_FORWARD = {
    Suspect.MISSING_REDUCTION: "Sum its result over the axis: output_layouts=Replicate() for a "
    "row-wise layer, or an all_reduce where its forward is written by hand.",
    Suspect.DOUBLE_REDUCTION: "Remove one of its reductions, or mark its input as Replicate "
    "instead of Partial.",
    Suspect.WRONG_SLICE: "Load each rank's own shard: split the weight by the rank along its "
    "axis, not by the global rank or in another order.",
    Suspect.PERMUTED: "Gather shards along the dim they were split along, in rank order.",
    Suspect.SCALED: "Look for a factor that is applied on each rank, such as a mean over a shard.",
    Suspect.STALE: "Check that its result is used and that its weights were loaded.",
    Suspect.TORN_TIE: "Tie them again after sharding (head.weight = tok.weight), and give both the "
    "same placement.",
    Suspect.RANDOMNESS: "Use the same seed on all ranks where a value is replicated, and "
    "different seeds where it is sharded.",
}
_BACKWARD = {
    Suspect.MISSING_REDUCTION: "Sum the gradient over the axis: to_local(grad_placements=…) "
    "with Partial where each rank has a partial sum, or a hook that "
    "reduces it.",
    Suspect.DOUBLE_REDUCTION: "Reduce the gradient once: torch's all_reduce adds another one "
    "in backward, and FSDP and DDP average on their own.",
}
_ANY = "Compare its code on one rank with the single device's, beginning with its inputs."


def suggest(suspect: Suspect, phase: Phase) -> str:
    """What to do, in a sentence."""
    known = _BACKWARD.get(suspect) if phase is Phase.BACKWARD else None
    return known or _FORWARD.get(suspect, _ANY)


def describe_parting(parting: Parting, explained: str) -> str:
    """What is wrong there, in a sentence without its end."""
    module = f"'{parting.module}'" if parting.module else "the model itself"
    which = f" ({parting.path})" if parting.path else ""
    if parting.phase is Phase.FORWARD:
        fact = f"{module} is the first module whose output{which} differs"
    elif parting.back_to is not None:
        holder = f"'{parting.back_to}'" if parting.back_to else "the model"
        fact = (
            f"forward agrees; the gradient that {module} hands back to what {holder} put out"
            f"{which} differs, and all behind it agrees"
        )
    else:
        fact = (
            f"forward agrees, and so does the gradient that comes to {module}; that of its own "
            f"{parting.path} differs"
        )
    return f"{fact}: {explained}" if explained else fact
