"""What the compiler did, and whether it was right, for the browser."""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "BreakRow",
    "Compiler",
    "DiagnosisItem",
    "ExplanationItem",
    "GraphItem",
    "RecompileRow",
    "SkippedRow",
    "StageRow",
    "SuspectRow",
]


class GraphItem(Struct, frozen=True, kw_only=True):
    """One graph, its ops in columns."""

    index: int
    function: str
    end: str
    num_inputs: int
    num_outputs: int
    num_ops: int
    fingerprint: str
    compile_id: str
    is_recompile: bool = False
    break_site: int = -1
    source: int = -1
    op: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    result: tuple[str, ...] = ()
    module: tuple[int, ...] = ()
    line: tuple[int, ...] = ()  # positions in sources
    left_out: int = 0  # ops that are not listed


class BreakRow(Struct, frozen=True, kw_only=True):
    """A line that breaks graphs."""

    source: int
    num_events: int
    reason: str
    explanation: str = ""
    break_id: str = ""
    hints: tuple[str, ...] = ()
    fix: str = ""


class RecompileRow(Struct, frozen=True, kw_only=True):
    """A function that was compiled again."""

    function: str
    number: int
    guard: str
    description: str
    source: int = -1


class SkippedRow(Struct, frozen=True, kw_only=True):
    """A function left to Python."""

    function: str
    reason: str
    is_rest: bool = False
    source: int = -1


class StageRow(Struct, frozen=True, kw_only=True):
    """Time that a stage took."""

    stage: str
    num_calls: int
    total_ns: int | None  # None is not known


class ExplanationItem(Struct, frozen=True, kw_only=True):
    """What torch.compile made of one function; ranks that agree share one."""

    target: str
    ranks: str
    words: str  # a sentence: `3 graphs, broken at 2 lines`
    num_break_events: int
    graphs: tuple[GraphItem, ...] = ()
    break_sites: tuple[BreakRow, ...] = ()
    recompiles: tuple[RecompileRow, ...] = ()
    skipped_frames: tuple[SkippedRow, ...] = ()
    stages: tuple[StageRow, ...] = ()
    failure: str = ""


class SuspectRow(Struct, frozen=True, kw_only=True):
    """An op to blame."""

    op: str
    module: int = -1
    source: int = -1


class DiagnosisItem(Struct, frozen=True, kw_only=True):
    """Whether a compiled function is right."""

    target: str
    backend: str
    rank: int
    condition: str
    is_bad: bool
    fact: str
    stage: str = ""
    part: str = ""
    where: str = ""  # `graph 2 of 3, backward`
    num_queries: int = 0
    suspects: tuple[SuspectRow, ...] = ()
    is_minimal: bool = False
    deviation: str = ""
    error: str = ""
    repro: str = ""  # name of the script's file
    script: str = ""  # its text
    is_verified: bool = False
    passing: str = ""
    notes: tuple[str, ...] = ()


class Compiler(Struct, frozen=True, kw_only=True):
    """Explanations and diagnoses."""

    explanations: tuple[ExplanationItem, ...] = ()
    diagnoses: tuple[DiagnosisItem, ...] = ()
