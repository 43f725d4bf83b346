"""Says what kind of mistake a divergence is, and which ranks are responsible.

The ranks of the smaller side are suspected. Of two equal sides, other groups of the same role tell
which is right, or what both sides issued before: a step repeats itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from shardscope.hang.mismatch import Divergence, Facets, facets_of, list_differences
from shardscope.hang.rank_calls import GroupCalls, RankCalls, line_of
from shardscope.hang.run import HangRun
from shardscope.record.hang_records import CauseKind, Certainty

_MAX_SHIFT = 64  # calls that a rank may have skipped or added
_MAX_CONTEXT = 3  # earlier calls by which an earlier place of the same sequence is found
_SHIFT_CALLS = 4  # calls after the divergence that must agree when shifted


class DivergenceCause(Struct, frozen=True):
    """The ranks responsible for a divergence, its class, and what shows both."""

    kind: CauseKind
    ranks: tuple[int, ...]
    certainty: Certainty
    evidence: tuple[str, ...]


def explain_divergence(run: HangRun, name: str, divergence: Divergence) -> DivergenceCause:
    """Which ranks differ from what the group does, and how."""
    group = run.groups[name].calls
    order = divergence.order_sides()
    minority, majority = order[0], order[-1]
    ranks = tuple(divergence.sides[minority])
    evidence: list[str] = []
    certainty = Certainty.LIKELY
    is_tie = len(divergence.sides[minority]) == len(divergence.sides[majority])
    if is_tie:
        right = _ask_siblings(run, name, divergence) or _ask_history(group, divergence)
        if right is None or right[0] not in order:
            ranks = tuple(sorted(rank for side in divergence.sides.values() for rank in side))
            certainty = Certainty.POSSIBLE
            evidence.append("as many ranks are on each side, so it is not known which is right")
        else:
            majority, reason = right
            minority = next(facets for facets in order if facets != majority)
            ranks = tuple(divergence.sides[minority])
            evidence.append(reason)
    position = divergence.position
    if not minority:
        return DivergenceCause(
            CauseKind.SKIPPED_CALL, ranks, certainty, (*evidence, "these ranks ended without it")
        )
    mine = group[divergence.sides[minority][0]]
    theirs = group[divergence.sides[majority][0]] if majority else mine
    is_new = not _was_issued(mine, position) and "kind" not in list_differences(
        [minority, majority]
    )
    shift = find_shift(mine, theirs, position) if majority and not is_new else 0
    if shift > 0:
        evidence.append(_describe_skip(theirs, position, shift))
        return DivergenceCause(CauseKind.SKIPPED_CALL, ranks, certainty, tuple(evidence))
    if shift < 0:
        line = line_of(mine.collectives.get(position))
        where = f" at {line}" if line else ""
        evidence.append(f"they issued {-shift} more than the others{where}")
        return DivergenceCause(CauseKind.DIFFERENT_CALL, ranks, certainty, tuple(evidence))
    kind = _classify_difference(mine, theirs, position, [minority, majority])
    return DivergenceCause(kind, ranks, certainty, tuple(evidence))


def _was_issued(mine: RankCalls, position: int) -> bool:
    """Whether a rank issued the same call earlier, so that it may only be out of step."""
    call = mine.collectives.get(position)
    if call is None:
        return False
    facets = facets_of(call)
    return any(
        facets_of(earlier) == facets for own, earlier in mine.collectives.items() if own < position
    )


def _classify_difference(
    mine: RankCalls, theirs: RankCalls, position: int, sides: list[Facets]
) -> CauseKind:
    """Another call, or the same call with other arguments."""
    own, other = mine.collectives.get(position), theirs.collectives.get(position)
    own_line, other_line = line_of(own), line_of(other)
    differing = list_differences(sides)
    if "kind" in differing:
        return CauseKind.DIFFERENT_CALL
    if own_line and other_line and own_line != other_line:
        return CauseKind.DIFFERENT_CALL
    return CauseKind.MISMATCH


def find_shift(mine: RankCalls, theirs: RankCalls, position: int) -> int:
    """How many calls of the others a rank has left out there; negative if it has added some."""
    if _agree(mine, position + 1, theirs, position + 1):
        return 0  # only this call differs
    for shift in range(1, _MAX_SHIFT):
        if _agree(mine, position, theirs, position + shift):
            return shift
        if _agree(theirs, position, mine, position + shift):
            return -shift
    return _find_in_history(mine, theirs, position)


def _agree(first: RankCalls, start: int, second: RankCalls, other_start: int) -> bool:
    """Whether two ranks issued the same from different positions on, as far as both go."""
    num_equal = 0
    for offset in range(_SHIFT_CALLS):
        a = first.collectives.get(start + offset)
        b = second.collectives.get(other_start + offset)
        if a is None or b is None:
            break
        if facets_of(a) != facets_of(b) or line_of(a) != line_of(b):
            return False
        num_equal += 1
    first_call = first.collectives.get(start)
    has_line = first_call is not None and bool(line_of(first_call))
    return num_equal >= (1 if has_line else 2)


def _find_in_history(mine: RankCalls, theirs: RankCalls, position: int) -> int:
    """1 if a rank's call is what earlier followed that of the others, so that it left one out."""
    own, other = mine.collectives.get(position), theirs.collectives.get(position)
    if own is None or other is None:
        return 0
    for earlier in range(position - 1, max(-1, position - 4_000), -1):
        before = theirs.collectives.get(earlier)
        after = theirs.collectives.get(earlier + 1)
        if before is None or after is None:
            continue
        if _is_same(before, other) and earlier + 1 < position:
            return int(_is_same(after, own))
        if _is_same(before, own) and earlier + 1 < position and _is_same(after, other):
            return 0
    return 0


def _is_same(a: object, b: object) -> bool:
    return facets_of(a) == facets_of(b) and line_of(a) == line_of(b)  # type: ignore[arg-type]


def _describe_skip(theirs: RankCalls, position: int, shift: int) -> str:
    skipped = theirs.collectives.get(position)
    line = line_of(skipped)
    what = "a call" if shift == 1 else f"{shift} calls"
    return f"they went on without {what} of the others{f', at {line}' if line else ''}"


def _ask_siblings(run: HangRun, name: str, divergence: Divergence) -> tuple[Facets, str] | None:
    """The side that groups of the same role agree with, at the same position."""
    group = run.groups[name]
    votes: Counter[Facets] = Counter()
    for other in run.groups.values():
        if other.name == name or other.axis != group.axis:
            continue
        for calls in other.calls.values():
            call = calls.collectives.get(divergence.position)
            if call is not None:
                votes[facets_of(call)] += 1
    sides = [facets for facets in divergence.sides if facets]
    known = {facets: votes[facets] for facets in sides}
    best = max(known, key=lambda facets: known[facets], default=None)
    if best is None or not known[best] or list(known.values()).count(known[best]) > 1:
        return None
    return best, f"the other groups of {group.axis} issue what the other side does"


def _ask_history(group: GroupCalls, divergence: Divergence) -> tuple[Facets, str] | None:
    """The side whose call is what followed the same calls earlier in this group."""
    position = divergence.position
    calls = group[next(iter(divergence.sides.values()))[0]].collectives
    context = [calls.get(position - offset) for offset in range(1, _MAX_CONTEXT + 1)]
    if any(call is None for call in context):
        return None
    for earlier in range(position - 1, max(-1, position - 4_000), -1):
        candidate = calls.get(earlier)
        before = [calls.get(earlier - offset) for offset in range(1, _MAX_CONTEXT + 1)]
        if candidate is None or any(call is None for call in before):
            continue
        if all(_is_same(a, b) for a, b in zip(context, before, strict=True)):
            expected = facets_of(candidate)
            if expected in divergence.sides:
                return expected, "earlier, after the same calls, the other side's call followed"
            return None
    return None


def find_first(run: HangRun, diverged: Mapping[str, Divergence]) -> str:
    """The group whose divergence came first: by time, else by its size."""

    def sort_key(name: str) -> tuple[int, int, str]:
        group = run.groups[name].calls
        position = diverged[name].position
        times = [
            call.start_ns
            for rank in group
            if (call := group[rank].collectives.get(position)) is not None and call.start_ns
        ]
        return min(times, default=2**63), -len(group), name

    return min(diverged, key=sort_key)
