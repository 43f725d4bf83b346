"""Ranks that hang: what each rank issued, where ranks diverge, and who waits for whom.

`rank_calls.py` sorts the collectives of a recording by group and rank, `mismatch.py` finds the
first position of a group at which its ranks disagree, and `waits.py` the ranks that others wait
for. `explain.py` explains a hang from files of many formats, which `readers/` turn into evidence.
Imports only `record` and `errors`.
"""

from __future__ import annotations

from shardscope.hang.mismatch import Divergence, differ, find_divergences, match_ranks
from shardscope.hang.rank_calls import (
    P2P_KINDS,
    RANK_MISMATCH,
    describe_call,
    is_blocking_transfer,
    name_ranks,
    payload_bytes,
    sort_by_group,
)
from shardscope.hang.wait_text import DEADLOCK, RANK_BEHIND
from shardscope.hang.waits import find_unknown_waits, is_about_tags

RULES = (DEADLOCK, RANK_BEHIND, RANK_MISMATCH)
"""The rules of the findings of this package."""

__all__ = [
    "DEADLOCK",
    "P2P_KINDS",
    "RANK_BEHIND",
    "RANK_MISMATCH",
    "RULES",
    "Divergence",
    "describe_call",
    "differ",
    "find_divergences",
    "find_unknown_waits",
    "is_about_tags",
    "is_blocking_transfer",
    "match_ranks",
    "name_ranks",
    "payload_bytes",
    "sort_by_group",
]
