"""Collectives for the browser: sums, causes, every call, and who sends to whom."""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "Calls",
    "CauseRow",
    "Communication",
    "GroupRow",
    "Matrix",
    "RankRow",
    "Spans",
    "Sum",
    "Timing",
]


class RankRow(Struct, frozen=True, kw_only=True):
    """Ranks that issued the same."""

    ranks: str
    example: int  # one of them
    num_ranks: int
    count: int
    input_bytes: int
    wire_bytes: int


class Sum(Struct, frozen=True, kw_only=True):
    """Collectives of the busiest rank of one kind along one axis in one phase."""

    axis: int
    kind: int
    phase: int
    count: int
    input_bytes: int
    wire_bytes: int


class CauseRow(Struct, frozen=True, kw_only=True):
    """A cause and its collectives; the most expensive come first."""

    words: int  # position in Communication.causes
    what: str  # `all_gather[tp]`
    count: int
    wire_bytes: int
    is_implicit: bool = False
    source: int = -1
    modules: tuple[int, ...] = ()


class GroupRow(Struct, frozen=True, kw_only=True):
    """A process group."""

    name: str
    ranks: str
    num_ranks: int
    axis: str
    backend: str


class Calls(Struct, frozen=True, kw_only=True):
    """Collectives in columns, by rank and then in the order in which it issued them.

    `start_ns` is empty where the run's clock was not recorded, as in a simulation.
    """

    rank: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    kind: tuple[int, ...] = ()
    axis: tuple[int, ...] = ()
    phase: tuple[int, ...] = ()
    owner: tuple[int, ...] = ()
    trigger: tuple[int, ...] = ()
    cause: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    dtype: tuple[int, ...] = ()
    input_bytes: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    wire_bytes: tuple[int, ...] = ()
    start_ns: tuple[int, ...] = ()


class Spans(Struct, frozen=True, kw_only=True):
    """Named stretches of time in columns."""

    rank: tuple[int, ...] = ()
    name: tuple[int, ...] = ()  # position in `names`
    start_ns: tuple[int, ...] = ()
    duration_ns: tuple[int, ...] = ()
    depth: tuple[int, ...] = ()
    device: tuple[int, ...] = ()  # position in `names`
    names: tuple[str, ...] = ()


class Timing(Struct, frozen=True, kw_only=True):
    """What the spans of one name add up to by one clock, on the rank that took longest."""

    name: str
    device: str
    slowest: int  # that rank
    num_ranks: int  # that have such spans
    count: int
    total_ns: int
    self_ns: int  # less what spans within them took
    max_ns: int  # of one span


class Matrix(Struct, frozen=True, kw_only=True):
    """Bytes from rank to rank if groups run rings; `sender` and `receiver` are positions."""

    ranks: tuple[int, ...]
    sender: tuple[int, ...]
    receiver: tuple[int, ...]
    num_bytes: tuple[int, ...]


class Communication(Struct, frozen=True, kw_only=True):
    """All collectives and their causes. Lists of names come first; all else points into them."""

    axes: tuple[str, ...]
    kinds: tuple[str, ...]
    phases: tuple[str, ...]
    causes: tuple[str, ...]
    dtypes: tuple[str, ...]
    groups: tuple[GroupRow, ...]
    ranks: tuple[RankRow, ...]
    sums: tuple[Sum, ...]
    reasons: tuple[CauseRow, ...]
    calls: Calls = Calls()
    spans: Spans = Spans()
    timings: tuple[Timing, ...] = ()  # the longest come first
    matrix: Matrix | None = None
    matrix_note: str = ""  # why there is none, or what it leaves out
    left_out: str = ""  # which calls are not in `calls`, where there are too many
    scope: str = ""  # what figures are of: `over 2 forward passes, rank 0 of 8, simulated`
    clock: str = ""  # what to know of the times of spans: `time of the simulation, not of a run`
