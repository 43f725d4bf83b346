"""Do the ranks agree? Compares what each recorded rank of a group issued, in order.

Sends and receives, which have no common order, are `pair.py`'s; ranks that stopped are `hang.py`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct

from shardscope.comm.group_calls import (
    RANK_MISMATCH,
    GroupCalls,
    describe_call,
    find_drift,
    name_ranks,
    payload_bytes,
    sort_by_group,
)
from shardscope.comm.hang import find_hang
from shardscope.comm.pair import find_unpaired
from shardscope.record.kinds import CollectiveKind
from shardscope.record.recording import Collective, Finding, Recording, Severity

__all__ = ["match_ranks"]

_MAX_SIDES = 4
_ROOTED = (
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.GATHER,
    CollectiveKind.SCATTER,
)
_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE, CollectiveKind.REDUCE_SCATTER)

# What must be equal on all ranks, under the words a finding uses for it.
Facets = tuple[tuple[str, object], ...]


class _Divergence(Struct, frozen=True):
    """The first position of a group at which its ranks disagree; `()` is a rank with no call."""

    position: int
    sides: dict[Facets, list[int]]


def match_ranks(recording: Recording) -> tuple[Finding, ...]:
    """The first place in each group where its recorded ranks disagree; the rest follows from it.

    Of a run that was killed or raised, also who is behind and who waits for whom.
    """
    findings: list[Finding] = []
    diverged: dict[str, int] = {}
    groups = sort_by_group(recording)
    for name, group in groups.items():
        divergence = _find_divergence(group)
        if divergence is not None:
            diverged[name] = divergence.position
            findings.append(_explain(name, divergence, group))
        elif any(calls.transfers for calls in group.values()):
            findings.extend(find_unpaired(name, group))
    return (*findings, *find_hang(recording, groups, diverged))


def _find_divergence(group: GroupCalls) -> _Divergence | None:
    issuers: dict[int, list[int]] = defaultdict(list)
    for rank, calls in group.items():
        for position in calls.collectives:
            issuers[position].append(rank)
    # A rank that finished has every position up to its last: the shortest is the first to lack one.
    finished = {rank: calls for rank, calls in group.items() if calls.is_finished}
    shortest = min((calls.num_collectives for calls in finished.values()), default=None)
    for position, ranks in sorted(issuers.items()):
        sides: dict[Facets, list[int]] = defaultdict(list)
        for rank in ranks:
            sides[_facets(group[rank].collectives[position])].append(rank)
        if shortest is not None and position >= shortest:
            sides[()] = [
                rank for rank, calls in finished.items() if calls.num_collectives <= position
            ]
        if len(sides) > 1:
            return _Divergence(position, sides)
    return None


def _facets(call: Collective) -> Facets:
    kind = call.kind
    if kind == CollectiveKind.BARRIER:
        return (("kind", kind),)
    facets: list[tuple[str, object]] = [("kind", kind), ("dtype", call.dtype)]
    if kind in _REDUCING:
        facets.append(("reduce op", call.reduce_op))
    if kind in _ROOTED:
        facets.append(("root", call.peer))
    num_bytes = _common_bytes(call)
    if num_bytes is not None:
        facets.append(("size", num_bytes))
    return tuple(facets)


def _common_bytes(call: Collective) -> int | None:
    """The size that all ranks share; None where each may have its own (uneven splits)."""
    match call.kind:
        case CollectiveKind.ALL_GATHER:
            return call.output_bytes
        case CollectiveKind.REDUCE_SCATTER:
            return call.input_bytes
        case CollectiveKind.ALL_REDUCE | CollectiveKind.BROADCAST | CollectiveKind.REDUCE:
            # Only some ranks of a broadcast or reduce put something in, only some get it out.
            return payload_bytes(call)
    return None


def _explain(name: str, divergence: _Divergence, group: GroupCalls) -> Finding:
    position, sides = divergence.position, divergence.sides
    # The rank in the minority is reported; of two sides alike, the one that stopped.
    by_size = sorted(sides, key=lambda facets: (len(sides[facets]), bool(facets), sides[facets]))
    rank = sides[by_size[0]][0]
    calls = group[rank].collectives
    call = calls.get(position)
    stood_at = call or (calls[max(calls)] if calls else None)
    shown = [_describe_side(position, sides[facets], group) for facets in reversed(by_size)]
    if (num_hidden := len(shown) - _MAX_SIDES) > 0:
        shown[_MAX_SIDES:] = [f"{num_hidden} more variant{'s' if num_hidden > 1 else ''}"]
    if call is None and (drift := find_drift(group, rank, sides[by_size[-1]][:_MAX_SIDES])):
        shown.append(drift)
    if unknown := set(group).difference(*sides.values()):
        shown.append(_describe_unknown(unknown, group))
    return Finding(
        rule=RANK_MISMATCH,
        severity=Severity.ERROR,
        subject=f"group {name}",
        fact=f"ranks disagree on {_name_differences(sides)} at position {position} of group "
        f"{name}: " + "; ".join(shown),
        remedy="Make every rank of the group take the same branch and pass the same shapes and "
        "dtypes there; a real run hangs or mixes up data at this point.",
        rank=rank,
        source=None if stood_at is None else stood_at.source,
    )


def _describe_side(position: int, ranks: list[int], group: GroupCalls) -> str:
    calls = group[ranks[0]].collectives
    if position in calls:
        return f"{name_ranks(ranks)} issued {describe_call(calls[position])}"
    last = f" after {describe_call(calls[max(calls)])}" if calls else ""
    return f"{name_ranks(ranks)} issued nothing{last}"


def _describe_unknown(ranks: set[int], group: GroupCalls) -> str:
    """Those that issued nothing there, of whom that proves nothing."""
    stopped = {rank for rank in ranks if group[rank].is_known}
    lossy = ranks - stopped
    words = []
    if stopped:
        words.append(f"{name_ranks(stopped)} stopped before")
    if lossy:
        words.append(f"not known of {name_ranks(lossy)}, whose recording lost records")
    return "; ".join(words)


def _name_differences(sides: Iterable[Facets]) -> str:
    present = [dict(facets) for facets in sides if facets]
    words = dict.fromkeys(word for facets in present for word in facets)
    kinds = {facets["kind"] for facets in present}
    if len(kinds) > 1:
        return "kind"
    differing = [word for word in words if len({facets.get(word) for facets in present}) > 1]
    return " and ".join(differing) or "whether there is a collective"
