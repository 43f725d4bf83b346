"""Two recordings side by side, for the browser."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["AreaSum", "ChangeRow", "Comparison"]


class ChangeRow(Struct, frozen=True, kw_only=True):
    """Something that is not the same; `before` and `after` are for people, `delta` sorts."""

    area: int
    status: str  # added, gone, changed
    module: int  # of the second recording; -1 where it has none such
    path: str  # folded: `layers.{0…31}.attn`
    what: str
    before: str
    after: str
    delta: float  # after less before where both are numbers
    is_worse: bool | None = None  # None where neither is better
    repeat: int = 1


class AreaSum(Struct, frozen=True, kw_only=True):
    """How much of one kind changed, and its totals."""

    name: str  # collectives, bytes, memory, graph breaks, placements, coverage, findings
    before: str
    after: str
    num_added: int
    num_gone: int
    num_changed: int


class Comparison(Struct, frozen=True, kw_only=True):
    """What changed from one recording to the next."""

    before: str  # name of the file, or title
    after: str
    areas: tuple[AreaSum, ...]
    changes: tuple[ChangeRow, ...]
