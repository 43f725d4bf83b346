"""What each recorded rank issued in each group, in order, and how a sentence names it.

A rank is judged only by what its recording proves: where records were lost, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record.kinds import CollectiveKind
from shardscope.record.ranks import list_ranks
from shardscope.record.recording import Collective, Recording, list_calls_by_group
from shardscope.record.source import Phase

__all__ = [
    "P2P_KINDS",
    "RANK_MISMATCH",
    "GroupCalls",
    "RankCalls",
    "describe_call",
    "find_drift",
    "line_of",
    "name_ranks",
    "payload_bytes",
    "sort_by_group",
]

RANK_MISMATCH = "rank-mismatch"
P2P_KINDS = (CollectiveKind.SEND, CollectiveKind.RECV)


class RankCalls(Struct, frozen=True):
    """What one rank issued in one group, as far as its recording shows."""

    collectives: dict[int, Collective]  # by position among the group's collectives
    transfers: list[Collective]  # sends and receives, up to the first that may be missing
    is_known: bool  # what is not here was not issued before the recording stops
    is_finished: bool  # and the rank left its trace normally, so it was never issued

    @property
    def num_collectives(self) -> int:
        """How many positions of the group it has reached."""
        return max(self.collectives, default=-1) + 1


GroupCalls = dict[int, RankCalls]
"""What the recorded ranks of one group issued; a rank that issued nothing is there too."""


def sort_by_group(recording: Recording) -> dict[str, GroupCalls]:
    """The calls of every group in which any recorded rank issued one."""
    calls = list_calls_by_group(recording)
    lossy = {gap.rank for gap in recording.gaps if gap.is_loss}
    lossy -= {stop.rank for stop in recording.stops if stop.is_gapless}
    stopped = {stop.rank for stop in recording.stops}
    return {
        name: _read_group(by_rank, lossy=lossy, stopped=stopped) for name, by_rank in calls.items()
    }


def _read_group(
    by_rank: dict[int, list[Collective]], *, lossy: set[int | None], stopped: set[int]
) -> GroupCalls:
    has_transfers = any(call.kind in P2P_KINDS for calls in by_rank.values() for call in calls)
    group = {}
    for rank in sorted(by_rank):
        is_known = rank not in lossy and None not in lossy
        read = _read_rank(by_rank[rank], is_known=is_known, has_transfers=has_transfers)
        group[rank] = replace(read, is_finished=read.is_known and rank not in stopped)
    return group


def _read_rank(calls: list[Collective], *, is_known: bool, has_transfers: bool) -> RankCalls:
    """Each call at its place in the group, also where calls before it are missing."""
    collectives: dict[int, Collective] = {}
    transfers: list[Collective] = []
    place = -1
    for index, call in enumerate(sorted(calls, key=lambda call: call.group_order)):
        place = max(place + 1, call.group_order)
        if place > index:
            is_known = False
            if has_transfers:
                break  # the missing ones may be either, so where the rest belongs is not known
        if call.kind in P2P_KINDS:
            transfers.append(call)
        else:
            collectives[place - len(transfers)] = call
    return RankCalls(collectives, transfers, is_known, is_known)


def find_drift(group: GroupCalls, late: int, others: Iterable[int]) -> str | None:
    """The first position at which a rank issued from another line than others that all agree."""
    theirs = [group[rank].collectives for rank in others]
    for position, call in sorted(group[late].collectives.items()):
        lines = {line_of(calls[position]) for calls in theirs if position in calls}
        if len(lines) == 1 and (line := lines.pop()) and line_of(call) not in ("", line):
            return (
                f"the lines first differ at position {position}, {line_of(call)} on rank {late} "
                f"and {line} on the others: a collective may have been skipped there"
            )
    return None


def line_of(call: Collective | None) -> str:
    """`train.py:12`, or nothing where it is not known."""
    return "" if call is None or call.source is None else f"{call.source.file}:{call.source.line}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7`."""
    distinct = set(ranks)
    return f"rank{'s' if len(distinct) > 1 else ''} {list_ranks(distinct)}"


def payload_bytes(call: Collective) -> int:
    """The size of what travels, whichever end of it this rank is."""
    return max(call.input_bytes, call.output_bytes)


def describe_call(call: Collective) -> str:
    """What was issued, and for which module, phase and line."""
    parts = [str(call.kind), call.dtype, f"{payload_bytes(call):,} bytes"]
    if call.reduce_op is not None:
        parts.append(f"op {call.reduce_op}")
    if call.peer is not None:
        parts.append(f"peer {call.peer}")
    return f"{' '.join(part for part in parts if part)} ({_describe_place(call)})"


def _describe_place(call: Collective) -> str:
    parts = ["outside any module" if call.owner is None else call.owner or "the root module"]
    if call.phase is not Phase.OUTSIDE:
        parts.append(str(call.phase))
    if line := line_of(call):
        parts.append(line)
    return ", ".join(parts)
