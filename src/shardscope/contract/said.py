"""What was said, from whichever instrument looked: a trace, or a program that was cut."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shardscope.contract.limits import CauseKind
from shardscope.record import (
    BucketReduce,
    Call,
    Cause,
    Collective,
    CollectiveKind,
    Compiled,
    FullyShard,
    Phase,
    PlacedKind,
    Recording,
    Redistribute,
    Source,
    describe_cause,
    expand_ranks,
    name_axis,
)

__all__ = ["Said", "classify_cause", "has_trace", "list_said", "list_silent", "ranks_of"]

_HELD = (PlacedKind.PARAMETER, PlacedKind.BUFFER)


class Said(Struct, frozen=True, gc=False):
    """One collective; sizes are what a rank puts in, gets out and sends."""

    rank: int
    module: str | None
    phase: Phase
    axis: str
    kind: CollectiveKind
    cause: Cause | str | None
    sizes: tuple[int, int, int]
    source: Source | None

    @property
    def reason(self) -> str:
        """Why it was said, in words."""
        return self.cause if isinstance(self.cause, str) else describe_cause(self.cause)


def has_trace(recording: Recording) -> bool:
    """Whether collectives were looked for; recordings of old name no instrument, and are traces."""
    instruments = recording.run.instruments
    return "trace" in instruments or bool(recording.collectives) or not instruments


def list_said(recording: Recording) -> Sequence[Said] | None:
    """All collectives, or None if nobody looked for them."""
    if has_trace(recording):
        world_size = recording.run.world_size
        return [_read(call, world_size) for call in recording.collectives]
    if not recording.parallel:
        return None
    # All ranks of a program say the same; each program is judged like a rank of its own.
    return [
        Said(
            index,
            one.module,
            one.phase,
            one.axis,
            one.kind,
            one.cause,
            (one.size_bytes, 0, 0),
            one.source,
        )
        for index, program in enumerate(recording.parallel)
        for one in program.inserted
    ]


def list_silent(recording: Recording) -> list[str]:
    """Modules of programs that were cut, which are known by what they hold."""
    held = (
        one.name for program in recording.parallel for one in program.placed if one.kind in _HELD
    )
    return list(dict.fromkeys(name.rpartition(".")[0] for name in held))


def ranks_of(recording: Recording) -> tuple[int, ...]:
    """Those whose collectives `list_said` lists, the silent ones too."""
    if has_trace(recording):
        return tuple(dict.fromkeys(expand_ranks(recording.run.ranks)))
    return tuple(range(len(recording.parallel)))


def _read(call: Collective, world_size: int) -> Said:
    return Said(
        call.rank,
        call.owner,
        call.phase,
        name_axis(call, world_size),
        call.kind,
        call.cause,
        (call.input_bytes, call.output_bytes, call.wire_bytes),
        call.source,
    )


def classify_cause(cause: Cause | str | None) -> tuple[CauseKind, ...]:
    """What a contract may call it."""
    match cause:
        case Redistribute(is_implicit=True):
            return (CauseKind.REDISTRIBUTE, CauseKind.UNASKED)
        case Redistribute():
            return (CauseKind.REDISTRIBUTE,)
        case FullyShard():
            return (CauseKind.FULLY_SHARD,)
        case BucketReduce():
            return (CauseKind.DDP_BUCKET,)
        case Call():
            return (CauseKind.CALL,)
        case Compiled():
            return (CauseKind.COMPILED,)
    return (CauseKind.UNKNOWN,)
