"""Who is to blame: what the search for a stage hands back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardscope.record import Phase, Stage

__all__ = ["Blame"]


@final
@dataclass(frozen=True)
class Blame:
    """The stage to blame, and the part of it as far as it could be told."""

    stage: Stage
    part: str = ""
    phase: Phase | None = None
    notes: tuple[str, ...] = ()
