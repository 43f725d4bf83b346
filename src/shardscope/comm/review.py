"""A recording with the findings that its collectives give, worked out afresh."""

from __future__ import annotations

from msgspec.structs import replace

from shardscope.comm.findings import IMPLICIT_ALL_TO_ALL, IMPLICIT_GATHER, find_comm_problems
from shardscope.comm.group_calls import RANK_MISMATCH
from shardscope.comm.hang import DEADLOCK, RANK_BEHIND
from shardscope.comm.match import match_ranks
from shardscope.record.recording import Recording

__all__ = ["review"]

_RULES = (DEADLOCK, IMPLICIT_ALL_TO_ALL, IMPLICIT_GATHER, RANK_BEHIND, RANK_MISMATCH)


def review(recording: Recording) -> Recording:
    """Replace our own findings by those of the recording as it is now; keep all others."""
    # A merge sees more than the ranks saw, so what they worked out alone is out of date.
    others = [finding for finding in recording.findings if finding.rule not in _RULES]
    findings = (*match_ranks(recording), *find_comm_problems(recording), *others)
    return replace(recording, findings=findings)
