"""The page's data for the views compiler, coverage, memory, correctness and sharding."""

from __future__ import annotations

from msgspec import Struct


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
    within: tuple[str, ...] = ()  # graphs of higher-order ops that contain it: `cond_0.true`
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
    """A function that was not compiled and ran eagerly."""

    function: str
    reason: str
    is_rest: bool = False
    source: int = -1


class GuardTable(Struct, frozen=True, kw_only=True):
    """The guards of one compilation, in columns, in words and as torch writes them."""

    compile_id: str
    function: str
    kind: tuple[str, ...] = ()  # tensor, value, type, …
    subject: tuple[str, ...] = ()  # the expression that is compared; may be empty
    condition: tuple[str, ...] = ()
    guard: tuple[str, ...] = ()
    left_out: int = 0  # guards that are not listed


class StageRow(Struct, frozen=True, kw_only=True):
    """Time that a stage took."""

    stage: str
    num_calls: int
    total_ns: int | None  # None: not known


class ExplanationItem(Struct, frozen=True, kw_only=True):
    """The graphs of one compiled function; identical ranks share an item."""

    target: str
    ranks: str
    summary: str  # `3 graphs, broken at 2 lines`
    num_break_events: int
    graphs: tuple[GraphItem, ...] = ()
    break_sites: tuple[BreakRow, ...] = ()
    recompiles: tuple[RecompileRow, ...] = ()
    skipped_frames: tuple[SkippedRow, ...] = ()
    guards: tuple[GuardTable, ...] = ()  # empty if they were not recorded
    stages: tuple[StageRow, ...] = ()
    failure: str = ""


class SuspectRow(Struct, frozen=True, kw_only=True):
    """An op that is necessary for the failure."""

    op: str
    module: int = -1
    source: int = -1


class DiagnosisItem(Struct, frozen=True, kw_only=True):
    """The diagnosis of one compiled function."""

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


class ShardingRow(Struct, frozen=True, kw_only=True):
    """One combination of placements of an op's inputs."""

    inputs: str
    verdict: str
    outputs: str = ""
    num_bytes: int | None = None  # None: not known
    detail: str = ""


class OpRow(Struct, frozen=True, kw_only=True):
    """One op; the worst come first."""

    op: str
    schema: str
    verdict: str
    num_forward: int = 0
    num_backward: int = 0
    flops: int | None = None  # None if torch has no formula for it
    moved_bytes: int = 0
    detail: str = ""
    remedy: str = ""
    moves: tuple[str, ...] = ()
    shardings: tuple[ShardingRow, ...] = ()
    modules: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()


class LevelCoverage(Struct, frozen=True, kw_only=True):
    """All ops at one level; `counts` has a number for each of `verdicts`."""

    level: str
    mesh: str
    has_plan: bool
    verdicts: tuple[str, ...]
    counts: tuple[int, ...]
    ops: tuple[OpRow, ...]


class PeakRow(Struct, frozen=True, kw_only=True):
    """Bytes of one kind that one module owned at the peak; the most come first."""

    kind: int
    module: int
    num_bytes: int


class PhaseRange(Struct, frozen=True, kw_only=True):
    """Positions of the first and the last sample of a phase."""

    phase: str
    first: int
    last: int


class Allocations(Struct, frozen=True, kw_only=True):
    """Allocations of a step in columns; what is in use at `order` has start ≤ order < end.

    Rows with the same start are parts of one allocation, owned by several modules. The step begins
    after event `first` and ends with event `last`; what was there before starts at `first` or
    earlier, and what outlives the step ends after `last`.
    """

    first: int
    last: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    num_bytes: tuple[int, ...]
    kind: tuple[int, ...]  # position in MemoryCurve.kinds
    phase: tuple[int, ...]  # position in `phases`: in which it was allocated
    module: tuple[int, ...]  # that owns it
    line: tuple[int, ...]  # position in sources: that allocated it
    phases: tuple[str, ...]
    note: str = ""  # which allocations are not listed


class MemoryCurve(Struct, frozen=True, kw_only=True):
    """Memory over a step on identical ranks; columns have one entry for each sample.

    If there are more samples than a screen has columns, neighbouring samples are reduced to the
    highest of them; the peak is always included. The curve of the ranks that need most memory
    comes first. Other curves have fewer samples, and only the largest entries at the peak.
    """

    ranks: str
    kinds: tuple[str, ...]
    order: tuple[int, ...]
    num_bytes: tuple[tuple[int, ...], ...]  # a column for each kind
    module: tuple[int, ...]  # the running module
    phases: tuple[PhaseRange, ...]
    peak: int  # position of the sample
    peak_bytes: int
    peak_phase: str
    peak_module: int
    at_peak: tuple[PeakRow, ...]
    first_peak_bytes: int | None = None  # None: not recorded
    reserved_bytes: int | None = None
    needed_bytes: int | None = None
    device_bytes: int | None = None
    allocations: Allocations | None = None  # None: not recorded
    room: str = ""  # whether it fits on the device
    caveat: str = ""  # where the figures come from


class TensorTable(Struct, frozen=True, kw_only=True):
    """Tensors that were compared, in columns; those that differ come first."""

    name: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    agreement: tuple[str, ...] = ()
    is_fine: tuple[bool, ...] = ()
    error: tuple[float | None, ...] = ()
    noise: tuple[float | None, ...] = ()
    suspect: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    module: tuple[int, ...] = ()  # that owns the tensor; -1 for the model's output
    phase: tuple[str, ...] = ()  # that computes the tensor; empty if none does
    step: tuple[int, ...] = ()  # from 1; 0 if no training steps were compared
    dtype: tuple[str, ...] = ()


class DivergenceItem(Struct, frozen=True, kw_only=True):
    """The first module or op whose result differs."""

    module: int
    path: str
    phase: str
    suspect: str
    detail: str
    op: str = ""
    remedy: str = ""
    source: int = -1


class ParityItem(Struct, frozen=True, kw_only=True):
    """A comparison with the single device."""

    mesh: str
    summary: str  # `all of 312 tensors agree`
    is_fine: bool
    tensors: TensorTable
    divergences: tuple[DivergenceItem, ...] = ()


class InsertedRow(Struct, frozen=True, kw_only=True):
    """Inserted collectives that are identical except for their layer.

    `modules` and `sources` have an entry for each of them.
    """

    kind: str
    axis: str
    phase: str
    size_bytes: int  # input of each of them on one rank
    cause: str
    modules: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()


class FallbackRow(Struct, frozen=True, kw_only=True):
    """Ops that could not run sharded, identical except for their layer.

    `sizes_bytes`, `modules` and `sources` have an entry for each of them.
    """

    op: str
    kind: str
    axis: str
    placements: str
    remedy: str
    sizes_bytes: tuple[int, ...] = ()  # moved because of it
    modules: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()


class ParallelItem(Struct, frozen=True, kw_only=True):
    """A program that was partitioned for a mesh."""

    program: str
    mesh: str
    summary: str
    is_fine: bool
    inserted: tuple[InsertedRow, ...] = ()
    fallbacks: tuple[FallbackRow, ...] = ()
    tensors: TensorTable = TensorTable()


class VariationTable(Struct, frozen=True, kw_only=True):
    """What some ranks alone were made to see, in columns; what makes ranks diverge comes first."""

    condition: tuple[str, ...] = ()
    outcome: tuple[str, ...] = ()  # same, diverged, raised, not tried
    detail: tuple[str, ...] = ()  # what was raised, or why it was not tried
    ranks: tuple[str, ...] = ()
    source: tuple[int, ...] = ()


class RankCheckItem(Struct, frozen=True, kw_only=True):
    """A comparison of a program's ranks before launch."""

    ranks: str  # `2 of 2 ranks were run, with data, 5 steps, to the end of the program`
    summary: str  # `4 variations: ranks diverge under 1; issue the same collectives under 3.`
    severity: str  # of the worst finding: error, warning; empty if no rank diverges
    variations: VariationTable


class Proof(Struct, frozen=True, kw_only=True):
    """All parity checks, all partitioned programs, and all checks before launch."""

    parity: tuple[ParityItem, ...] = ()
    parallel: tuple[ParallelItem, ...] = ()
    checks: tuple[RankCheckItem, ...] = ()


class ShardRectangle(Struct, frozen=True, kw_only=True):
    """A shard, drawn as a rectangle: shares (0 to 1) of the last two sharded dims of its tensor."""

    left: float
    top: float
    width: float
    height: float
    ranks: str  # that hold it
    indices: str  # `[0:512, :]`
    color: int  # the same for shards that one rank of the first group holds


class Drawing(Struct, frozen=True, kw_only=True):
    """The layout of tensors of one shape and placement; `shards` is empty if there are too many."""

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[str, ...]
    description: str  # `rows sharded 8 ways over tp, replicated over dp (128)`
    horizontal: str = ""  # labels of the drawing's sides: `dim 1: 4096`
    vertical: str = ""
    shards: tuple[ShardRectangle, ...] = ()
    note: str = ""


class Parameters(Struct, frozen=True, kw_only=True):
    """Parameters and buffers in columns."""

    module: tuple[int, ...] = ()
    name: tuple[str, ...] = ()  # full
    shape: tuple[str, ...] = ()  # `4096 × 1024`
    local_shape: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    drawing: tuple[int, ...] = ()
    placement: tuple[str, ...] = ()  # `dp: Shard(0), tp: Replicate`
    global_bytes: tuple[int | None, ...] = ()  # None: not recorded
    local_bytes: tuple[int | None, ...] = ()
    is_trainable: tuple[bool, ...] = ()
    is_buffer: tuple[bool, ...] = ()
    rule: tuple[str, ...] = ()
    fsdp_group: tuple[str, ...] = ()
    alias_group: tuple[str, ...] = ()
    live_name: tuple[str, ...] = ()
    checkpoint_key: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # rules of findings on it, joined by commas


class LayoutRow(Struct, frozen=True, kw_only=True):
    """A tensor whose layout was recorded by itself, without an audit."""

    name: str
    drawing: int


class ShardingTable(Struct, frozen=True, kw_only=True):
    """All parameters, and a drawing for each of their layouts."""

    parameters: Parameters
    drawings: tuple[Drawing, ...]
    global_bytes: int | None = None  # None: not recorded
    local_bytes: int | None = None
    replicated_bytes: int | None = None  # held by a rank and by others as well
    layouts: tuple[LayoutRow, ...] = ()
