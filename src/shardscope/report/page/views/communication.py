"""Collectives and their causes: sums, causes, and every call in columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import final

from shardscope.record import (
    SIMULATION_TIME,
    Collective,
    CollectiveKind,
    Group,
    Phase,
    Recording,
    count_ranks,
    describe_cause,
    format_ranks,
)
from shardscope.report.align import has_clock
from shardscope.report.causes import gather_reasons
from shardscope.report.heading import describe_scope
from shardscope.report.page.communication import (
    Calls,
    CauseRow,
    Communication,
    GroupRow,
    RankRow,
    Sum,
)
from shardscope.report.page.index import Index, Names
from shardscope.report.page.views.matrix import make_matrix
from shardscope.report.page.views.timings import make_spans, make_timings
from shardscope.report.traffic import Facet, RankClass, Tally, add_up, name_axis, tally

__all__ = ["make_communication"]

_MAX_CALLS = 30_000
_MAX_EXAMPLES = 8  # ranks named in a sentence


def make_communication(
    recording: Recording, classes: tuple[RankClass, ...], index: Index
) -> Communication | None:
    """None where no collective was recorded and nothing was timed."""
    if not recording.collectives and not recording.spans:
        return None
    names = _NameLists(recording)
    chosen, left_out = _choose_calls(recording, classes)
    spans, spans_left_out = make_spans(recording)
    matrix, matrix_note = make_matrix(recording)
    reasons = _make_reasons(recording, classes, names, index)
    return Communication(
        groups=tuple(map(_make_group, recording.groups)),
        ranks=_make_ranks(classes) if recording.collectives else (),
        sums=_make_sums(recording, classes, names),
        reasons=reasons,
        calls=_make_calls(chosen, names, index, is_timed=has_clock(recording)),
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


@final
class _NameLists:
    """The lists that columns point into."""

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
    recording: Recording, classes: tuple[RankClass, ...]
) -> tuple[Sequence[Collective], str]:
    """Those that there is room for, and a sentence on those that there is none for."""
    calls, words = list(recording.collectives), []
    if len(calls) > _MAX_CALLS:
        calls = [call for one in classes for call in one.calls]
        if len(calls) < len(recording.collectives):
            words.append(_name_examples(len(recording.collectives), classes))
    calls.sort(key=attrgetter("rank", "order"))
    if len(calls) > _MAX_CALLS:
        words.append(f"Of {len(calls):,} calls, the first {_MAX_CALLS:,} are listed.")
    return calls[:_MAX_CALLS], " ".join(words)


def _name_examples(num_calls: int, classes: tuple[RankClass, ...]) -> str:
    named = ", ".join(str(one.ranks[0].first) for one in classes[:_MAX_EXAMPLES])
    num_more = len(classes) - _MAX_EXAMPLES
    more = f" and {num_more:,} more" if num_more > 0 else ""
    word = "rank" if len(classes) == 1 else "ranks"
    return (
        f"Of {num_calls:,} collectives, these are those of {word} {named}{more}: "
        "each other rank issued the same as one of these."
    )


def _make_group(group: Group) -> GroupRow:
    return GroupRow(
        name=group.name,
        ranks=format_ranks(group.ranks),
        num_ranks=group.num_ranks,
        axis=group.axis or "",
        backend=group.backend,
    )


def _make_ranks(classes: tuple[RankClass, ...]) -> tuple[RankRow, ...]:
    rows = []
    for one in classes:
        total = add_up(map(tally, one.calls))
        rows.append(
            RankRow(
                ranks=format_ranks(one.ranks),
                example=one.ranks[0].first,
                num_ranks=count_ranks(one.ranks),
                count=total.count,
                input_bytes=total.input_bytes,
                wire_bytes=total.wire_bytes,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.wire_bytes, -row.count, row.example)))


def _make_sums(
    recording: Recording, classes: tuple[RankClass, ...], names: _NameLists
) -> tuple[Sum, ...]:
    busiest: dict[Facet, Tally] = {}
    for one in classes:
        sums: defaultdict[Facet, Tally] = defaultdict(Tally)
        for call in one.calls:
            axis = name_axis(call, recording.run.world_size)
            sums[Facet(call.phase, call.kind, axis)] += tally(call)
        for facet, said in sums.items():
            known = busiest.get(facet, Tally())
            busiest[facet] = max(known, said, key=lambda one: (one.wire_bytes, one.count))
    ranked = sorted(busiest.items(), key=lambda item: (-item[1].wire_bytes, item[0]))
    return tuple(
        Sum(
            axis=names.axes.at(facet.axis),
            kind=names.kinds.at(facet.kind),
            phase=names.phases.at(facet.phase),
            count=said.count,
            input_bytes=said.input_bytes,
            wire_bytes=said.wire_bytes,
        )
        for facet, said in ranked
    )


def _make_reasons(
    recording: Recording, classes: tuple[RankClass, ...], names: _NameLists, index: Index
) -> tuple[CauseRow, ...]:
    return tuple(
        CauseRow(
            words=names.causes.at(one.words),
            what=one.what,
            count=one.busiest.count,
            wire_bytes=one.busiest.wire_bytes,
            is_implicit=one.is_implicit,
            source=index.source(one.source),
            modules=tuple(dict.fromkeys(map(index.module, one.owners))),
        )
        for one in gather_reasons(recording, classes)
    )


def _make_calls(
    calls: Sequence[Collective], names: _NameLists, index: Index, *, is_timed: bool
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
