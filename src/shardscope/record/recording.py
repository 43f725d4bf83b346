"""The records of a run, which every instrument writes and every renderer reads."""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from importlib import import_module
from typing import Any

from msgspec.structs import astuple

from shardscope.drawing import draw_inline, draw_page
from shardscope.record.base import Axis, CollectiveKind, Phase, Record, Source
from shardscope.record.check_records import Check
from shardscope.record.compiler_records import Diagnosis, Explanation
from shardscope.record.hang_records import HangAnalysis
from shardscope.record.parallel_records import Parallelization, Parity
from shardscope.record.profile_records import MemoryProfile, Span, SpanBegin
from shardscope.record.ranks import Natural, NumRanks, Rank, RankSpan, count_ranks, intersect_ranks
from shardscope.record.sharding_records import Coverage, TensorLayout
from shardscope.record.tensor_types import InferredTypes
from shardscope.record.text import escape_controls
from shardscope.record.value_records import RunComparison, ValueSample

_MAX_NAME, _MAX_COUNTS = 30, 5  # of what a representation shows
FORMAT = "shardscope.recording"
SCHEMA = 2

# gc=False throughout: records are frozen and so cannot refer to themselves, and the collector
# would spend most of the time it takes to load a million of them on looking.


class Severity(StrEnum):
    """How serious a finding is."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class RunInfo(Record, frozen=True, kw_only=True, gc=False):
    """Which run this is. `ranks` are the ranks whose records are in this recording.

    `num_forwards` is how often the model ran forward while it was traced, None where that was not
    counted: figures of collectives are of all of these together. `device_type` is the device that
    a simulation stands for ("cuda" also without a GPU), or that of the process group; None where
    there is neither. `skipped_checks` are those of an audit that had nothing to work on: "ties" was
    given no audit of the model before sharding, "step" no step to run. `ranks_per_node` is how many
    ranks share a node, None where that is not known or nodes differ.
    """

    torch_version: str
    shardscope_version: str
    world_size: NumRanks
    ranks: tuple[RankSpan, ...]
    axes: tuple[Axis, ...] = ()
    is_simulated: bool = False
    command: str = ""
    instruments: tuple[str, ...] = ()  # that made it: trace, audit, coverage, memory, …
    num_forwards: Natural | None = None
    device_type: str | None = None
    skipped_checks: tuple[str, ...] = ()
    ranks_per_node: NumRanks | None = None


class Group(Record, frozen=True, kw_only=True, gc=False):
    """A process group. `name` is readable and the same on every rank: `tp[0-7]`."""

    name: str
    torch_name: str
    ranks: tuple[RankSpan, ...]
    num_ranks: Natural
    axis: str | None = None
    backend: str = ""


class Parameter(Record, frozen=True, kw_only=True, gc=False):
    """A parameter or buffer of a module on one rank.

    All names but `name` are set by an audit and are full names. `live_name` is that in the wrapped
    model (`_orig_mod.layers.0.weight`), `checkpoint_key` its key in a state dict for saving, None
    if it is not saved. Tied tensors share an `alias_group`, which is the clean name of the first of
    them. `fsdp_group` is the module whose FSDP group manages it, `rule` the rule of the plan that
    matched it. Bytes are None where they were not recorded.

    `is_annotated` means that the placements come from an annotation of spmd_types. Besides those of
    DTensor they are `Invariant` (replicated, and so is the gradient) and `Varying` (different on
    each rank in an unknown way: `shape` is then that of this rank).
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    is_trainable: bool = True
    is_buffer: bool = False
    live_name: str | None = None
    checkpoint_key: str | None = None
    fsdp_group: str | None = None
    alias_group: str | None = None
    rule: str | None = None
    global_bytes: Natural | None = None
    local_bytes: Natural | None = None
    is_annotated: bool = False


class MarkKind(StrEnum):
    """A transformation of a module: parallel, compiled or checkpointed."""

    FULLY_SHARD = "fully_shard"  # FSDP2
    FSDP1 = "fsdp1"
    DDP = "ddp"
    TENSOR_PARALLEL = "tensor_parallel"
    COMPILED = "compiled"
    CHECKPOINTED = "checkpointed"


class Mark(Record, frozen=True, kw_only=True, gc=False):
    """How a module was wrapped or sharded; `detail` is the style, policy or strategy.

    `options` are those of an FSDP group that differ from torch's default, by the names of the
    methods that set them and of `fully_shard`'s arguments: `gradient_divide_factor=1.0`.
    """

    kind: MarkKind
    detail: str = ""
    axes: tuple[str, ...] = ()
    num_parameters: Natural | None = None  # that an FSDP or DDP group manages
    options: tuple[str, ...] = ()


class Module(Record, frozen=True, kw_only=True, gc=False):
    """One module and its own parameters; `ranks` hold it in exactly this form.

    The root's name is the empty string. `aliases` are further names of a shared module.
    """

    name: str
    type: str
    ranks: tuple[RankSpan, ...]
    parameters: tuple[Parameter, ...] = ()
    aliases: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


class Redistribute(Record, frozen=True, kw_only=True, gc=False, tag="redistribute"):
    """DTensor changed the placements of a tensor.

    `asked_by` is the op that required it (`aten.mm.default`) or the call that requested it
    (`RowwiseParallel`, `DTensor.full_tensor`); `is_implicit` means that it appears nowhere in the
    program.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    asked_by: str
    is_implicit: bool


class FullyShard(Record, frozen=True, kw_only=True, gc=False, tag="fully_shard"):
    """FSDP gathered parameters (`unshard`) or reduced gradients (`reduce`, `all_reduce`)."""

    action: str
    num_parameters: Natural


class BucketReduce(Record, frozen=True, kw_only=True, gc=False, tag="ddp_bucket"):
    """DDP reduced a bucket of gradients; `bucket` is None where the bucket is not known."""

    bucket: Natural | None
    parameters: tuple[str, ...]


class Call(Record, frozen=True, kw_only=True, gc=False, tag="call"):
    """The program called a collective itself, through `api`."""

    api: str


class Compiled(Record, frozen=True, kw_only=True, gc=False, tag="compiled"):
    """A graph made by torch.compile issued it."""

    graph: str  # "forward" or "backward": which of the two graphs of a compiled function


class SpmdCall(Record, frozen=True, kw_only=True, gc=False, tag="spmd_types"):
    """The program called a function of spmd_types, which changed a tensor's type along `axis`.

    `before` and `after` are types: R (replicate), I (invariant), V (varying), P (partial) or S(i)
    (sharded along dim i). `backward_of` is the function whose backward called it, None in forward.
    """

    function: str  # all_reduce, redistribute, …
    axis: str | None
    before: str
    after: str
    backward_of: str | None = None


Cause = Redistribute | FullyShard | BucketReduce | Call | Compiled | SpmdCall


class Collective(Record, frozen=True, kw_only=True, gc=False):
    """One collective as one rank issued it."""

    rank: Rank
    order: Natural  # position among all collectives of this rank
    group: str  # key into Recording.groups
    group_order: Natural  # position among this rank's collectives in its group
    kind: CollectiveKind
    op: str  # torch's own name for it: c10d.allreduce_, _c10d_functional.all_reduce, ...
    num_ranks: Natural
    axis: str | None
    dtype: str
    num_tensors: Natural
    input_bytes: Natural  # payload of this rank's input, logical bytes (not storage bytes)
    output_bytes: Natural  # payload of this rank's output
    wire_bytes: Natural  # what this rank sends if the group runs a ring
    phase: Phase
    owner: str | None  # module it belongs to; "" is the root, None is no module
    trigger: str | None  # module that was running
    cause: Cause | None = None
    source: Source | None = None
    reduce_op: str | None = None
    peer: Rank | None = None  # global rank of the root, sender or receiver
    thread: str = ""
    start_ns: Natural | None = None  # host clock since the recording began; simulations have none
    returned_ns: Natural | None = None  # the same clock when the call had returned, if known


class Finding(Record, frozen=True, kw_only=True, gc=False):
    """A problem that was detected, with a remedy.

    What it costs is of one rank, the one that it costs most; None means not known.
    `num_collectives` and `sent_bytes` are the collectives that it causes and their wire bytes,
    `memory_bytes` the memory that it takes, or that its remedy saves at most.
    """

    rule: str
    severity: Severity
    subject: str
    fact: str
    remedy: str
    rank: Rank | None = None
    source: Source | None = None
    num_collectives: Natural | None = None
    sent_bytes: Natural | None = None
    memory_bytes: Natural | None = None


class Gap(Record, frozen=True, kw_only=True, gc=False):
    """Something that could not be attributed.

    `is_loss` means that records of `rank` (of any rank, if it is None) were lost: what is missing
    from its recording may have happened.
    """

    place: str
    fact: str
    rank: Rank | None = None
    is_loss: bool = False


class Stop(Record, frozen=True, kw_only=True, gc=False):
    """Where a rank's recording stops early. A rank that left its trace normally has none.

    `error` is the type and the first line of the exception that ended the trace, or None if the
    stream just stops, because the rank was killed or is still running. `is_gapless` says that every
    collective the rank issued until then is in the recording.
    """

    rank: Rank
    error: str | None = None
    open_spans: tuple[SpanBegin, ...] = ()  # phases that were entered and not left
    is_gapless: bool = False


class RankProcess(Record, frozen=True, kw_only=True, gc=False):
    """The process that ran as a rank.

    `started_unix_ns` is the host's time of day when the recording began, so that times of ranks can
    be compared as far as the clocks of their hosts agree.
    """

    rank: Rank
    host: str = ""
    pid: Natural | None = None
    started_unix_ns: Natural | None = None


class DroppedCollectives(Record, frozen=True, kw_only=True, gc=False):
    """Collectives that a rank issued before the first that is recorded.

    A stream of limited size keeps only the newest. All of one kind in one group are one record;
    of sends and receives, those with one peer.
    """

    rank: Rank
    group: str  # key into Recording.groups
    kind: CollectiveKind
    num_collectives: Natural
    input_bytes: Natural
    wire_bytes: Natural
    peer: Rank | None = None  # of sends and receives, the other rank; None where it was any


_SINGULARS = {
    "processes": "process",
    "checks": "check",
    "groups": "group",
    "modules": "module",
    "collectives": "collective",
    "findings": "finding",
    "gaps": "gap",
    "stops": "stop",
    "spans": "span",
    "layouts": "layout",
    "diagnoses": "diagnosis",
    "explanations": "explanation",
    "values": "value",
    "comparisons": "comparison",
    "hangs": "hang",
}


class Recording(Record, frozen=True, kw_only=True, gc=False):
    """Everything that was recorded about one run, of one rank or of many."""

    run: RunInfo
    groups: tuple[Group, ...] = ()
    modules: tuple[Module, ...] = ()
    collectives: tuple[Collective, ...] = ()
    findings: tuple[Finding, ...] = ()
    gaps: tuple[Gap, ...] = ()
    stops: tuple[Stop, ...] = ()
    spans: tuple[Span, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    memory: tuple[MemoryProfile, ...] = ()
    layouts: tuple[TensorLayout, ...] = ()
    parity: tuple[Parity, ...] = ()
    types: tuple[InferredTypes, ...] = ()
    parallel: tuple[Parallelization, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    values: tuple[ValueSample, ...] = ()
    comparisons: tuple[RunComparison, ...] = ()
    processes: tuple[RankProcess, ...] = ()
    checks: tuple[Check, ...] = ()
    hangs: tuple[HangAnalysis, ...] = ()
    dropped: tuple[DroppedCollectives, ...] = ()
    format: str = FORMAT
    schema: int = SCHEMA

    def __repr__(self) -> str:
        """The root module, mesh, ranks and instruments, and the number of records, in one line."""
        run = self.run
        root = next((module.type for module in self.modules if not module.name), "")
        mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in run.axes)
        ranks = f"{count_ranks(run.ranks):,} of {run.world_size:,} ranks"
        names = [root, mesh, ranks, "simulated" * run.is_simulated, "+".join(run.instruments)]
        facts = ", ".join(escape_controls(name[:_MAX_NAME]) for name in names if name)
        counts = [
            f"{len(value):,} {_SINGULARS.get(field, field) if len(value) == 1 else field}"
            for field, value in zip(self.__struct_fields__, astuple(self), strict=True)
            if isinstance(value, tuple) and value
        ]
        more = ["…"] if len(counts) > _MAX_COUNTS else []
        return f"Recording({facts}: {', '.join(counts[:_MAX_COUNTS] + more) or 'empty'})"

    def html(self) -> str:
        """Render the recording as one HTML file that opens offline, as `shardscope report` does.

        Examples:
            >>> Path("report.html").write_text(trace.recording.html(), encoding="utf-8")
        """
        return draw_page(self)

    def _repr_html_(self) -> str:
        """The same, for notebooks."""
        return draw_inline(self)

    def to_arrow(self, table: str = "collectives") -> Any:
        """Make a `pyarrow.Table` of one of the recording's tables.

        Args:
            table: Its name; `shardscope query --tables` lists all tables and their columns.

        Examples:
            >>> recording.to_arrow().group_by("axis").aggregate([("wire_bytes", "sum")])
        """
        return _import_arrow().make_arrow(self, table)

    def to_pandas(self, table: str = "collectives") -> Any:
        """Make a `pandas.DataFrame` of one of the recording's tables.

        Args:
            table: Its name; `shardscope query --tables` lists all tables and their columns.

        Examples:
            >>> recording.to_pandas("parameters").groupby("dtype")["local_bytes"].sum()
        """
        return _import_arrow().make_pandas(self, table)

    def to_polars(self, table: str = "collectives") -> Any:
        """Make a `polars.DataFrame` of one of the recording's tables.

        Args:
            table: Its name; `shardscope query --tables` lists all tables and their columns.

        Examples:
            >>> recording.to_polars().group_by("axis", "phase").agg(polars.col("wire_bytes").sum())
        """
        return _import_arrow().make_polars(self, table)


def _import_arrow() -> Any:
    """The module that makes tables of recordings; it imports this one."""
    return import_module("shardscope.record.arrow")


def list_calls_by_group(recording: Recording) -> dict[str, dict[int, list[Collective]]]:
    """Each group in which a recorded rank issued a collective: its recorded ranks and their calls.

    A recorded rank of such a group that issued nothing in it has an empty list.
    """
    calls: dict[str, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for call in recording.collectives:
        calls[call.group][call.rank].append(call)
    for group in recording.groups:
        if group.name in calls:
            for rank in intersect_ranks(recording.run.ranks, group.ranks):
                calls[group.name].setdefault(rank, [])
    return calls


def describe_cause(cause: Cause | None) -> str:
    """Describe a cause in a few words; causes with the same words are counted together.

    Args:
        cause: The cause of a collective, or None.

    Examples:
        >>> describe_cause(collective.cause)
    """
    match cause:
        case Redistribute(before=before, after=after, asked_by=asked_by, is_implicit=is_implicit):
            move = f"redistribution {', '.join(before)} → {', '.join(after)}"
            op = asked_by.removesuffix(".default")
            return f"implicit {move}, required by {op}" if is_implicit else f"{move} for {op}"
        case FullyShard(action=action):
            return f"FSDP {action}"
        case BucketReduce():
            return "DDP gradient bucket"
        case Call(api=api):
            return f"call of {api}"
        case Compiled(graph=graph):
            return f"compiled graph {graph}"
        case SpmdCall(function=function, axis=axis, before=before, after=after):
            where = "" if axis is None else f" on {axis}"
            dual = "" if cause.backward_of is None else f", backward of {cause.backward_of}"
            return f"spmd_types {function} {before} → {after}{where}{dual}"
    return "unknown cause"


def name_axis(call: Collective, world_size: int) -> str:
    """The mesh axis of a collective, or the number of ranks of its group if it has no axis.

    Args:
        call: The collective.
        world_size: The number of ranks of the world.

    Examples:
        >>> name_axis(collective, recording.run.world_size)
    """
    if call.axis is not None:
        return call.axis
    return "world" if call.num_ranks == world_size else f"{call.num_ranks} ranks"
