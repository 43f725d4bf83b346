"""The page: what ran, what was found, and a record for each view."""

from __future__ import annotations

from msgspec import Struct

from shardscope.record import Axis
from shardscope.report.page.communication import Communication
from shardscope.report.page.comparison import Comparison
from shardscope.report.page.compiler import Compiler
from shardscope.report.page.coverage import LevelCoverage
from shardscope.report.page.memory import MemoryCurve
from shardscope.report.page.modules import Modules
from shardscope.report.page.proof import Proof
from shardscope.report.page.sharding import ShardingTable

__all__ = ["FORMAT", "SCHEMA", "Fact", "FindingItem", "GapItem", "Page", "RunFacts", "Sources"]

FORMAT = "shardscope.page"
SCHEMA = 2


class RunFacts(Struct, frozen=True, kw_only=True):
    """What ran."""

    title: str  # of the page: `Llama on dp=128 × tp=8`
    mesh: tuple[Axis, ...]
    world_size: int
    ranks: str  # `all 1,024 ranks`
    reality: str  # simulated, real process group, one process
    torch_version: str
    shardscope_version: str
    command: str
    instruments: tuple[str, ...]
    checks: str  # `checked by: trace; not run: audit, coverage`
    no_gaps: str  # what it means that there are no gaps
    scope: str  # what figures of collectives are of: `rank 0 of 8, over 2 forward passes`
    num_forwards: int | None  # how often the model ran forward; None where that was not counted


class Fact(Struct, frozen=True, kw_only=True):
    """A figure of the overview; `view` is where it leads."""

    label: str
    value: str
    note: str = ""
    view: str = ""


class FindingItem(Struct, frozen=True, kw_only=True):
    """A finding; the worst come first."""

    rule: str
    severity: str  # error, warning, info
    subject: str
    fact: str
    remedy: str
    ranks: str = ""  # `rank 0`, `ranks 0-7`; empty where it is of none
    count: int = 1  # findings that are alike but for their layer or rank
    module: int = -1
    source: int = -1


class GapItem(Struct, frozen=True, kw_only=True):
    """Something that was not understood."""

    place: str
    fact: str
    rank: int | None = None
    is_loss: bool = False


class Sources(Struct, frozen=True, kw_only=True):
    """Lines of the user's program, in columns."""

    file: tuple[str, ...] = ()
    line: tuple[int, ...] = ()
    function: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


class Page(Struct, frozen=True, kw_only=True):
    """All that one page shows. A view that has nothing to show is None or empty."""

    run: RunFacts
    facts: tuple[Fact, ...] = ()
    findings: tuple[FindingItem, ...] = ()
    gaps: tuple[GapItem, ...] = ()
    sources: Sources = Sources()
    modules: Modules = Modules()
    communication: Communication | None = None
    sharding: ShardingTable | None = None
    coverage: tuple[LevelCoverage, ...] = ()
    compiler: Compiler | None = None
    memory: tuple[MemoryCurve, ...] = ()
    proof: Proof | None = None
    comparison: Comparison | None = None
    format: str = FORMAT
    schema: int = SCHEMA
