"""Do the ranks agree? Compares what each recorded rank of a group issued, in order.

Sends and receives, which have no common order, are `pair.py`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from shardscope.comm.pair import find_unpaired
from shardscope.comm.side import RANK_MISMATCH, describe_call, name_ranks, payload_bytes
from shardscope.record.ranks import expand_ranks
from shardscope.record.recording import Collective, CollectiveKind, Finding, Recording, Severity

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


def match_ranks(recording: Recording) -> tuple[Finding, ...]:
    """The first place in each group where its recorded ranks disagree; the rest follows from it."""
    findings: list[Finding] = []
    for group, calls in _sort_into_groups(recording).items():
        collectives = {
            rank: [c for c in mine if c.kind not in _P2P] for rank, mine in calls.items()
        }
        divergence = _find_divergence(group, collectives)
        if divergence is not None:
            findings.append(divergence)
        else:
            p2p = {rank: [c for c in mine if c.kind in _P2P] for rank, mine in calls.items()}
            findings.extend(find_unpaired(group, p2p))
    return tuple(findings)


def _sort_into_groups(recording: Recording) -> dict[str, dict[int, list[Collective]]]:
    """Each recorded rank's calls in each of its groups; a silent member has an empty list."""
    recorded = set(expand_ranks(recording.run.ranks))
    calls: dict[str, dict[int, list[Collective]]] = {}
    for group in recording.groups:
        members = recorded.intersection(expand_ranks(group.ranks))
        calls[group.name] = {rank: [] for rank in sorted(members)}
    for call in recording.collectives:
        calls.setdefault(call.group, {}).setdefault(call.rank, []).append(call)
    for ranks in calls.values():
        for mine in ranks.values():
            mine.sort(key=lambda call: call.group_order)
    return calls


def _find_divergence(group: str, calls: dict[int, list[Collective]]) -> Finding | None:
    length = max((len(mine) for mine in calls.values()), default=0)
    for position in range(length):
        sides: dict[Facets, list[int]] = defaultdict(list)
        for rank, mine in calls.items():
            sides[_facets(mine[position]) if position < len(mine) else ()].append(rank)
        if len(sides) > 1:
            return _explain(group, position, sides, calls)
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
    group: str, position: int, sides: dict[Facets, list[int]], calls: dict[int, list[Collective]]
) -> Finding:
    # The smallest side is the likeliest culprit; a rank that stopped is more so than any.
    by_size = sorted(sides, key=lambda facets: (bool(facets), len(sides[facets]), sides[facets]))
    rank = sides[by_size[0]][0]
    call = calls[rank][position] if position < len(calls[rank]) else None
    shown = [_describe(position, sides[facets], calls) for facets in reversed(by_size)]
    hidden = shown[_MAX_SIDES:]
    more = [f"{len(hidden)} more variants"] if hidden else []
    differing = _name_differences(sides)
    return Finding(
        rule=RANK_MISMATCH,
        severity=Severity.ERROR,
        subject=f"group {group}",
        fact=f"ranks disagree on {differing} at position {position} of group {group}: "
        + "; ".join(shown[:_MAX_SIDES] + more),
        remedy="Make every rank of the group take the same branch and pass the same shapes and "
        "dtypes there; a real run hangs or mixes up data at this point.",
        rank=rank,
        source=call.source if call is not None else None,
    )


def _describe(position: int, ranks: list[int], calls: dict[int, list[Collective]]) -> str:
    mine = calls[ranks[0]]
    if position < len(mine):
        return f"{name_ranks(ranks)} issued {describe_call(mine[position])}"
    last = f" after {describe_call(mine[-1])}" if mine else ""
    return f"{name_ranks(ranks)} issued nothing{last}"


def _name_differences(sides: Iterable[Facets]) -> str:
    present = [dict(facets) for facets in sides if facets]
    words = dict.fromkeys(word for facets in present for word in facets)
    kinds = {facets["kind"] for facets in present}
    if len(kinds) > 1:
        return "kind"
    differing = [word for word in words if len({facets.get(word) for facets in present}) > 1]
    return " and ".join(differing) or "whether there is a collective"
