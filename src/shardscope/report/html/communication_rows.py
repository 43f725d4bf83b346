"""Data of the communication view: sums, causes, collectives, bytes between ranks and spans."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol, final

from shardscope.record import (
    SIMULATION_TIME,
    Collective,
    CollectiveKind,
    Group,
    Phase,
    Recording,
    Span,
    count_ranks,
    describe_cause,
    format_ranks,
)
from shardscope.record.recording import name_axis
from shardscope.report.html.page import (
    Calls,
    CauseRow,
    Communication,
    GroupRow,
    Matrix,
    RankRow,
    Spans,
    Sum,
    Timing,
)
from shardscope.report.html.page_index import Index, Names
from shardscope.report.model.clocks import has_clock
from shardscope.report.model.traffic_totals import (
    Facet,
    IdenticalRanks,
    TrafficSummary,
    TrafficTotals,
    count_traffic,
    describe_unknown,
    sum_sent_bytes,
    sum_traffic,
)
from shardscope.report.text.communication import gather_reasons
from shardscope.report.text.heading import describe_scope
from shardscope.report.text.phase_times import gather_phases

_MAX_SENDERS = 64
_MAX_RANKS = 256  # including receivers, which may have no records


def make_matrix(recording: Recording, summary: TrafficSummary) -> tuple[Matrix | None, str]:
    """Make the matrix of bytes between ranks, or None if there are too many, and a note on it."""
    if not recording.collectives:
        return None, ""
    if summary.num_senders > _MAX_SENDERS:
        return None, f"Not drawn: {summary.num_senders:,} ranks are too many to tell apart."
    traffic = sum_sent_bytes(recording, summary)
    if traffic is None:
        return None, "Not drawn: too many receiving ranks."
    ranks = sorted({rank for pair in traffic.sent for rank in pair})
    if len(ranks) > _MAX_RANKS:
        return None, f"Not drawn: what was sent went to {len(ranks):,} ranks."
    pairs = sorted(traffic.sent)
    matrix = Matrix(
        ranks=tuple(ranks),
        sender=tuple(bisect_left(ranks, sender) for sender, _ in pairs),
        receiver=tuple(bisect_left(ranks, receiver) for _, receiver in pairs),
        num_bytes=tuple(traffic.sent[pair] for pair in pairs),
    )
    return matrix, _describe(recording, traffic.num_unknown)


def _describe(recording: Recording, num_unknown: int) -> str:
    words = "Ring estimate: each rank sends to the next in its group."
    num_known, world_size = count_ranks(recording.run.ranks), recording.run.world_size
    if num_known < world_size:
        verb = "was" if num_known == 1 else "were"
        words += f" Only {num_known:,} of {world_size:,} ranks {verb} recorded: "
        words += "other rows are empty."
    if num_unknown:
        words += f" {describe_unknown(num_unknown)}."
    return words


_MAX_SPANS = 20_000


def make_spans(recording: Recording) -> tuple[Spans, str]:
    """Make spans by rank and time, the longest if there are too many, and a note on the rest."""
    spans, words = list(recording.spans), ""
    if len(spans) > _MAX_SPANS:
        words = f"Of {len(spans):,} timed spans, the {_MAX_SPANS:,} longest are drawn."
        spans = sorted(spans, key=lambda span: -span.duration_ns)[:_MAX_SPANS]
    spans.sort(key=attrgetter("rank", "start_ns", "depth"))
    return _make_columns(spans), words


def _make_columns(spans: list[Span]) -> Spans:
    names = Names()
    return Spans(
        rank=tuple(span.rank for span in spans),
        name=tuple(names.at(span.name) for span in spans),
        start_ns=tuple(span.start_ns for span in spans),
        duration_ns=tuple(span.duration_ns for span in spans),
        depth=tuple(span.depth for span in spans),
        device=tuple(names.at(span.device) for span in spans),
        names=names.all(),
    )


def make_timings(recording: Recording) -> tuple[Timing, ...]:
    """Sum spans by name and device, longest first."""
    return tuple(
        Timing(
            name=line.name,
            device=line.device,
            slowest=line.slowest.rank,
            num_ranks=len(line.totals),
            count=line.slowest.count,
            total_ns=line.slowest.total_ns,
            self_ns=line.slowest.self_ns,
            max_ns=line.over_ranks("max_ns").high,
        )
        for line in gather_phases(recording)
    )


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
    names = NameLists(recording)
    rank_sets = summary.rank_sets
    chosen, left_out = _choose_calls(recording, summary)
    spans, spans_left_out = make_spans(recording)
    matrix, matrix_note = make_matrix(recording, summary)
    cause_rows = _make_cause_rows(recording, rank_sets, names, index)
    calls = _make_calls(chosen, names, index, is_timed=has_clock(recording))
    if served is not None:
        served.name_all(names, index)
    return Communication(
        num_served=0 if served is None else served.num_calls,
        groups=tuple(map(_make_group, recording.groups)),
        ranks=_make_ranks(rank_sets) if recording.collectives else (),
        sums=_make_sums(recording, rank_sets, names),
        cause_rows=cause_rows,
        calls=calls,
        spans=spans,
        timings=make_timings(recording),
        matrix=matrix,
        matrix_note=matrix_note,
        left_out=" ".join(filter(None, (left_out, spans_left_out))),
        scope=describe_scope(recording),
        clock=SIMULATION_TIME if recording.run.is_simulated and recording.spans else "",
        axes=names.axes.all(),
        kinds=names.kinds.all(),
        phases=names.phases.all(),
        causes=names.causes.all(),
        dtypes=names.dtypes.all(),
    )


class ServedCalls(Protocol):
    """Collectives that a server sends when the page asks for them."""

    num_calls: int

    def name_all(self, names: NameLists, index: Index) -> None:
        """Add the names in all of them to the page's lists."""


@final
class NameLists:
    """Lists of names that columns refer to by position."""

    def __init__(self, recording: Recording) -> None:
        self.world_size = recording.run.world_size
        used = {call.kind for call in recording.collectives}
        self.axes = Names(axis.name for axis in recording.run.axes)
        self.kinds = Names(kind for kind in CollectiveKind if kind in used)
        self.phases = Names(Phase)
        self.causes = Names()
        self.dtypes = Names()
        self.groups = Names(group.name for group in recording.groups)

    def axis(self, call: Collective) -> int:
        return self.axes.at(name_axis(call, self.world_size))


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
    rows = []
    for rank_set in rank_sets:
        total = sum_traffic(map(count_traffic, rank_set.calls))
        rows.append(
            RankRow(
                ranks=format_ranks(rank_set.ranks),
                example=rank_set.ranks[0].first,
                num_ranks=count_ranks(rank_set.ranks),
                count=total.count,
                input_bytes=total.input_bytes,
                wire_bytes=total.wire_bytes,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.wire_bytes, -row.count, row.example)))


def _make_sums(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...], names: NameLists
) -> tuple[Sum, ...]:
    busiest: dict[Facet, TrafficTotals] = {}
    for rank_set in rank_sets:
        sums: defaultdict[Facet, TrafficTotals] = defaultdict(TrafficTotals)
        for call in rank_set.calls:
            axis = name_axis(call, recording.run.world_size)
            sums[Facet(call.phase, call.kind, axis)] += count_traffic(call)
        for facet, totals in sums.items():
            known = busiest.get(facet, TrafficTotals())
            busiest[facet] = max(
                known, totals, key=lambda totals: (totals.wire_bytes, totals.count)
            )
    ranked = sorted(busiest.items(), key=lambda item: (-item[1].wire_bytes, item[0]))
    return tuple(
        Sum(
            axis=names.axes.at(facet.axis),
            kind=names.kinds.at(facet.kind),
            phase=names.phases.at(facet.phase),
            count=totals.count,
            input_bytes=totals.input_bytes,
            wire_bytes=totals.wire_bytes,
        )
        for facet, totals in ranked
    )


def _make_cause_rows(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...], names: NameLists, index: Index
) -> tuple[CauseRow, ...]:
    return tuple(
        CauseRow(
            cause=names.causes.at(reason.words),
            what=reason.label,
            count=reason.busiest.count,
            wire_bytes=reason.busiest.wire_bytes,
            is_implicit=reason.is_implicit,
            source=index.source(reason.source),
            modules=tuple(dict.fromkeys(map(index.module, reason.owners))),
        )
        for reason in gather_reasons(recording, rank_sets)
    )


def _make_calls(
    calls: Sequence[Collective], names: NameLists, index: Index, *, is_timed: bool
) -> Calls:
    words: dict[object, int] = {}
    for call in calls:
        if call.cause not in words:
            words[call.cause] = names.causes.at(describe_cause(call.cause))
    return Calls(
        rank=tuple(call.rank for call in calls),
        order=tuple(call.order for call in calls),
        group=tuple(names.groups.find(call.group) for call in calls),
        kind=tuple(names.kinds.at(call.kind) for call in calls),
        axis=tuple(map(names.axis, calls)),
        phase=tuple(names.phases.at(call.phase) for call in calls),
        owner=tuple(index.module(call.owner) for call in calls),
        trigger=tuple(index.module(call.trigger) for call in calls),
        cause=tuple(words[call.cause] for call in calls),
        source=tuple(index.source(call.source) for call in calls),
        dtype=tuple(names.dtypes.at(call.dtype) for call in calls),
        input_bytes=tuple(call.input_bytes for call in calls),
        output_bytes=tuple(call.output_bytes for call in calls),
        wire_bytes=tuple(call.wire_bytes for call in calls),
        start_ns=tuple(call.start_ns or 0 for call in calls) if is_timed else (),
    )
