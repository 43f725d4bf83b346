"""Records of `check`: which ranks were run before launch, and what they were made to see."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Record, Source
from shardscope.record.ranks import Natural, NumRanks, RankSpan


class CheckOutcome(StrEnum):
    """What ranks do under a variation."""

    SAME = "same"  # they issue the same collectives
    DIVERGED = "diverged"  # they do not: a real run hangs or mixes up data
    RAISED = "raised"  # the program of a rank ends with an exception, and the launcher ends all
    NOT_TRIED = "not tried"


class Variation(Record, frozen=True, kw_only=True, gc=False):
    """Something that `ranks` alone were made to see, and what came of it.

    `condition` says what, in words that follow "if"; `detail` why it was not tried, or what the
    program raised.
    """

    condition: str
    ranks: tuple[RankSpan, ...]
    outcome: CheckOutcome
    source: Source | None = None
    detail: str = ""


class Role(Record, frozen=True, kw_only=True, gc=False):
    """A rank that was run, and the ranks that it stands for, itself included."""

    rank: Natural
    ranks: tuple[RankSpan, ...]


class Check(Record, frozen=True, kw_only=True, gc=False):
    """How a program's ranks were compared before launch.

    `has_data` says whether they computed with numbers, on this machine; otherwise tensors had no
    data. `is_complete` says whether the program ran to its end: otherwise it was ended after
    `num_steps` steps. `is_varied` is false if no rank was made to see anything else, as after ranks
    that diverge anyway.
    """

    world_size: NumRanks
    roles: tuple[Role, ...]
    num_steps: Natural
    is_complete: bool
    has_data: bool
    is_varied: bool = True
    variations: tuple[Variation, ...] = ()
