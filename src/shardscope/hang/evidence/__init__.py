"""What the files of a run show about each rank: its calls in columns, its stacks, logs and process.

`calls.py` holds the calls of a rank in a group as columns, `facts.py` everything else that a file
says. The readers fill these, and the analysis compares them. Imports only `record` and `errors`.
"""

from __future__ import annotations

from shardscope.hang.evidence.calls import (
    TRANSFERS,
    CallColumns,
    CallSignature,
    CallSite,
    CallState,
    ColumnBuilder,
    count_dropped,
    view_integers,
    view_numbers,
)
from shardscope.hang.evidence.facts import (
    CommunicatorCount,
    CompileEvent,
    EventKind,
    FileFormat,
    FileReport,
    Frame,
    GroupFact,
    RankEvent,
    RankEvidence,
    ThreadStack,
)
from shardscope.hang.evidence.last_activity import find_last_activity

__all__ = [
    "TRANSFERS",
    "CallColumns",
    "CallSignature",
    "CallSite",
    "CallState",
    "ColumnBuilder",
    "CommunicatorCount",
    "CompileEvent",
    "EventKind",
    "FileFormat",
    "FileReport",
    "Frame",
    "GroupFact",
    "RankEvent",
    "RankEvidence",
    "ThreadStack",
    "count_dropped",
    "find_last_activity",
    "view_integers",
    "view_numbers",
]
