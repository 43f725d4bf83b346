"""Do the ranks agree? Compares what each recorded rank of a group issued, in order.

A rank is accused only of what its recording proves: where records were lost, nothing is known.
Sends and receives, which have no common order, are `pair.py`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from shardscope.comm.pair import find_unpaired
from shardscope.comm.side import RANK_MISMATCH, describe_call, name_ranks, payload_bytes
from shardscope.record.kinds import CollectiveKind
from shardscope.record.ranks import expand_ranks
from shardscope.record.recording import Collective, Finding, Recording, Severity

__all__ = ["match_ranks"]

_MAX_SIDES = 4
_P2P = (CollectiveKind.SEND, CollectiveKind.RECV)
_ROOTED = (
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.GATHER,
    CollectiveKind.SCATTER,
)
_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE, CollectiveKind.REDUCE_SCATTER)

# What must be equal on all ranks, under the words a finding uses for it.
Facets = tuple[tuple[str, object], ...]


class _Part(Struct, frozen=True):
    """What one rank issued in one group, as far as its recording tells."""

    collectives: dict[int, Collective]  # by position among the group's collectives
    transfers: list[Collective]  # sends and receives, up to the first that may be missing
    is_complete: bool  # what is not here was not issued


def match_ranks(recording: Recording) -> tuple[Finding, ...]:
    """The first place in each group where its recorded ranks disagree; the rest follows from it."""
    lossy = _find_lossy_ranks(recording)
    findings: list[Finding] = []
    for group, calls in _sort_into_groups(recording).items():
        has_transfers = any(call.kind in _P2P for mine in calls.values() for call in mine)
        parts = {
            rank: _take_part(mine, is_lossy=rank in lossy, has_transfers=has_transfers)
            for rank, mine in calls.items()
        }
        divergence = _find_divergence(group, parts)
        if divergence is not None:
            findings.append(divergence)
        elif has_transfers:
            transfers = {rank: part.transfers for rank, part in parts.items()}
            incomplete = {rank for rank, part in parts.items() if not part.is_complete}
            findings.extend(find_unpaired(group, transfers, incomplete))
    return tuple(findings)


def _find_lossy_ranks(recording: Recording) -> set[int]:
    """Ranks whose stream was cut or damaged: what is missing from it may have been issued."""
    lossy = {gap.rank for gap in recording.gaps if gap.is_loss}
    if None in lossy:
        return set(expand_ranks(recording.run.ranks))
    return {rank for rank in lossy if rank is not None}


def _sort_into_groups(recording: Recording) -> dict[str, dict[int, list[Collective]]]:
    """Each recorded rank's calls in each of its groups; a silent member has an empty list."""
    recorded = set(expand_ranks(recording.run.ranks))
    calls: dict[str, dict[int, list[Collective]]] = {}
    for group in recording.groups:
        members = recorded.intersection(expand_ranks(group.ranks))
        calls[group.name] = {rank: [] for rank in sorted(members)}
    for call in recording.collectives:
        calls.setdefault(call.group, {}).setdefault(call.rank, []).append(call)
    return calls


def _take_part(calls: list[Collective], *, is_lossy: bool, has_transfers: bool) -> _Part:
    """Each call at its place in the group, also where calls before it are missing."""
    part = _Part({}, [], not is_lossy)
    place = -1
    for index, call in enumerate(sorted(calls, key=lambda call: call.group_order)):
        place = max(place + 1, call.group_order)
        if place > index:
            part = replace(part, is_complete=False)
            if has_transfers:
                break  # the missing ones may be either, so where the rest belongs is not known
        if call.kind in _P2P:
            part.transfers.append(call)
        else:
            part.collectives[place - len(part.transfers)] = call
    return part


def _find_divergence(group: str, parts: dict[int, _Part]) -> Finding | None:
    for position in sorted({place for part in parts.values() for place in part.collectives}):
        sides: dict[Facets, list[int]] = defaultdict(list)
        for rank, part in parts.items():
            call = part.collectives.get(position)
            if call is not None:
                sides[_facets(call)].append(rank)
            elif part.is_complete:
                sides[()].append(rank)
        if len(sides) > 1:
            return _explain(group, position, sides, parts)
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


def _explain(
    group: str, position: int, sides: dict[Facets, list[int]], parts: dict[int, _Part]
) -> Finding:
    # The smallest side is the likeliest culprit; of two alike, the one that stopped.
    by_size = sorted(sides, key=lambda facets: (len(sides[facets]), bool(facets), sides[facets]))
    rank = sides[by_size[0]][0]
    call = parts[rank].collectives.get(position)
    shown = [_describe(position, sides[facets], parts) for facets in reversed(by_size)]
    if (num_hidden := len(shown) - _MAX_SIDES) > 0:
        shown[_MAX_SIDES:] = [f"{num_hidden} more variant{'s' if num_hidden > 1 else ''}"]
    if unknown := set(parts).difference(*sides.values()):
        shown.append(f"not known of {name_ranks(unknown)}, whose recording lost records")
    differing = _name_differences(sides)
    return Finding(
        rule=RANK_MISMATCH,
        severity=Severity.ERROR,
        subject=f"group {group}",
        fact=f"ranks disagree on {differing} at position {position} of group {group}: "
        + "; ".join(shown),
        remedy="Make every rank of the group take the same branch and pass the same shapes and "
        "dtypes there; a real run hangs or mixes up data at this point.",
        rank=rank,
        source=call.source if call is not None else None,
    )


def _describe(position: int, ranks: list[int], parts: dict[int, _Part]) -> str:
    mine = parts[ranks[0]].collectives
    if position in mine:
        return f"{name_ranks(ranks)} issued {describe_call(mine[position])}"
    last = f" after {describe_call(mine[max(mine)])}" if mine else ""
    return f"{name_ranks(ranks)} issued nothing{last}"


def _name_differences(sides: Iterable[Facets]) -> str:
    present = [dict(facets) for facets in sides if facets]
    words = dict.fromkeys(word for facets in present for word in facets)
    kinds = {facets["kind"] for facets in present}
    if len(kinds) > 1:
        return "kind"
    differing = [word for word in words if len({facets.get(word) for facets in present}) > 1]
    return " and ".join(differing) or "whether there is a collective"
