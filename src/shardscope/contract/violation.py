"""A limit that is violated, with what a person needs to act on it."""

from __future__ import annotations

from enum import StrEnum

from shardscope.contract.limits import Limit
from shardscope.record import RankSpan, Record, Source


class BreachKind(StrEnum):
    """How a limit is exceeded."""

    TOO_MUCH = "too much"
    TOO_LITTLE = "too little"
    NOTHING_FITS = "nothing fits"  # it names a module or an axis that the recording does not have
    NOT_MEASURED = "not measured"  # no recording measured it, or records were lost


class Evidence(Record, frozen=True, kw_only=True):
    """Something that counts towards the figure; `cause` is why it exists, if known."""

    what: str
    cause: str = ""
    module: str | None = None
    count: int = 1
    num_bytes: int = 0
    source: Source | None = None
    remedy: str = ""


class Violation(Record, frozen=True, kw_only=True):
    """A limit that is exceeded.

    `actual` is the worst value, found in the first of `modules` on `ranks`; the others exceed the
    limit, too. `evidence` lists what counts towards it, the most significant first.
    """

    limit: Limit
    kind: BreachKind
    title: str  # what is limited, in words
    expected: str
    actual: str
    value: int | None = None
    modules: tuple[str, ...] = ()
    ranks: tuple[RankSpan, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
