"""The page's data: a record for each view, with modules and communication."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from shardscope.record import Axis, Recording
from shardscope.report.compare.changes import Area, AreaTotal, Change, Changes, Status, name_path
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.compare.facts import clean_names
from shardscope.report.html.page_modules import Modules
from shardscope.report.html.page_overview import EmptyView, Term, VerdictItem
from shardscope.report.html.page_views import (
    Compiler,
    LevelCoverage,
    MemoryCurve,
    Proof,
    ShardingTable,
)
from shardscope.report.text.style import shorten


class RankRow(Struct, frozen=True, kw_only=True):
    """Ranks that issued the same collectives; `Traffic` has their figures."""

    ranks: str
    example: int  # the first of them
    num_ranks: int


class Traffic(Struct, frozen=True, kw_only=True):
    """Collectives in columns: a row for those of a rank that differ only in the last three.

    Ranks that issued the same collectives share their rows, which have the figures of one of them
    and are in the order in which it first issued such a collective. Every sum of collectives on the
    page is a sum of these rows. In a very large recording -1 stands for an owner, cause, source
    or dtype that was merged with others; `Communication.traffic_note` says which.
    """

    rank_set: tuple[int, ...] = ()  # position in Communication.ranks
    axis: tuple[int, ...] = ()
    kind: tuple[int, ...] = ()
    phase: tuple[int, ...] = ()
    owner: tuple[int, ...] = ()
    cause: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    dtype: tuple[int, ...] = ()
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


class StepMark(Struct, frozen=True, kw_only=True):
    """Where a step begins on a rank: `order` is that of its first collective."""

    rank: int
    name: str  # `step 2`; `forward 2` if only forward passes can be told apart
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


class Timing(Struct, frozen=True, kw_only=True):
    """Sum of the spans of one name and clock, on the rank where they took longest."""

    name: str
    device: str
    slowest: int  # that rank
    num_ranks: int  # that have such spans
    count: int
    total_ns: int
    self_ns: int  # excluding spans within them
    max_ns: int  # of one span


class Matrix(Struct, frozen=True, kw_only=True):
    """Bytes sent from rank to rank by ring algorithms; `sender` and `receiver` are positions."""

    ranks: tuple[int, ...]
    sender: tuple[int, ...]
    receiver: tuple[int, ...]
    num_bytes: tuple[int, ...]


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
    num_served: int = 0  # collectives that the page's server sends, more than are in `calls`
    spans: Spans = Spans()
    timings: tuple[Timing, ...] = ()  # the longest come first
    matrix: Matrix | None = None
    matrix_note: str = ""  # why there is none, or what it leaves out
    matrix_summary: str = ""  # the sentence that says as much as the matrix; empty if none does
    left_out: str = ""  # which calls are not in `calls`, where there are too many
    scope: str = ""  # what the figures cover: `over 2 forward passes, rank 0 of 8, simulated`
    clock: str = ""  # caveat on the times of spans: `time of the simulation, not of a run`


_MAX_ROWS = 5_000  # the file must stay small, and more rows are not read
_MAX_TEXT = 400  # characters of a value


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


def build_comparison(
    before: Recording,
    after: Recording,
    modules: Mapping[str, int],
    *,
    titles: tuple[str, str] = ("before", "after"),
    changes: Changes | None = None,
) -> Comparison:
    """Compare `before` with the page's recording, whose modules have these positions.

    `changes` is the comparison, if it was made already.
    """
    changes = changes or compare(before, after, titles=titles)
    _, names = clean_names(before, after)
    positions_by_name = {names.clean(path): position for path, position in modules.items()}
    areas = changes.totals
    positions = {total.area: index for index, total in enumerate(areas)}
    return Comparison(
        before=changes.before,
        after=changes.after,
        areas=tuple(_sum_area(total, changes) for total in areas),
        changes=tuple(
            _make_row(row, positions[row.area], positions_by_name)
            for row in changes.rows[:_MAX_ROWS]
        ),
        notes=changes.notes,
        left_out=max(0, len(changes.rows) - _MAX_ROWS),
    )


def _sum_area(total: AreaTotal, changes: Changes) -> AreaSum:
    added, gone, changed = (changes.count(total.area, status) for status in Status)
    return AreaSum(
        name=_name(total.area),
        before=total.before,
        after=total.after,
        num_added=added,
        num_gone=gone,
        num_changed=changed,
    )


def _name(area: Area) -> str:
    return area.replace("-", " ")


def _make_row(row: Change, area: int, positions_by_name: Mapping[str, int]) -> ChangeRow:
    return ChangeRow(
        area=area,
        status=row.status,
        module=next(
            (positions_by_name[name] for name in row.modules if name in positions_by_name), -1
        ),
        path=name_path(row.path),
        what=shorten(row.what, _MAX_TEXT),
        before=shorten(row.show_before(), _MAX_TEXT) if row.before is not None else "",
        after=shorten(row.show_after(), _MAX_TEXT) if row.after is not None else "",
        delta=row.delta,
        is_worse=row.is_worse,
        repeat=row.repeat,
        because=shorten(row.because, _MAX_TEXT),
    )


FORMAT = "shardscope.page"
SCHEMA = 4


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
    source: int = -1


class GapItem(Struct, frozen=True, kw_only=True):
    """Something that was not observed or not understood."""

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


class Figure(Struct, frozen=True, kw_only=True):
    """A number of a view that can be compared with that of another page."""

    view: str
    group: str  # what is counted: `bytes sent per rank (ring estimate)`
    label: str  # `all_gather[tp]`
    unit: str  # bytes or count
    value: int


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
    earlier_figures: tuple[Figure, ...] = ()  # of the recording it is compared with
    format: str = FORMAT
    schema: int = SCHEMA
