"""Where the ranks of a group disagree on what they issue.

`match_ranks` compares the collectives of the recorded ranks of each group in order, and pairs sends
with receives; of a run that was killed it also names the ranks that are behind or in a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from msgspec import Struct

from shardscope.hang.evidence import CallSignature
from shardscope.hang.rank_calls import (
    RANK_MISMATCH,
    GroupCalls,
    IssuedCall,
    RankCalls,
    Route,
    count_unlisted,
    describe_call,
    find_drift,
    find_unsent,
    name_ranks,
    payload_bytes,
    sort_by_group,
    sort_by_route,
)
from shardscope.hang.waits import find_hang
from shardscope.record.base import CollectiveKind
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


class Divergence(Struct, frozen=True):
    """The first position at which the ranks of a group disagree.

    `sides` maps the facets to the ranks that have them; `()` is for ranks without a collective.
    """

    group: str
    position: int
    sides: dict[Facets, list[int]]

    def order_sides(self) -> list[Facets]:
        """The sides, fewest ranks first; of two equal sides, that which stopped."""
        sides = self.sides
        return sorted(sides, key=lambda facets: (len(sides[facets]), bool(facets), sides[facets]))


def match_ranks(recording: Recording) -> tuple[Finding, ...]:
    """A finding for the first position in each group at which its recorded ranks disagree.

    For a run that was killed or raised, also the ranks that are behind or in a deadlock.
    """
    groups = sort_by_group(recording)
    diverged = find_divergences(groups)
    positions = {name: divergence.position for name, divergence in diverged.items()}
    findings = explain_mismatches(groups, diverged)
    return (*findings, *find_hang(recording, groups, positions))


def find_divergences(groups: Mapping[str, GroupCalls]) -> dict[str, Divergence]:
    """By group, the first position at which its ranks disagree."""
    found = {name: _find_divergence(name, group) for name, group in groups.items()}
    return {name: divergence for name, divergence in found.items() if divergence is not None}


def explain_mismatches(
    groups: Mapping[str, GroupCalls], diverged: Mapping[str, Divergence]
) -> list[Finding]:
    """Findings for groups that diverged, and for sends and receives without their counterpart."""
    findings: list[Finding] = []
    for name, group in groups.items():
        if name in diverged:
            findings.append(_explain(name, diverged[name], group))
        elif any(calls.transfers for calls in group.values()):
            findings.extend(_find_unpaired(name, group))
    return findings


def _find_divergence(name: str, group: GroupCalls) -> Divergence | None:
    # A finished rank has all positions up to its last, so the shortest is the first to lack one.
    finished = {rank: calls for rank, calls in group.items() if calls.is_finished}
    shortest = min((calls.num_collectives for calls in finished.values()), default=None)
    if shortest is None and _are_equal(group):
        return None
    for position in sorted(_find_candidates(group, shortest)):
        sides: dict[Facets, list[int]] = defaultdict(list)
        for rank, calls in group.items():
            if position in calls.collectives:
                sides[facets_of(calls.collectives[position])].append(rank)
        if sides and shortest is not None and position >= shortest:
            sides[()] = [
                rank for rank, calls in finished.items() if calls.num_collectives <= position
            ]
        sides = _drop_unknown_words(sides)
        if len(sides) > 1:
            return Divergence(name, position, sides)
    return None


def differ(call: Collective, other: Collective) -> bool:
    """Whether two ranks of a group may not issue these as the same collective."""
    return facets_of(call) != facets_of(other)


def _are_equal(group: GroupCalls) -> bool:
    """Whether all ranks have the same calls from the same position on."""
    variants = {
        rank if calls.facet_ids is None else (calls.first, calls.facet_ids)
        for rank, calls in group.items()
        if calls.collectives
    }
    return len(variants) <= 1


def _find_candidates(group: GroupCalls, shortest: int | None) -> Iterable[int]:
    """Positions at which ranks may disagree."""
    numbers: dict[int, int] = {}
    candidates: set[int] = set()
    for variant in _list_variants(group):
        if variant.facet_ids is None:
            return {position for calls in group.values() for position in calls.collectives}
        ids = memoryview(variant.facet_ids).cast("I")
        for position, number in enumerate(ids, variant.first):
            if number and numbers.setdefault(position, number) != number:
                candidates.add(position)
    if shortest is not None:
        candidates.update(position for position in numbers if position >= shortest)
    return candidates


def _list_variants(group: GroupCalls) -> list[RankCalls]:
    """A rank's calls for each distinct sequence of calls."""
    variants: dict[object, RankCalls] = {}
    for rank, calls in group.items():
        if calls.collectives:
            key = rank if calls.facet_ids is None else (calls.first, calls.facet_ids)
            variants.setdefault(key, calls)
    return list(variants.values())


def facets_of(call: IssuedCall | CallSignature) -> Facets:
    """The properties of a call that must be equal on all ranks, as far as they are recorded."""
    kind = call.kind
    if kind == CollectiveKind.BARRIER:
        return (("kind", kind),)
    facets: list[tuple[str, object]] = [("kind", kind if kind is not None else call.op)]
    if call.dtype:
        facets.append(("dtype", call.dtype))
    if isinstance(call, Collective) or call.is_rooted:
        if kind in _REDUCING:
            facets.append(("reduce op", call.reduce_op))
        if kind in _ROOTED:
            facets.append(("root", call.peer))
    num_bytes = _common_bytes(call)
    if num_bytes is not None:
        facets.append(("size", num_bytes))
    elif not isinstance(call, Collective) and call.num_elements is not None:
        facets.append(("elements", call.num_elements))
    return tuple(facets)


def _common_bytes(call: IssuedCall | CallSignature) -> int | None:
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


def _drop_unknown_words(sides: dict[Facets, list[int]]) -> dict[Facets, list[int]]:
    """Join sides that differ only in what the dumps of some ranks do not record."""
    words: dict[object, set[str]] = {}
    for facets in sides:
        if facets:
            present = {word for word, _ in facets}
            kind = facets[0][1]
            words[kind] = words.get(kind, present) & present
    joined: dict[Facets, list[int]] = defaultdict(list)
    for facets, ranks in sides.items():
        common = tuple(facet for facet in facets if facet[0] in words[facets[0][1]])
        joined[common if facets else ()].extend(ranks)
    return {facets: sorted(ranks) for facets, ranks in joined.items()}


def _explain(name: str, divergence: Divergence, group: GroupCalls) -> Finding:
    position, sides = divergence.position, divergence.sides
    # Report a rank of the smallest side; of two equal sides, of the one that stopped.
    by_size = divergence.order_sides()
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
        fact=f"ranks disagree on {name_differences(sides)} at position {position} of group "
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


def name_differences(sides: Iterable[Facets]) -> str:
    """What differs between sides, in words."""
    return " and ".join(list_differences(sides)) or "whether there is a collective"


def list_differences(sides: Iterable[Facets]) -> list[str]:
    """The words of what differs between sides; empty if only whether they issued anything."""
    present = [dict(facets) for facets in sides if facets]
    words = dict.fromkeys(word for facets in present for word in facets)
    kinds = {facets["kind"] for facets in present}
    if len(kinds) > 1:
        return ["kind"]
    return [word for word in words if len({facets.get(word) for facets in present}) > 1]


def _find_unpaired(name: str, group: GroupCalls) -> list[Finding]:
    """At most one finding: the first send or receive without its counterpart."""
    sends, receives, from_anyone = sort_by_route(group)
    problems: list[tuple[int, int, Finding]] = []
    for route in sorted(sends.keys() | receives.keys()):
        sender, receiver = route
        # A receive from any rank may match any send to its rank, so nothing is certain there.
        if sender not in group or receiver not in group or receiver in from_anyone:
            continue
        problem = _find_transfer_problem(name, route, sends[route], receives[route], group)
        if problem is not None:
            problems.append(problem)
    unsent = find_unsent(group)
    senders = group.keys() - unsent.keys()
    if unsent and senders and all(group[rank].is_finished for rank in senders):
        receiver, call = next(iter(unsent.items()))
        fact = (
            f"no rank sends what rank {receiver} waits for: {describe_call(call)}, although "
            f"{name_ranks(senders)} ended"
        )
        problems.append((call.group_order, receiver, _make_transfer_finding(name, fact, call)))
    return [finding for _, _, finding in sorted(problems, key=lambda item: item[:2])[:1]]


def _find_transfer_problem(
    name: str,
    route: Route,
    sends: list[IssuedCall],
    receives: list[IssuedCall],
    group: GroupCalls,
) -> tuple[int, int, Finding] | None:
    sender, receiver = route
    first = count_unlisted(route, group)
    for position, (send, receive) in enumerate(zip_longest(sends, receives)):
        silent = sender if send is None else receiver if receive is None else None
        if silent is not None and not group[silent].is_finished:
            return None
        fact = _compare_ends(route, send, receive)
        if fact is not None:
            call = send or receive
            finding = _make_transfer_finding(
                name, f"{fact} (transfer {first + position} of that route)", call
            )
            return call.group_order, call.rank, finding
    return None


def _compare_ends(route: Route, send: IssuedCall | None, receive: IssuedCall | None) -> str | None:
    sender, receiver = route
    if receive is None and send is not None:
        return f"rank {receiver} never receives what rank {sender} sent it: " + (
            describe_call(send)
        )
    if send is None and receive is not None:
        return f"rank {sender} never sends what rank {receiver} waits for: " + (
            describe_call(receive)
        )
    assert send is not None
    assert receive is not None
    differing = [
        word
        for word, sent, received in (
            ("size", payload_bytes(send), payload_bytes(receive)),
            ("dtype", send.dtype, receive.dtype),
        )
        if sent != received
    ]
    if not differing:
        return None
    return (
        f"the two ends differ in {' and '.join(differing)}: rank {sender}'s {describe_call(send)}, "
        f"rank {receiver}'s {describe_call(receive)}"
    )


def _make_transfer_finding(name: str, fact: str, call: IssuedCall) -> Finding:
    return Finding(
        rule=RANK_MISMATCH,
        severity=Severity.ERROR,
        subject=f"group {name}",
        fact=f"in group {name}, {fact}",
        remedy="Give every send one receive of the same size and dtype on the other rank; "
        "a real run hangs or mixes up data at this point.",
        rank=call.rank,
        source=call.source,
    )
