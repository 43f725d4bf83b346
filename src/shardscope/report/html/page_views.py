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


class ShardingRow(Struct, frozen=True, kw_only=True):
    """One way to lay out an op's inputs."""

    inputs: str
    verdict: str
    outputs: str = ""
    num_bytes: int | None = None  # None is not known
    detail: str = ""


class OpRow(Struct, frozen=True, kw_only=True):
    """One op; the worst come first."""

    op: str
    schema: str
    verdict: str
    num_forward: int = 0
    num_backward: int = 0
    flops: int | None = None  # None where there is no formula for it
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


class HeldRow(Struct, frozen=True, kw_only=True):
    """What one module held of one kind at the peak; the most comes first."""

    kind: int
    module: int
    num_bytes: int


class PhaseStretch(Struct, frozen=True, kw_only=True):
    """From which moment to which (both included) a phase lasted, as positions of samples."""

    phase: str
    first: int
    last: int


class MemoryCurve(Struct, frozen=True, kw_only=True):
    """A step's memory on ranks that held the same; columns have one entry for each sample.

    Where there were more moments than a screen has columns, the highest of each stretch is kept,
    and the peak always. The curve of the ranks that need most comes first; of others there are
    fewer moments, and of what they held at the peak only the largest.
    """

    ranks: str
    kinds: tuple[str, ...]
    order: tuple[int, ...]
    num_bytes: tuple[tuple[int, ...], ...]  # a column for each kind
    module: tuple[int, ...]  # that ran
    phases: tuple[PhaseStretch, ...]
    peak: int  # position of the sample
    peak_bytes: int
    peak_phase: str
    peak_module: int
    at_peak: tuple[HeldRow, ...]
    first_peak_bytes: int | None = None  # None is what was not recorded
    reserved_bytes: int | None = None
    needed_bytes: int | None = None
    device_bytes: int | None = None
    room: str = ""  # whether it fits in the device, in words
    caveat: str = ""  # where the figures come from


class VerdictTable(Struct, frozen=True, kw_only=True):
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


class DivergenceItem(Struct, frozen=True, kw_only=True):
    """Where the two versions part."""

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
    words: str  # a sentence: `all of 312 tensors agree`
    is_fine: bool
    tensors: VerdictTable
    divergences: tuple[DivergenceItem, ...] = ()


class InsertedRow(Struct, frozen=True, kw_only=True):
    """Collectives that were put in, alike but for their layer."""

    what: str
    phase: str
    count: int
    size_bytes: int  # that a rank puts into all of them
    cause: str
    module: int = -1
    source: int = -1


class FallbackRow(Struct, frozen=True, kw_only=True):
    """Ops that could not run on pieces, alike but for their layer."""

    op: str
    kind: str
    axis: str
    count: int
    size_bytes: int  # moved because of all of them
    placements: str
    remedy: str
    module: int = -1
    source: int = -1


class ParallelItem(Struct, frozen=True, kw_only=True):
    """A program that was cut for a mesh."""

    program: str
    mesh: str
    words: str
    is_fine: bool
    inserted: tuple[InsertedRow, ...] = ()
    fallbacks: tuple[FallbackRow, ...] = ()
    tensors: VerdictTable = VerdictTable()


class Proof(Struct, frozen=True, kw_only=True):
    """All comparisons and all programs that were cut."""

    parity: tuple[ParityItem, ...] = ()
    parallel: tuple[ParallelItem, ...] = ()


class Piece(Struct, frozen=True, kw_only=True):
    """A part of a tensor, as a rectangle in shares (0 to 1) of its last two cut dims."""

    left: float
    top: float
    width: float
    height: float
    ranks: str  # that hold it
    indices: str  # `[0:512, :]`
    color: int  # the same for pieces that one rank of the first group holds


class Drawing(Struct, frozen=True, kw_only=True):
    """The layout of tensors of one shape and placement; `pieces` is empty if there are too many."""

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[str, ...]
    words: str  # `rows cut in 8 along tp, a copy on each of 128 dp`
    horizontal: str = ""  # what the picture's sides are: `dim 1: 4096`
    vertical: str = ""
    pieces: tuple[Piece, ...] = ()
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
    global_bytes: tuple[int | None, ...] = ()  # None is not recorded
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
    """A tensor whose layout was asked for by itself."""

    name: str
    drawing: int


class ShardingTable(Struct, frozen=True, kw_only=True):
    """All parameters, and a drawing for each of their layouts."""

    parameters: Parameters
    drawings: tuple[Drawing, ...]
    global_bytes: int | None = None  # None is not recorded
    local_bytes: int | None = None
    replicated_bytes: int | None = None  # of what a rank holds, what others hold as well
    layouts: tuple[LayoutRow, ...] = ()
