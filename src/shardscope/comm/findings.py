"""Communication that nobody asked for: what a user should act on in one run."""

from __future__ import annotations

import re
from collections import defaultdict

from shardscope.comm.group_calls import name_ranks
from shardscope.record.kinds import CollectiveKind
from shardscope.record.recording import (
    Collective,
    Finding,
    Recording,
    Redistribute,
    Severity,
)

__all__ = ["IMPLICIT_GATHER", "find_comm_problems"]

IMPLICIT_GATHER = "implicit-gather"

_MIN_BYTES = 1024**2
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def find_comm_problems(recording: Recording) -> tuple[Finding, ...]:
    """Findings that one rank alone shows; what needs several ranks is `match_ranks`."""
    gathers: dict[tuple[str | None, str], list[Collective]] = defaultdict(list)
    for call in recording.collectives:
        cause = call.cause
        if isinstance(cause, Redistribute) and _is_implicit_gather(call, cause):
            # Layers of a stack share a problem, so they share a finding.
            owner = call.owner and _INDEX.sub("*", call.owner)
            gathers[owner, cause.asked_by].append(call)
    return tuple(
        _explain_gather(pattern, asked_by, calls) for (pattern, asked_by), calls in gathers.items()
    )


def _is_implicit_gather(call: Collective, cause: Redistribute) -> bool:
    return (
        cause.is_implicit
        and call.kind == CollectiveKind.ALL_GATHER
        and call.output_bytes >= _MIN_BYTES
    )


def _explain_gather(pattern: str | None, asked_by: str, calls: list[Collective]) -> Finding:
    first = calls[0]
    owners = {call.owner for call in calls}
    ranks = {call.rank for call in calls}
    outside = "outside any module" if first.owner is None else "the root module"
    subject = (pattern if len(owners) > 1 else first.owner) or outside
    places = f" in {len(owners):,} modules" if len(owners) > 1 else ""
    on_ranks = f" on {name_ranks(ranks)}" if len(ranks) > 1 else ""
    cause = first.cause
    assert isinstance(cause, Redistribute)
    return Finding(
        rule=IMPLICIT_GATHER,
        severity=Severity.WARNING,
        subject=subject,
        fact=f"{asked_by} could not keep its input sharded, so DTensor gathered it unasked "
        f"({', '.join(cause.before)} → {', '.join(cause.after)}): "
        f"{_times(len(calls))}{places}{on_ranks}, {_size(calls)} received",
        remedy=f"Give {asked_by} inputs whose placements it can use, or redistribute explicitly "
        "where the tensor is smallest.",
        rank=first.rank if len(ranks) == 1 else None,
        source=first.source,
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _size(calls: list[Collective]) -> str:
    """Of gathers that are worth a finding, so that no unit is below."""
    mebibytes = sum(call.output_bytes for call in calls) / 1024**2
    return f"{mebibytes:.1f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:,.1f} GiB"
