"""Finds the stage of the compiler that causes a failure, and the part of it.

`locate_stage` checks the same subgraph with different parts of the compiler disabled
(`StageToggles`), as torch's CompilerBisector does, and returns a `StageFinding`.
"""

from __future__ import annotations

from shardscope.compile.diagnose.stage_bisect.attempt import (
    check_with_parts_disabled,
    finding_from_last_phase,
    reported_stages,
)
from shardscope.compile.diagnose.stage_bisect.bisect import (
    StageFinding,
    StageToggles,
    fails_the_same_way,
    locate_stage,
)

__all__ = [
    "StageFinding",
    "StageToggles",
    "check_with_parts_disabled",
    "fails_the_same_way",
    "finding_from_last_phase",
    "locate_stage",
    "reported_stages",
]
