"""Describes causes, errors and axes as text, for all renderers."""

from __future__ import annotations

from shardscope.errors import ShardscopeError
from shardscope.record.recording import (
    BucketReduce,
    Call,
    Cause,
    Collective,
    Compiled,
    FullyShard,
    Redistribute,
)

SIMULATION_TIME = "time of the simulation, not of a run"
"""What every view says beside times that were measured in a simulated world."""

_NO_CAUSE = "unknown cause"
_MAX_ERROR = 200  # characters of a message that is not shardscope's


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


def describe_error(error: BaseException) -> str:
    """The type and the first line of an exception; a long message ends with "…".

    Our own messages are never shortened: their last words are the remedy.

    Examples:
        >>> describe_error(ZeroDivisionError("division by zero"))
        'ZeroDivisionError: division by zero'
    """
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 - an exception's own __str__ may fail
        lines = []
    if not lines:
        return type(error).__name__
    line = lines[0]
    if len(line) > _MAX_ERROR and not isinstance(error, ShardscopeError):
        line = f"{line[:_MAX_ERROR].rpartition(' ')[0] or line[:_MAX_ERROR]}…"
    return f"{type(error).__name__}: {line}"


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
