"""The page's data: a record for each view, with modules and communication."""

from __future__ import annotations

from msgspec import Struct

from shardscope.record import Axis
from shardscope.report.html.page_figures import Figure, FigureParts
from shardscope.report.html.page_modules import Modules
from shardscope.report.html.page_overview import EmptyView, Term, VerdictItem
from shardscope.report.html.page_views import (
    Compiler,
    LevelCoverage,
    MemoryCurve,
    PeakRow,
    Proof,
    ShardingTable,
)


class RankRow(Struct, frozen=True, kw_only=True):
    """Ranks that issued the same collectives; `Traffic` has their figures."""

    ranks: str
    example: int  # the first of them
    num_ranks: int


class Traffic(Struct, frozen=True, kw_only=True):
    """Collectives in columns: a row for those of a rank that differ only in the last three.

    Ranks that issued the same collectives share their rows, which have the figures of one of them
    and are in the order in which it first issued such a collective. Every sum of collectives on the
    page is a sum of these rows. In a very large recording -1 stands for an owner, cause, source,
    dtype or step that was merged with others; `Communication.traffic_note` says which.
    """

    rank_set: tuple[int, ...] = ()  # position in Communication.ranks
    axis: tuple[int, ...] = ()
    kind: tuple[int, ...] = ()
    phase: tuple[int, ...] = ()
    owner: tuple[int, ...] = ()
    cause: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    dtype: tuple[int, ...] = ()
    step: tuple[int, ...] = ()  # from 1, 0 for none; empty if nothing distinguishes steps
    count: tuple[int, ...] = ()
    input_bytes: tuple[int, ...] = ()
    wire_bytes: tuple[int, ...] = ()


class GroupRow(Struct, frozen=True, kw_only=True):
    """A process group."""

    name: str
    ranks: str
    num_ranks: int
    axis: str
    backend: str


class Calls(Struct, frozen=True, kw_only=True):
    """Collectives in columns, by rank and then in the order in which it issued them.

    `start_ns` is empty where the run's clock was not recorded, as in a simulation, and `step` where
    nothing distinguishes steps.
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
    step: tuple[int, ...] = ()  # from 1; 0 for none


class StepMark(Struct, frozen=True, kw_only=True):
    """Where a step begins on a rank: `order` is that of its first collective."""

    rank: int
    name: str  # `step 2`; `forward 2` if only forward passes are known
    order: int
    start_ns: int  # 0 where the run's clock was not recorded


class Spans(Struct, frozen=True, kw_only=True):
    """Named time spans in columns."""

    rank: tuple[int, ...] = ()
    name: tuple[int, ...] = ()  # position in `names`
    start_ns: tuple[int, ...] = ()
    duration_ns: tuple[int, ...] = ()
    depth: tuple[int, ...] = ()
    device: tuple[int, ...] = ()  # position in `names`
    names: tuple[str, ...] = ()


class RankTiming(Struct, frozen=True, kw_only=True):
    """Sum of the spans of one name and clock on one rank."""

    rank: int
    count: int
    total_ns: int
    self_ns: int  # excluding spans within them
    max_ns: int  # of one span


class Timing(Struct, frozen=True, kw_only=True):
    """Sum of the spans of one name and clock, on the rank where they took longest.

    `ranks` has the sums of each rank; it is empty if there are too many for a page.
    """

    name: str
    device: str
    slowest: int  # that rank
    num_ranks: int  # that have such spans
    count: int
    total_ns: int
    self_ns: int  # excluding spans within them
    max_ns: int  # of one span
    ranks: tuple[RankTiming, ...] = ()


class MatrixParts(Struct, frozen=True, kw_only=True):
    """Bytes of the pairs of a matrix by all that can be selected, in columns.

    `merged` names what rows do not distinguish, because there would be too many: these columns are
    -1 in all rows.
    """

    pair: tuple[int, ...] = ()  # position in the columns of the matrix
    axis: tuple[int, ...] = ()
    kind: tuple[int, ...] = ()
    phase: tuple[int, ...] = ()
    owner: tuple[int, ...] = ()
    cause: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    dtype: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    num_bytes: tuple[int, ...] = ()
    merged: tuple[str, ...] = ()  # of axis, phase, owner, cause, source, dtype, step


class Matrix(Struct, frozen=True, kw_only=True):
    """Bytes sent from rank to rank by ring algorithms; `sender` and `receiver` are positions."""

    ranks: tuple[int, ...]
    sender: tuple[int, ...]
    receiver: tuple[int, ...]
    num_bytes: tuple[int, ...]
    parts: MatrixParts | None = None  # None if there are too many, or if a sentence says as much


class Communication(Struct, frozen=True, kw_only=True):
    """All collectives and their causes. Other fields are positions in the lists of names."""

    axes: tuple[str, ...]
    kinds: tuple[str, ...]
    phases: tuple[str, ...]
    causes: tuple[str, ...]
    dtypes: tuple[str, ...]
    groups: tuple[GroupRow, ...]
    ranks: tuple[RankRow, ...]  # by their first rank
    traffic: Traffic = Traffic()
    traffic_note: str = ""  # what its rows do not distinguish, where there are too many
    implicit_causes: tuple[int, ...] = ()  # of redistributions that no plan and no call asked for
    calls: Calls = Calls()
    steps: tuple[StepMark, ...] = ()
    step_word: str = ""  # what steps are: `step`, or `forward` passes; empty if not known
    num_steps: int = 0
    num_served: int = 0  # collectives that the page's server sends, more than are in `calls`
    spans: Spans = Spans()
    timings: tuple[Timing, ...] = ()  # the longest come first
    matrix: Matrix | None = None
    matrix_note: str = ""  # why there is none, or what it leaves out
    matrix_summary: str = ""  # the sentence that says as much as the matrix; empty if none does
    left_out: str = ""  # which calls are not in `calls`, where there are too many
    scope: str = ""  # what the figures cover: `over 2 forward passes, rank 0 of 8, simulated`
    clock: str = ""  # caveat on the times of spans: `time of the simulation, not of a run`


class ChangeRow(Struct, frozen=True, kw_only=True):
    """A difference; `before` and `after` are texts, `delta` is what the column sorts by."""

    area: int
    status: str  # added, gone, changed
    module: int  # of the second recording; -1 if it has no such module
    path: str  # folded: `layers.{0…31}.attn`
    what: str
    before: str
    after: str
    delta: float  # after minus before where they are numbers; a missing value counts as zero
    is_worse: bool | None = None  # None if neither is better
    repeat: int = 1
    because: str = ""  # what led to it
    axis: str = ""  # of the collectives that it is about; empty if it is not about any
    kind: str = ""
    phase: str = ""
    ranks: str = ""  # that have it; empty for all that were compared
    source: int = -1  # of the second recording


class AreaSum(Struct, frozen=True, kw_only=True):
    """Number of changes in one area, and its totals."""

    name: str  # of the area: collectives, bytes, graph breaks, …
    before: str
    after: str
    num_added: int
    num_gone: int
    num_changed: int


class Comparison(Struct, frozen=True, kw_only=True):
    """What changed from one recording to the next."""

    before: str  # name of the file, or title
    after: str
    areas: tuple[AreaSum, ...]
    changes: tuple[ChangeRow, ...]
    notes: tuple[str, ...] = ()  # what could not be compared, and how the rest was
    left_out: int = 0  # changes that are not listed


class EarlierCollectives(Struct, frozen=True, kw_only=True):
    """Collectives of the earlier recording, by its own lists of names.

    Owners are positions in `EarlierRecording.modules`; source lines are not compared.
    """

    axes: tuple[str, ...]
    kinds: tuple[str, ...]
    phases: tuple[str, ...]
    causes: tuple[str, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[RankRow, ...]
    traffic: Traffic
    num_steps: int = 0


class EarlierCurve(Struct, frozen=True, kw_only=True):
    """Memory of identical ranks in the earlier recording, as in `MemoryCurve`."""

    ranks: str
    kinds: tuple[str, ...]
    peak_bytes: int
    at_peak: tuple[PeakRow, ...]
    first_peak_bytes: int | None = None
    reserved_bytes: int | None = None
    needed_bytes: int | None = None


class EarlierRecording(Struct, frozen=True, kw_only=True):
    """What the page sums of the recording that it is compared with, when something is selected.

    `modules` are names of its modules: those of the page's modules where both recordings have them.
    `figure_parts` are those of `Page.earlier_figures`.
    """

    modules: tuple[str, ...] = ()
    figure_parts: FigureParts = FigureParts()
    communication: EarlierCollectives | None = None
    memory: tuple[EarlierCurve, ...] = ()


FORMAT = "shardscope.page"
SCHEMA = 6


class RunFacts(Struct, frozen=True, kw_only=True):
    """What ran."""

    title: str  # of the page: `Llama on dp=128 × tp=8`
    mesh: tuple[Axis, ...]
    world_size: int
    ranks: str  # `all 1,024 ranks`
    world: str  # simulated, real process group, one process
    torch_version: str
    shardscope_version: str
    command: str
    instruments: tuple[str, ...]
    checks: str  # `checked by: trace; not run: audit, coverage`
    no_gaps: str  # the sentence shown if there are no gaps
    scope: str  # what the figures of collectives cover: `rank 0 of 8, over 2 forward passes`
    num_forwards: int | None  # of the model; None if they were not counted
    file: str = ""  # of the recording; empty if it is not known
    findings_note: str = ""  # why findings may be missing


class Fact(Struct, frozen=True, kw_only=True):
    """A figure of the overview; `view` is the view that it links to."""

    label: str
    value: str
    note: str = ""
    view: str = ""
    measure: str = ""  # the column of `Traffic` that it sums, which then follows the selection


class FindingItem(Struct, frozen=True, kw_only=True):
    """A finding; the most severe come first, and of these the most expensive."""

    rule: str
    severity: str  # error, warning, info
    subject: str
    fact: str
    remedy: str
    explanation: str = ""  # of the rule
    documentation: str = ""  # path of the rule's page
    cost: str = ""  # `1.20 GiB sent (12%) in 64 collectives`; empty if it is not known
    cost_bytes: int | None = None  # the same, for sorting and bars
    ranks: str = ""  # `rank 0`, `ranks 0-7`; empty if it does not concern particular ranks
    count: int = 1  # findings that are identical except for their layer or rank
    module: int = -1
    modules: tuple[int, ...] = ()  # of all of them
    source: int = -1


class GapItem(Struct, frozen=True, kw_only=True):
    """Something that was not observed or not understood."""

    place: str
    fact: str
    ranks: str = ""  # `rank 0`, `ranks 0-7`; empty if it does not concern particular ranks
    is_loss: bool = False


class Sources(Struct, frozen=True, kw_only=True):
    """Lines of the user's program, in columns."""

    file: tuple[str, ...] = ()
    line: tuple[int, ...] = ()
    function: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


class Page(Struct, frozen=True, kw_only=True):
    """The data of one page. A view without data is None or empty."""

    run: RunFacts
    verdict: VerdictItem | None = None
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
    empty_views: tuple[EmptyView, ...] = ()
    terms: tuple[Term, ...] = ()
    figures: tuple[Figure, ...] = ()
    figure_parts: FigureParts = FigureParts()
    earlier_figures: tuple[Figure, ...] = ()  # of the recording it is compared with
    earlier: EarlierRecording | None = None
    format: str = FORMAT
    schema: int = SCHEMA
