"""Records of `explain` and `diagnose`: what the compiler made of a function, and which op it
computes wrongly.
"""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Phase, Record, Source
from shardscope.record.ranks import Natural, Rank, RankSpan


class OpKind(StrEnum):
    """How a graph calls an op."""

    FUNCTION = "function"  # torch.relu, operator.add, aten.mm.default
    METHOD = "method"  # Tensor.relu
    MODULE = "module"  # a module that the graph calls without tracing into it
    HIGHER_ORDER = "higher_order"  # an op that is given graphs: cond, checkpoint, autograd.Function
    BOOKKEEPING = "bookkeeping"  # sets a mode of torch's (no_grad), or takes a tuple apart


class GraphEnd(StrEnum):
    """Why a graph ends where it does."""

    RETURN = "return"  # the function does
    BREAK = "break"  # the compiler could not go on
    OTHER = "other"


class GraphOp(Record, frozen=True, kw_only=True, gc=False):
    """One op of a graph.

    `within` names the higher-order ops whose graph contains it: `cond_0.true`; usually empty.
    """

    kind: OpKind
    op: str
    result: str = ""  # `float32[8, 64]`; ? is a size that may change
    module: str = ""  # name of the module that called it
    within: str = ""
    source: Source | None = None


class CompiledGraph(Record, frozen=True, kw_only=True, gc=False):
    """A graph that was passed to the backend."""

    index: Natural
    compile_id: str  # torch's, `frame/compilation`
    function: str
    num_inputs: Natural
    num_outputs: Natural
    end: GraphEnd
    fingerprint: str  # of ops, shapes and dtypes: the same on ranks that compiled the same
    ops: tuple[GraphOp, ...] = ()
    source: Source | None = None  # the first line of the function, or the one it resumes at
    break_site: Natural | None = None  # that ended it, index into Explanation.break_sites
    is_recompile: bool = False

    @property
    def num_ops(self) -> int:
        """Ops that compute something, those inside higher-order ops included."""
        return sum(op.kind is not OpKind.BOOKKEEPING for op in self.ops)


class BreakSite(Record, frozen=True, kw_only=True, gc=False):
    """A line of the user's code that breaks a graph.

    `num_events` is the number of traces that stopped there; retries of the compiler in the callers
    count once.
    """

    source: Source
    num_events: Natural
    reason: str
    explanation: str = ""
    break_id: str = ""  # torch's, as documented: GB0123
    hints: tuple[str, ...] = ()
    fix: str = ""  # an example of what to write instead


class Recompile(Record, frozen=True, kw_only=True, gc=False):
    """A function that was compiled again because a guard failed."""

    function: str
    number: Natural  # 1 for its second compilation
    compile_id: str
    guard: str  # as torch writes it
    description: str  # for people
    source: Source | None = None


class SkippedFrame(Record, frozen=True, kw_only=True, gc=False):
    """A function, or the rest of it after a break, that falls back to eager."""

    function: str
    reason: str
    source: Source | None = None
    break_site: Natural | None = None  # index into Explanation.break_sites
    is_rest: bool = False  # what came before a break was compiled


class StageTime(Record, frozen=True, kw_only=True, gc=False):
    """The time of a stage of the compiler, excluding other stages.

    None if it cannot be separated from the time of the stages that it calls.
    """

    stage: str  # tracing, guards, backend, aot, inductor, backward, other
    num_calls: Natural
    total_ns: Natural | None


class FrameGuards(Record, frozen=True, kw_only=True, gc=False):
    """The guards of a compilation, without those on torch's own modules."""

    compile_id: str
    function: str
    guards: tuple[str, ...]


class GraphCollective(Record, frozen=True, kw_only=True, gc=False):
    """A collective in a graph."""

    graph: Natural  # index into Explanation.graphs
    op: str
    result: str
    group: tuple[RankSpan, ...] = ()
    source: Source | None = None


class Explanation(Record, frozen=True, kw_only=True, gc=False):
    """What the compiler did with a function on one rank."""

    rank: Rank
    target: str
    fingerprint: str  # of all graphs
    graphs: tuple[CompiledGraph, ...] = ()
    break_sites: tuple[BreakSite, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    skipped_frames: tuple[SkippedFrame, ...] = ()
    collectives: tuple[GraphCollective, ...] = ()  # in the order of the graphs
    stages: tuple[StageTime, ...] = ()
    guards: tuple[FrameGuards, ...] = ()
    failure: str = ""  # what the function raised before it was done

    @property
    def num_graphs(self) -> int:
        """Graphs given to the backend, those of recompilations included."""
        return len(self.graphs)

    @property
    def num_break_sites(self) -> int:
        """Lines that break a graph, or prevent one from being captured."""
        return len(self.break_sites)

    @property
    def num_break_events(self) -> int:
        """Traces that stopped at one of them."""
        return sum(site.num_events for site in self.break_sites)

    @property
    def num_recompiles(self) -> int:
        """Compilations of something that had been compiled before."""
        return len(self.recompiles)

    @property
    def num_skipped_frames(self) -> int:
        """Functions that run eagerly."""
        return len(self.skipped_frames)

    @property
    def num_ops(self) -> int:
        """Ops of all graphs that compute something."""
        return sum(graph.num_ops for graph in self.graphs)


class Condition(StrEnum):
    """How a compiled function compares with eager execution."""

    FINE = "fine"
    MORE_ACCURATE = "more_accurate"  # it differs, and is nearer to double precision
    RNG = "rng"  # it differs in what is drawn at random, and in nothing else
    NONDETERMINISTIC = "nondeterministic"  # run again, it gives something else
    WRONG_RESULT = "wrong_result"
    NAN = "nan"  # NaN or infinity where the function has none, or none where it has
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    MISSING_ERROR = "missing_error"  # the function raises an error, and the compiled one returns
    DIFFERENT_ERROR = "different_error"  # both raise, and not the same
    CRASH = "crash"  # the process died
    HANG = "hang"

    @property
    def is_bad(self) -> bool:
        """Whether the user should act on it."""
        return self not in (Condition.FINE, Condition.MORE_ACCURATE, Condition.RNG)


class Stage(StrEnum):
    """The stages of the compiler, in order."""

    DYNAMO = "dynamo"
    AOT = "aot"
    DECOMPOSITION = "decomposition"
    PARTITION = "partition"
    BACKEND = "backend"


class Deviation(Record, frozen=True, kw_only=True, gc=False):
    """The error of one tensor, relative to the magnitude of the exact result."""

    tensor: str  # output 0, gradient of input 2, …
    relative_rmse: float  # of the compiled result, against double precision
    eager_rmse: float  # of eager execution
    max_ulp: float  # largest distance from eager, in units of the last place
    worst_index: tuple[Natural, ...] = ()
    expected: float | None = None  # there, in double precision
    got: float | None = None


class SuspectOp(Record, frozen=True, kw_only=True, gc=False):
    """One op of the smallest program that still fails."""

    op: str  # torch.relu, Tensor.relu, aten.relu.default, …
    module: str | None = None
    source: Source | None = None


class Diagnosis(Record, frozen=True, kw_only=True, gc=False):
    """The result of `diagnose` for one function and one backend."""

    rank: Rank
    target: str
    backend: str
    condition: Condition
    fact: str  # a sentence
    num_graphs: Natural = 0
    num_queries: Natural = 0  # times that the backend was called
    graph: Natural | None = None  # the one that fails
    stage: Stage | None = None
    part: str = ""  # the pass, lowering or kernel of the backend
    phase: Phase | None = None  # forward or backward
    suspects: tuple[SuspectOp, ...] = ()
    is_minimal: bool = False  # without any one of the suspects it does not fail
    deviation: Deviation | None = None
    error: str = ""
    repro: str = ""  # path of the script
    script: str = ""  # its text, unless that is very long
    is_verified: bool = False  # a fresh process showed the same failure
    passing: str = ""  # the nearby variant that does not fail
    notes: tuple[str, ...] = ()  # what could not be found out, and why
