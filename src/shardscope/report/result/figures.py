"""The figures of a result, one struct for each view of a recording; they document the JSON.

Bytes and counts of collectives are of one training step and one rank unless a field says otherwise.
A field that was not recorded is left out; it is never zero. Lists have the most important first.
`repeat` counts identical layers that share an entry, whose name then has `*` or a range in place
of the layer's number. A `line` is `file:line` of the user's program, and `code` is its text.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shardscope.record import Source


class TrafficFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Collectives of the busiest rank that share phase, mesh axis and kind."""

    phase: str
    axis: str
    kind: str
    count: int
    input_bytes: int
    wire_bytes: int


class CauseFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why collectives were issued: those with the same cause, kind and mesh axis together.

    `is_implicit` means that DTensor inserted them without being asked. `modules` are owners.
    """

    cause: str
    collective: str
    count: int
    wire_bytes: int
    is_implicit: bool = False
    line: str = ""
    code: str = ""
    modules: tuple[str, ...] = ()


class ModuleTraffic(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Collectives that belong to a module itself, of all its `repeat` layers together."""

    module: str
    count: int
    wire_bytes: int
    repeat: int = 1


class CommunicationFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the step communicated on the rank that sent most.

    `wire_bytes` is a ring estimate: what the rank sends if each group runs a ring. `scope` says
    which ranks were recorded and over how many forward passes. `num_rank_sets` is 1 if all recorded
    ranks issued the same collectives.
    """

    scope: str
    rank: int
    count: int
    input_bytes: int
    wire_bytes: int
    num_rank_sets: int
    totals: tuple[TrafficFigures, ...] = ()
    causes: tuple[CauseFigures, ...] = ()
    modules: tuple[ModuleTraffic, ...] = ()


class ModuleMemory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of a module at the peak, by kind, of all its `repeat` layers together."""

    module: str
    num_bytes: int
    kinds: dict[str, int]
    repeat: int = 1


class LineMemory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory at the peak that a line of the program allocated; no line is that of no program."""

    num_bytes: int
    kinds: dict[str, int]
    line: str = ""
    code: str = ""


class MemoryFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of a step on the rank that needs most; an estimate, from tensors without data.

    `needed_bytes` is what a device must have: the peak and what CUDA takes beside it. `fits` says
    whether that is at most `device_bytes`, and is left out where no device was named. `kinds`,
    `modules` and `lines` are what is in use at the peak.
    """

    rank: int
    num_ranks: int
    peak_bytes: int
    peak_phase: str
    peak_module: str | None = None
    first_peak_bytes: int | None = None
    reserved_bytes: int | None = None
    needed_bytes: int | None = None
    device_bytes: int | None = None
    fits: bool | None = None
    kinds: dict[str, int] = {}
    modules: tuple[ModuleMemory, ...] = ()
    lines: tuple[LineMemory, ...] = ()


class ParameterFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A parameter or buffer: its placement on each mesh axis, and its bytes in all and here."""

    name: str
    shape: tuple[int, ...]
    placements: dict[str, str] = {}
    global_bytes: int | None = None
    local_bytes: int | None = None
    repeat: int = 1
    is_buffer: bool = False


class ShardingFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How parameters are placed; `local_bytes` and `replicated_bytes` are of the fullest rank."""

    num_parameters: int
    global_bytes: int | None = None
    local_bytes: int | None = None
    replicated_bytes: int | None = None
    parameters: tuple[ParameterFigures, ...] = ()


class SliceFigures(Struct, frozen=True, kw_only=True):
    """The ranks that hold a slice, and its indices: `0:512, :` for the first half of dim 0."""

    ranks: str
    indices: str


class LayoutFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which ranks hold which slice of a tensor."""

    name: str
    shape: tuple[int, ...]
    placements: dict[str, str]
    slices: tuple[SliceFigures, ...] = ()


class TensorFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor that does not agree with the single device's; errors are relative."""

    name: str
    kind: str
    agreement: str
    step: int | None = None  # of several training steps, from 1
    repeat: int = 1
    error: float | None = None
    noise: float | None = None
    ranks: str = ""
    suspect: str = ""
    detail: str = ""


class DivergenceFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the parallel version first computes something else, and the likely cause."""

    module: str
    phase: str
    suspect: str
    detail: str
    op: str = ""
    remedy: str = ""
    line: str = ""
    code: str = ""


class ParityFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The comparison with a single device; `agreements` counts the tensors of each agreement."""

    mesh: str
    verdict: str
    num_tensors: int
    agreements: dict[str, int]
    num_compared_modules: int
    divergences: tuple[DivergenceFigures, ...] = ()
    different: tuple[TensorFigures, ...] = ()


class DeviationFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor that deviates between two runs, A and B; norms are of the full tensor.

    `ranks` of the run `disagreeing_run` have another copy than the other ranks.
    """

    step: int
    kind: str
    name: str
    call: int = 0
    norm_a: float | None = None
    norm_b: float | None = None
    sum_a: float | None = None
    sum_b: float | None = None
    deviation: float | None = None
    limit: float | None = None
    ratio: float | None = None
    detail: str = ""
    ranks: str = ""
    disagreeing_run: str = ""
    suspect: str = ""


class RunFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The comparison of two runs by sampled values; `deviations` are in the order of execution."""

    run_a: str
    run_b: str
    verdict: str
    num_compared: int
    num_equal: int
    num_deviating: int
    deviations: tuple[DeviationFigures, ...] = ()
    agreed: tuple[str, ...] = ()


class HangCauseFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A likely cause of a hang: its class, the responsible ranks, and what shows it."""

    kind: str
    certainty: str
    ranks: str
    fact: str
    remedy: str = ""
    evidence: tuple[str, ...] = ()
    group: str = ""
    position: int | None = None
    line: str = ""


class HangWaitFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ranks that wait in a call of a group for ranks that have not issued it."""

    waiters: str
    missing: str
    call: str
    group: str
    position: int | None = None
    line: str = ""


class HangSideFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ranks issued where a group diverges; an empty `call` is nothing."""

    group: str
    position: int | None
    differing: tuple[str, ...]
    ranks: str
    call: str = ""
    line: str = ""


class HangProgressFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many collectives ranks of a group have issued; `behind` is by how many they are late."""

    group: str
    ranks: str
    num_issued: int
    num_done: int | None = None
    behind: int = 0
    last: str = ""
    line: str = ""
    stack: str = ""


class SlowRankFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank that the others waited for: `excess_ns` in all, at `num_last` of its collectives."""

    rank: int
    num_last: int
    num_collectives: int
    excess_ns: int
    group: str


class SkewFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Means of a group's collectives: until the last rank arrives, and from then to the end."""

    group: str
    num_collectives: int
    skew_ns: int
    transfer_ns: int | None = None
    last_rank: int = 0


class HangFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the files of a run's ranks show about a hang; `unknowns` is what they cannot say."""

    verdict: str
    is_hang: bool
    formats: dict[str, int]
    ranks: str = ""
    missing_ranks: str = ""
    causes: tuple[HangCauseFigures, ...] = ()
    waits: tuple[HangWaitFigures, ...] = ()
    cycle: tuple[int, ...] = ()
    sides: tuple[HangSideFigures, ...] = ()
    progress: tuple[HangProgressFigures, ...] = ()
    slow_ranks: tuple[SlowRankFigures, ...] = ()
    skews: tuple[SkewFigures, ...] = ()
    unknowns: tuple[str, ...] = ()


class RoleFigures(Struct, frozen=True, kw_only=True):
    """A rank that was run before launch, and the ranks that it stands for."""

    rank: int
    ranks: str


class VariationFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What some ranks alone were made to see, and what ranks do then.

    `outcome` is same, diverged, raised or not tried; `detail` is why, or what was raised.
    """

    condition: str
    outcome: str
    ranks: str
    line: str = ""
    detail: str = ""


class RankCheckFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a program's ranks were compared before launch; what diverges is a finding, too."""

    verdict: str
    world_size: int
    num_steps: int
    is_complete: bool
    has_data: bool
    is_varied: bool
    roles: tuple[RoleFigures, ...] = ()
    variations: tuple[VariationFigures, ...] = ()


class FallbackFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An op of a parallel program that cannot run on its sharded inputs."""

    op: str
    module: str
    axis: str
    kind: str
    size_bytes: int
    remedy: str
    line: str = ""
    code: str = ""


class ParallelFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A program that was partitioned; `inserted` counts its collectives, as `all_reduce[tp]`."""

    program: str
    mesh: str
    is_training: bool
    proof: str
    num_ops: int
    inserted: dict[str, int]
    inserted_bytes: int
    peak_bytes: int | None = None
    fallbacks: tuple[FallbackFigures, ...] = ()
    different: tuple[TensorFigures, ...] = ()


class BlockerFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An op that does not shard: what happens to it, and what to do."""

    op: str
    verdict: str
    num_calls: int
    flops: int | None = None
    detail: str = ""
    remedy: str = ""
    modules: tuple[str, ...] = ()
    line: str = ""
    code: str = ""


class CoverageFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which ops shard, at one level of decomposition; `verdicts` counts calls of ops."""

    level: str
    mesh: str
    summary: str
    verdicts: dict[str, int]
    blockers: tuple[BlockerFigures, ...] = ()


class BreakFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line that breaks a graph of torch.compile, and what to write instead."""

    line: str
    reason: str
    num_events: int
    code: str = ""
    explanation: str = ""
    hints: tuple[str, ...] = ()
    fix: str = ""


class RecompileFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that was compiled again, and the guard that failed."""

    function: str
    description: str
    line: str = ""


class SkipFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that runs eagerly."""

    function: str
    reason: str
    line: str = ""


class CompilerFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What torch.compile made of a function; `ranks` compiled the same."""

    target: str
    ranks: str
    num_graphs: int
    num_ops: int
    num_breaks: int
    num_recompiles: int
    num_skipped: int
    breaks: tuple[BreakFigures, ...] = ()
    recompiles: tuple[RecompileFigures, ...] = ()
    skipped: tuple[SkipFigures, ...] = ()


class SuspectFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An op of the smallest program that still fails."""

    op: str
    module: str = ""
    line: str = ""
    code: str = ""


class DiagnosisFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a compiled function compares with eager execution, and which part is to blame."""

    target: str
    backend: str
    condition: str
    fact: str
    stage: str = ""
    part: str = ""
    phase: str = ""
    suspects: tuple[SuspectFigures, ...] = ()
    max_ulp: float | None = None
    repro: str = ""
    is_verified: bool = False
    passing: str = ""
    notes: tuple[str, ...] = ()


class PhaseFigures(Struct, frozen=True, kw_only=True):
    """Time in a phase on the rank where it took longest; `is_simulated` times are no run's."""

    name: str
    clock: str
    rank: int
    count: int
    total_ns: int
    self_ns: int
    is_simulated: bool


class StopFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank whose recording ends early: its error, or where it was."""

    rank: int
    error: str = ""
    open_phases: tuple[str, ...] = ()


class ChangeFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value that differs between two recordings; `is_worse` is left out where neither is."""

    area: str
    what: str
    before: str | int | float | None
    after: str | int | float | None
    unit: str
    module: str | None = None
    repeat: int = 1
    is_worse: bool | None = None
    because: str = ""


class ComparisonFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What changed from one recording to another; `totals` has before and after of each area."""

    before: str
    after: str
    num_changes: int
    num_worse: int
    totals: dict[str, tuple[str, str]] = {}
    changes: tuple[ChangeFigures, ...] = ()
    notes: tuple[str, ...] = ()


class ViolationFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit of a contract that is exceeded; `line` is the limit's in the contract."""

    title: str
    expected: str
    actual: str
    line: str
    modules: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    remedy: str = ""


class ContractFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A contract and its violations."""

    contract: str
    num_limits: int
    num_violations: int
    violations: tuple[ViolationFigures, ...] = ()


class TableFigures(Struct, frozen=True, kw_only=True):
    """The rows that a query returns, each a list of cells; `num_rows` counts all of them."""

    columns: tuple[str, ...]
    num_rows: int
    rows: tuple[tuple[Any, ...], ...]


class CheckFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a part of the installation works: ok, missing (and optional) or failed."""

    name: str
    status: str
    detail: str = ""
    disables: str = ""
    remedy: str = ""


class EnvironmentFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is installed, and what works here; a package without a version is not installed."""

    python: str
    platform: str
    tested_torch: tuple[str, ...]
    packages: dict[str, str | None]
    checks: tuple[CheckFigures, ...] = ()


class TypedTensorFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor, or the same one of `repeat` layers, with its type along each mesh axis.

    `gradient` is the type of its gradient, left out where there is none.
    """

    name: str
    role: str
    forward: dict[str, str]
    gradient: dict[str, str] = {}
    repeat: int = 1


class TypesFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Inferred types of all tensors on one mesh; `num_undecided` have an axis without a type.

    `num_declared` types of placements and annotations were compared with the values, and
    `num_agreeing` of these are the same.
    """

    mesh: str
    num_runs: int
    num_tensors: int
    num_undecided: int = 0
    num_declared: int = 0
    num_agreeing: int = 0
    tensors: tuple[TypedTensorFigures, ...] = ()


class Figures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was measured; a part that the command did not measure is left out."""

    communication: CommunicationFigures | None = None
    memory: MemoryFigures | None = None
    sharding: ShardingFigures | None = None
    layouts: tuple[LayoutFigures, ...] = ()
    parity: tuple[ParityFigures, ...] = ()
    runs: tuple[RunFigures, ...] = ()
    checks: tuple[RankCheckFigures, ...] = ()
    hangs: tuple[HangFigures, ...] = ()
    types: tuple[TypesFigures, ...] = ()
    parallel: tuple[ParallelFigures, ...] = ()
    coverage: tuple[CoverageFigures, ...] = ()
    compiler: tuple[CompilerFigures, ...] = ()
    diagnoses: tuple[DiagnosisFigures, ...] = ()
    phases: tuple[PhaseFigures, ...] = ()
    stops: tuple[StopFigures, ...] = ()
    comparisons: tuple[ComparisonFigures, ...] = ()
    contract: ContractFigures | None = None
    table: TableFigures | None = None
    environment: EnvironmentFigures | None = None


def read_code(source: Source | None) -> str:
    """The text of a source line; empty if it is not known."""
    return "" if source is None else source.text.strip()
