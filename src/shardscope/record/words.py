"""Words that every view uses: of a collective, and of times."""

from __future__ import annotations

from shardscope.record.recording import (
    BucketReduce,
    Call,
    Cause,
    Collective,
    Compiled,
    FullyShard,
    Redistribute,
)

__all__ = ["SIMULATION_TIME", "describe_cause", "name_axis"]

SIMULATION_TIME = "time of the simulation, not of a run"
"""What every view says beside times that were measured in a simulated world."""

_NO_CAUSE = "unknown cause"


def describe_cause(cause: Cause | None) -> str:
    """Describe a cause in a few words; causes with the same words are counted together.

    Args:
        cause: The cause of a collective, or None.

    Examples:
        >>> describe_cause(collective.cause)
    """
    match cause:
        case Redistribute(before=before, after=after, asked_by=asked_by, is_implicit=is_implicit):
            move = f"redistribution {', '.join(before)} → {', '.join(after)}"
            op = asked_by.removesuffix(".default")
            return f"implicit {move}, required by {op}" if is_implicit else f"{move} for {op}"
        case FullyShard(action=action):
            return f"FSDP {action}"
        case BucketReduce():
            return "DDP gradient bucket"
        case Call(api=api):
            return f"call of {api}"
        case Compiled(graph=graph):
            return f"compiled graph {graph}"
    return _NO_CAUSE


def name_axis(call: Collective, world_size: int) -> str:
    """The mesh axis of a collective, or the number of ranks of its group if it has no axis.

    Args:
        call: The collective.
        world_size: The number of ranks of the world.

    Examples:
        >>> name_axis(collective, recording.run.world_size)
    """
    if call.axis is not None:
        return call.axis
    return "world" if call.num_ranks == world_size else f"{call.num_ranks} ranks"
