"""Compares the collectives of the recorded ranks of each group, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from shardscope.comm.findings import IMPLICIT_ALL_TO_ALL, IMPLICIT_GATHER, find_comm_problems
from shardscope.comm.group_order import (
    RANK_MISMATCH,
    GroupCalls,
    describe_call,
    find_drift,
    find_unpaired,
    name_ranks,
    payload_bytes,
    sort_by_group,
)
from shardscope.comm.hang import (
    DEADLOCK,
    RANK_BEHIND,
    UNKNOWN_TAGS,
    find_hang,
    find_unknown_waits,
)
from shardscope.record.kinds import CollectiveKind
from shardscope.record.recording import Collective, Finding, Recording, Severity

_MAX_SIDES = 4
_ROOTED = (
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.GATHER,
    CollectiveKind.SCATTER,
)
_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE, CollectiveKind.REDUCE_SCATTER)

# Properties that must be equal on all ranks, as (word used in a finding, value).
Facets = tuple[tuple[str, object], ...]


class _Divergence(Struct, frozen=True):
    """The first position at which the ranks of a group disagree.

    `sides` maps the facets to the ranks that have them; `()` is for ranks without a collective.
    """

    position: int
    sides: dict[Facets, list[int]]


def match_ranks(recording: Recording) -> tuple[Finding, ...]:
    """A finding for the first position in each group at which its recorded ranks disagree.

    For a run that was killed or raised, also the ranks that are behind or in a deadlock.
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
    # A finished rank has all positions up to its last, so the shortest is the first to lack one.
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
    """The size that must be equal on all ranks; None if ranks may differ (uneven splits)."""
    match call.kind:
        case CollectiveKind.ALL_GATHER:
            return call.output_bytes
        case CollectiveKind.REDUCE_SCATTER:
            return call.input_bytes
        case CollectiveKind.ALL_REDUCE | CollectiveKind.BROADCAST | CollectiveKind.REDUCE:
            # In a broadcast or reduce, some ranks have no input and some no output.
            return payload_bytes(call)
    return None


def _explain(name: str, divergence: _Divergence, group: GroupCalls) -> Finding:
    position, sides = divergence.position, divergence.sides
    # Report a rank of the smallest side; of two equal sides, of the one that stopped.
    by_size = sorted(sides, key=lambda facets: (len(sides[facets]), bool(facets), sides[facets]))
    rank = sides[by_size[0]][0]
    calls = group[rank].collectives
    call = calls.get(position)
    last_call = call or (calls[max(calls)] if calls else None)
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
        source=None if last_call is None else last_call.source,
    )


def _describe_side(position: int, ranks: list[int], group: GroupCalls) -> str:
    calls = group[ranks[0]].collectives
    if position in calls:
        return f"{name_ranks(ranks)} issued {describe_call(calls[position])}"
    last = f" after {describe_call(calls[max(calls)])}" if calls else ""
    return f"{name_ranks(ranks)} issued nothing{last}"


def _describe_unknown(ranks: set[int], group: GroupCalls) -> str:
    """Text on ranks without a collective there that may have issued one unrecorded."""
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


_RULES = (DEADLOCK, IMPLICIT_ALL_TO_ALL, IMPLICIT_GATHER, RANK_BEHIND, RANK_MISMATCH)


def review(recording: Recording) -> Recording:
    """Compute this package's findings anew, and keep all other findings."""
    # A merged recording has more ranks than the ones its findings were computed from.
    gaps = [gap for gap in recording.gaps if not gap.fact.endswith(UNKNOWN_TAGS)]
    gaps += find_unknown_waits(recording, sort_by_group(recording))
    other_findings = [finding for finding in recording.findings if finding.rule not in _RULES]
    findings = (*match_ranks(recording), *find_comm_problems(recording), *other_findings)
    return replace(recording, findings=findings, gaps=tuple(gaps))
