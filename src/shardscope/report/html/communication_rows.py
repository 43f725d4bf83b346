"""Data of the communication view: traffic by all that can be selected, and collectives.

`matrix_rows.py` makes its send matrix, `timeline_rows.py` its spans and marks of steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from shardscope.record import (
    SIMULATION_TIME,
    Collective,
    Group,
    Recording,
    count_ranks,
    format_ranks,
)
from shardscope.record.traffic import (
    TrafficTotals,
    count_traffic,
)
from shardscope.report.html.matrix_rows import make_matrix, split_matrix, summarize_matrix
from shardscope.report.html.name_lists import NameLists
from shardscope.report.html.page import (
    Calls,
    Communication,
    GroupRow,
    RankRow,
    Traffic,
)
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.html.timeline_rows import make_spans, make_step_marks, make_timings
from shardscope.report.model.clocks import has_clock
from shardscope.report.model.step_numbers import (
    StepNumbers,
    find_steps,
    list_step_times,
    number_steps,
)
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    TrafficSummary,
)
from shardscope.report.text.heading import describe_scope

MAX_CALLS = 30_000
_MAX_EXAMPLES = 8  # ranks named in a sentence


def make_communication(
    recording: Recording,
    summary: TrafficSummary,
    index: Index,
    served: ServedCalls | None = None,
) -> Communication | None:
    """Make the view, or None if no collective was recorded and no span was timed."""
    if not recording.collectives and not recording.spans:
        return None
    names, rank_sets = NameLists(recording), summary.rank_sets
    is_timed = has_clock(recording)
    chosen, left_out = _choose_calls(recording, summary)
    steps = find_steps(recording, is_timed=is_timed)
    numbers = number_steps(recording, steps)
    spans, spans_left_out = make_spans(recording)
    matrix, matrix_note = make_matrix(recording, summary)
    matrix_summary = summarize_matrix(recording, rank_sets, matrix)
    traffic, traffic_note = _make_traffic(rank_sets, names, index, numbers)
    if matrix is not None and not matrix_summary:
        matrix = split_matrix(matrix, recording, summary, names, index, numbers)
    if served is not None:
        served.name_all(names, index)
        served.number_steps(numbers, list_step_times(recording))
    return Communication(
        num_served=0 if served is None else served.num_calls,
        groups=tuple(map(_make_group, recording.groups)),
        ranks=_make_ranks(rank_sets) if recording.collectives else (),
        traffic=traffic,
        traffic_note=traffic_note,
        calls=_make_calls(chosen, names, index, numbers, is_timed=is_timed),
        steps=make_step_marks(steps, {call.rank for call in chosen}),
        step_word=numbers.word,
        num_steps=numbers.num_steps,
        spans=spans,
        timings=make_timings(recording),
        matrix=matrix,
        matrix_note=matrix_note,
        matrix_summary=matrix_summary,
        left_out=" ".join(filter(None, (left_out, spans_left_out))),
        scope=describe_scope(recording),
        clock=SIMULATION_TIME if recording.run.is_simulated and recording.spans else "",
        axes=names.axes.all(),
        kinds=names.kinds.all(),
        phases=names.phases.all(),
        causes=names.causes.all(),
        implicit_causes=tuple(sorted(names.implicit_causes)),
        dtypes=names.dtypes.all(),
    )


class ServedCalls(Protocol):
    """Collectives that a server sends when the page asks for them."""

    num_calls: int

    def name_all(self, names: NameLists, index: Index) -> None:
        """Add the names in all of them to the page's lists."""

    def number_steps(
        self, numbers: StepNumbers, times_by_rank: Mapping[int, Sequence[int]]
    ) -> None:
        """Number the steps of all of them, given when the spans of steps begin."""


def _choose_calls(
    recording: Recording, summary: TrafficSummary
) -> tuple[Sequence[Collective], str]:
    """Choose the collectives to list, within a limit, and a note on those that are left out."""
    calls, words = list(recording.collectives), [summary.note] if summary.note else []
    if summary.num_calls > MAX_CALLS:
        calls = [call for rank_set in summary.rank_sets for call in rank_set.calls]
        if len(calls) < summary.num_calls and not summary.note:
            words.append(_name_examples(summary.num_calls, summary.rank_sets))
    calls.sort(key=attrgetter("rank", "order"))
    if len(calls) > MAX_CALLS:
        words.append(f"Of {len(calls):,} calls, the first {MAX_CALLS:,} are listed.")
    return calls[:MAX_CALLS], " ".join(words)


def _name_examples(num_calls: int, rank_sets: tuple[IdenticalRanks, ...]) -> str:
    named = ", ".join(str(rank_set.ranks[0].first) for rank_set in rank_sets[:_MAX_EXAMPLES])
    num_more = len(rank_sets) - _MAX_EXAMPLES
    more = f" and {num_more:,} more" if num_more > 0 else ""
    word = "rank" if len(rank_sets) == 1 else "ranks"
    return (
        f"Of {num_calls:,} collectives, these are those of {word} {named}{more}: "
        "every other rank issued the same collectives as one of these."
    )


def _make_group(group: Group) -> GroupRow:
    return GroupRow(
        name=group.name,
        ranks=format_ranks(group.ranks),
        num_ranks=group.num_ranks,
        axis=group.axis or "",
        backend=group.backend,
    )


def _make_ranks(rank_sets: tuple[IdenticalRanks, ...]) -> tuple[RankRow, ...]:
    return tuple(
        RankRow(
            ranks=format_ranks(rank_set.ranks),
            example=rank_set.calls[0].rank if rank_set.calls else rank_set.ranks[0].first,
            num_ranks=count_ranks(rank_set.ranks),
        )
        for rank_set in rank_sets
    )


_MAX_TRAFFIC_ROWS = 30_000


class _TrafficKey(NamedTuple):
    """What the collectives of a row have in common, as positions."""

    rank_set: int
    axis: int
    kind: int
    phase: int
    owner: int
    cause: int
    source: int
    dtype: int
    step: int


_TrafficRows = dict[_TrafficKey, TrafficTotals]
_ChangeKey = Callable[[_TrafficKey], _TrafficKey]

# What rows are merged over if there are too many, in this order: the field, and its name in a note.
_MERGES = {"step": "steps", "dtype": "dtypes", "source": "source lines"}


def _make_traffic(
    rank_sets: tuple[IdenticalRanks, ...], names: NameLists, index: Index, numbers: StepNumbers
) -> tuple[Traffic, str]:
    """Sum collectives by all that can be selected, and a note on what is merged to fit a page."""
    rows: _TrafficRows = defaultdict(TrafficTotals)
    for number, rank_set in enumerate(rank_sets):
        for call in rank_set.calls:
            key = _TrafficKey(
                rank_set=number,
                axis=names.axis(call),
                kind=names.kinds.at(call.kind),
                phase=names.phases.at(call.phase),
                owner=index.module(call.owner),
                cause=names.cause(call.cause),
                source=index.source(call.source),
                dtype=names.dtypes.at(call.dtype),
                step=numbers.find(call.rank, call.order),
            )
            rows[key] += count_traffic(call)
    rows, note = _merge_rows(rows, len(rank_sets))
    columns = dict(zip(_TrafficKey._fields, zip(*rows, strict=True), strict=False))
    if not numbers.word:
        columns["step"] = ()
    return Traffic(
        **columns,
        count=tuple(totals.count for totals in rows.values()),
        input_bytes=tuple(totals.input_bytes for totals in rows.values()),
        wire_bytes=tuple(totals.wire_bytes for totals in rows.values()),
    ), note


def _merge_rows(rows: _TrafficRows, num_rank_sets: int) -> tuple[_TrafficRows, str]:
    """Merge rows until they fit a page; sums by rank, axis, kind and phase stay exact."""
    merged = []
    for field, words in _MERGES.items():
        is_constant = len({getattr(key, field) for key in rows}) < 2
        if len(rows) > _MAX_TRAFFIC_ROWS and not is_constant:
            rows = _merge_field(rows, field)
            merged.append(words)
    note = f"Too many to select {' or '.join(merged)}. " if merged else ""
    if len(rows) <= _MAX_TRAFFIC_ROWS:
        return rows, note.strip()
    sizes = Counter(key.rank_set for key in rows)
    sent: Counter[int] = Counter()
    for key, totals in rows.items():
        sent[key.rank_set] += totals.wire_bytes
    num_rows, detailed = 0, set()
    for rank_set, _ in sent.most_common():
        num_rows += sizes[rank_set]
        if num_rows > _MAX_TRAFFIC_ROWS:
            break
        detailed.add(rank_set)
    rows = _sum_rows(
        rows,
        lambda key: key if key.rank_set in detailed else key._replace(owner=NOWHERE, cause=NOWHERE),
    )
    return rows, note + (
        f"Figures of modules and causes are of the {len(detailed):,} of {num_rank_sets:,} sets of "
        "identical ranks that send most."
    )


def _merge_field(rows: _TrafficRows, field: str) -> _TrafficRows:
    return _sum_rows(rows, lambda key: key._replace(**{field: NOWHERE}))


def _sum_rows(rows: _TrafficRows, change: _ChangeKey) -> _TrafficRows:
    sums: _TrafficRows = defaultdict(TrafficTotals)
    for key, totals in rows.items():
        sums[change(key)] += totals
    return sums


def _make_calls(
    calls: Sequence[Collective],
    names: NameLists,
    index: Index,
    numbers: StepNumbers,
    *,
    is_timed: bool,
) -> Calls:
    return Calls(
        rank=tuple(call.rank for call in calls),
        order=tuple(call.order for call in calls),
        group=tuple(names.groups.find(call.group) for call in calls),
        kind=tuple(names.kinds.at(call.kind) for call in calls),
        axis=tuple(map(names.axis, calls)),
        phase=tuple(names.phases.at(call.phase) for call in calls),
        owner=tuple(index.module(call.owner) for call in calls),
        trigger=tuple(index.module(call.trigger) for call in calls),
        cause=tuple(names.cause(call.cause) for call in calls),
        source=tuple(index.source(call.source) for call in calls),
        dtype=tuple(names.dtypes.at(call.dtype) for call in calls),
        input_bytes=tuple(call.input_bytes for call in calls),
        output_bytes=tuple(call.output_bytes for call in calls),
        wire_bytes=tuple(call.wire_bytes for call in calls),
        start_ns=tuple(call.start_ns or 0 for call in calls) if is_timed else (),
        step=tuple(numbers.find(call.rank, call.order) for call in calls) if numbers.word else (),
    )
