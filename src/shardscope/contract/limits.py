"""The limits of a contract, each on one figure of a recording, their keys in a contract file, and
the record of a limit that is exceeded.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from msgspec.structs import force_setattr

from shardscope.errors import ContractError
from shardscope.record import CollectiveKind, Phase, RankSpan, Record, Severity, Source

_MOST = 2**63 - 1


class Figure(StrEnum):
    """The figures that a contract can limit, by their names in the file; each is per rank."""

    PEAK_MEMORY = "peak_memory"
    GRAPH_BREAKS = "graph_breaks"
    RECOMPILES = "recompiles"
    SKIPPED_FUNCTIONS = "skipped_functions"
    UNCOVERED_OPS = "uncovered_ops"  # the three below together
    MISSING_OPS = "missing_ops"
    WRONG_OPS = "wrong_ops"
    REPLICATED_OPS = "replicated_ops"
    FALLBACKS = "fallbacks"
    GAPS = "gaps"
    FINDINGS = "findings"
    TYPES = "types"  # inferred, of one tensor; in the contract they are text
    COUNT = "count"
    BYTES = "bytes"  # input of a rank
    WIRE_BYTES = "wire_bytes"
    OUTPUT_BYTES = "output_bytes"

    @property
    def is_size(self) -> bool:
        """Whether the figure is a number of bytes."""
        return self is Figure.PEAK_MEMORY or self.endswith("bytes")


COMM_FIGURES = (Figure.COUNT, Figure.BYTES, Figure.WIRE_BYTES, Figure.OUTPUT_BYTES)


class CauseKind(StrEnum):
    """What caused a collective; `unasked` is an implicit redistribution by DTensor."""

    UNASKED = "unasked"
    REDISTRIBUTE = "redistribute"
    FULLY_SHARD = "fully_shard"
    DDP_BUCKET = "ddp_bucket"
    CALL = "call"
    COMPILED = "compiled"
    SPMD_TYPES = "spmd_types"
    UNKNOWN = "unknown"


class Selector(NamedTuple):
    """The collectives that a limit counts: those that match every field that is not empty.

    `module=None` matches all collectives, also those outside of modules; "" is the root module.
    """

    module: str | None = None
    phases: tuple[Phase, ...] = ()
    axes: tuple[str, ...] = ()
    kinds: tuple[CollectiveKind, ...] = ()
    causes: tuple[CauseKind, ...] = ()


class Limit(Record, frozen=True, kw_only=True):
    """The minimum and maximum of a figure; equal if it is exact.

    A limit on collectives applies to each module that matches `module`, including its children, and
    to each rank. Other figures have only a maximum, `most`; findings by severity or rule.
    """

    figure: Figure
    least: int | None = None
    most: int | None = None
    module: str | None = None
    phases: tuple[Phase, ...] = ()
    axes: tuple[str, ...] = ()
    kinds: tuple[CollectiveKind, ...] = ()
    causes: tuple[CauseKind, ...] = ()
    severity: Severity | None = None
    rule: str = ""
    tensor: str = ""
    types: str = ""

    def __post_init__(self) -> None:
        fact = self._find_problem()
        if fact:
            raise ContractError(f"A limit on {self.figure} {fact}.")

    @property
    def selector(self) -> Selector:
        """The collectives that the limit counts."""
        return Selector(self.module, self.phases, self.axes, self.kinds, self.causes)

    @property
    def is_on_comm(self) -> bool:
        """Whether it limits collectives."""
        return self.figure in COMM_FIGURES

    @property
    def is_on_unasked(self) -> bool:
        """Whether it limits all implicit redistributions, which the file writes as `unasked`."""
        is_plain = self.figure is Figure.COUNT and self.least is None
        return is_plain and self.selector == Selector(causes=(CauseKind.UNASKED,))

    @property
    def is_exact(self) -> bool:
        """Whether minimum and maximum are equal."""
        return self.least is not None and self.least == self.most

    def _find_problem(self) -> str:
        if self.figure is Figure.TYPES:
            is_complete = self.tensor and self.types and self.least is None and self.most is None
            return "" if is_complete else "needs a tensor and its types, and takes no number"
        if self.least is None and self.most is None:
            return "has neither a minimum nor a maximum. Give it one of them"
        bounds = [bound for bound in (self.least, self.most) if bound is not None]
        if not all(0 <= bound <= _MOST for bound in bounds):
            return "is negative or implausibly large. Give a count or a number of bytes"
        if bounds != sorted(bounds):
            return f"wants at least {self.least:,} and at most {self.most:,}. Swap them"
        if not self.is_on_comm and (self.least is not None or self.selector != Selector()):
            return "is a maximum for the total and takes no other keys"
        if self.figure is not Figure.FINDINGS and (self.severity is not None or self.rule):
            return "has a severity or a rule, which only findings have"
        return ""


class Contract(Record, frozen=True):
    """Limits, in the order of the file, with those on collectives last."""

    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        force_setattr(self, "limits", tuple(sorted(self.limits, key=_order)))
        keys = Counter(_key(limit) for limit in self.limits if not is_in_table(limit))
        for key, count in keys.items():
            if count > 1:
                raise ContractError(f"A contract limits {key[0]} {count} times. Keep one of them.")


def is_in_table(limit: Limit) -> bool:
    """Whether a contract file has the limit in a `[[contract.comm]]` table of its own."""
    return limit.is_on_comm and not limit.is_on_unasked


def _key(limit: Limit) -> tuple[str, str, str]:
    name = "unasked" if limit.is_on_comm else str(limit.figure)
    return name, str(limit.severity), limit.rule or limit.tensor


def _order(limit: Limit) -> tuple[int, bool, int]:
    """Sort key: totals in the order of `Figure`, then collectives in their given order."""
    if limit.is_on_comm:
        return len(Figure) + is_in_table(limit), False, 0
    index = -1 if limit.severity is None else list(Severity).index(limit.severity)
    return list(Figure).index(limit.figure), bool(limit.rule), index


Side = Literal["exact", "most", "least"]


class Bound(NamedTuple):
    """The figure that a key limits, and whether it is a minimum, a maximum or exact."""

    figure: Figure
    side: Side


_SIDES: Final[tuple[tuple[str, Side], ...]] = (("", "exact"), ("min_", "least"), ("max_", "most"))
UNASKED = "unasked"
ANY = "any"
CEILINGS = {
    str(figure): figure
    for figure in Figure
    if figure not in (*COMM_FIGURES, Figure.FINDINGS, Figure.TYPES)
}
CONTRACT_KEYS = (*CEILINGS, UNASKED, "findings", "types", "comm")
FINDING_KEYS = (ANY, *map(str, Severity), "rules")
BOUNDS = {
    f"{prefix}{figure}": Bound(figure, side) for figure in COMM_FIGURES for prefix, side in _SIDES
}
SELECTORS = {
    "module": "module",
    "phase": "phases",
    "axis": "axes",
    "kind": "kinds",
    "cause": "causes",
}
"""Keys of a limit on collectives, and what a record calls them."""
COMM_KEYS = (*SELECTORS, *BOUNDS)


class BreachKind(StrEnum):
    """How a limit is exceeded."""

    TOO_MUCH = "too much"
    TOO_LITTLE = "too little"
    NOTHING_FITS = "nothing fits"  # it names a module or an axis that the recording does not have
    OTHER_TYPE = "another type"
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
