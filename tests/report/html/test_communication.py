"""Collectives on a page: columns, sums, causes, and traffic between ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sample_recordings import (
    make_collective,
    make_llama,
    make_ranks,
    make_recording,
    make_run,
    make_span,
)
from shardscope.record import (
    Axis,
    Call,
    Collective,
    CollectiveKind,
    Group,
    Module,
    Phase,
    RankSpan,
    Recording,
    Redistribute,
    Source,
)
from shardscope.report.html import communication_rows as communication
from shardscope.report.html import matrix_rows, timeline_rows
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Communication, Matrix, MatrixParts

UNASKED = Redistribute(
    before=("Shard(0)",), after=("Replicate",), asked_by="aten.mm.default", is_implicit=True
)


def read(recording: Recording) -> Communication:
    communication = build_page(recording).communication
    assert communication is not None
    return communication


def test_calls_are_columns_by_rank_and_order() -> None:
    line = Source(file="train.py", line=7, function="step", text="  loss.backward()  ")
    calls = (
        make_collective(rank=1, order=0, start_ns=5, dtype="bfloat16"),
        make_collective(rank=0, order=1, kind=CollectiveKind.ALL_GATHER, axis="tp", num_ranks=4),
        make_collective(rank=0, order=0, cause=UNASKED, source=line, owner="a.b", group="gone"),
    )
    modules = tuple(Module(name=name, type="M", ranks=(RankSpan(0),)) for name in ("", "a", "a.b"))
    page = build_page(make_recording(calls, modules=modules))
    communication = page.communication
    assert communication is not None
    assert (communication.calls.rank, communication.calls.order) == ((0, 0, 1), (0, 1, 0))
    assert [communication.kinds[at] for at in communication.calls.kind] == [
        "all_reduce",
        "all_gather",
        "all_reduce",
    ]
    assert [communication.axes[at] for at in communication.calls.axis] == ["world", "tp", "world"]
    assert [communication.dtypes[at] for at in communication.calls.dtype] == [
        "float32",
        "float32",
        "bfloat16",
    ]
    assert [page.modules.path[at] for at in communication.calls.owner] == ["a.b", "", ""]
    assert (
        communication.causes[communication.calls.cause[0]]
        == "implicit redistribution Shard(0) → Replicate, required by aten.mm"
    )
    assert communication.calls.source == (0, -1, -1)
    assert communication.calls.group == (-1, 0, 0)
    sources = page.sources
    assert (sources.file, sources.line, sources.text) == (("train.py",), (7,), ("loss.backward()",))


def test_identical_ranks_share_rows_of_traffic() -> None:
    calls = tuple(
        make_collective(rank=rank, order=order, wire_bytes=10, input_bytes=4)
        for rank in range(4)
        for order in range(min(rank, 2))
    )
    communication = read(make_recording(calls, ranks=(0, 1, 2, 3)))
    assert [(row.ranks, row.example, row.num_ranks) for row in communication.ranks] == [
        ("0", 0, 1),
        ("1", 1, 1),
        ("2-3", 2, 2),
    ]
    traffic = communication.traffic
    assert (traffic.rank_set, traffic.count) == ((1, 2), (1, 2))
    assert (traffic.input_bytes, traffic.wire_bytes) == ((4, 8), (10, 20))
    names = (communication.axes, communication.kinds, communication.phases, communication.dtypes)
    columns = (traffic.axis, traffic.kind, traffic.phase, traffic.dtype)
    assert [name[column[0]] for name, column in zip(names, columns, strict=True)] == [
        "world",
        "all_reduce",
        "forward",
        "float32",
    ]


def test_rows_of_traffic_differ_in_what_can_be_selected() -> None:
    line = Source(file="a.py", line=1)
    calls = (
        make_collective(order=0, cause=Call(api="dist.all_reduce"), wire_bytes=10),
        make_collective(order=1, cause=UNASKED, wire_bytes=70, owner="a"),
        make_collective(order=2, cause=UNASKED, wire_bytes=70, owner="b", source=line),
        make_collective(order=3, cause=UNASKED, wire_bytes=60, owner="a"),
        make_collective(order=4, cause=UNASKED, owner="a", dtype="int8", wire_bytes=1),
    )
    page = build_page(make_recording(calls))
    assert page.communication is not None
    traffic, causes = page.communication.traffic, page.communication.causes
    assert traffic.wire_bytes == (10, 130, 70, 1)
    assert traffic.count == (1, 2, 1, 1)
    assert [page.modules.path[at] for at in traffic.owner] == ["", "a", "b", "a"]
    assert traffic.source == (-1, -1, 0, -1)
    assert causes[traffic.cause[0]] == "call of dist.all_reduce"
    assert page.communication.implicit_causes == (traffic.cause[1],)
    assert page.communication.traffic_note == ""


def test_rows_of_traffic_are_merged_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Source(file="a.py", line=number) for number in range(4)]
    calls = tuple(
        make_collective(
            rank=rank,
            order=at,
            source=line,
            dtype=f"int{at}",
            wire_bytes=10 + rank,
            owner="ab"[at % 2],
            kind=list(CollectiveKind)[at % 2],
        )
        for rank in range(3)
        for at, line in enumerate(lines[: 2 + rank])
    )
    recording = make_recording(calls, ranks=(0, 1, 2))

    def read_limited(limit: int) -> Communication:
        monkeypatch.setattr(communication, "_MAX_TRAFFIC_ROWS", limit)
        view = read(recording)
        totals = Counter[tuple[int, int]]()
        for rank_set, kind, sent in zip(
            view.traffic.rank_set, view.traffic.kind, view.traffic.wire_bytes, strict=True
        ):
            totals[rank_set, kind] += sent
        assert totals == {(0, 0): 10, (0, 1): 10, (1, 0): 22, (1, 1): 11, (2, 0): 24, (2, 1): 24}
        return view

    assert read_limited(9).traffic_note == ""
    view = read_limited(8)
    assert len(view.traffic.count) == 6
    assert view.traffic_note == "Too many to select dtypes or source lines."
    view = read_limited(4)
    assert view.traffic_note == (
        "Too many to select dtypes or source lines. Figures of modules and causes are of the 2 of "
        "3 sets of identical ranks that send most."
    )
    assert view.traffic.owner[:2] == view.traffic.cause[:2] == (-1, -1)
    assert min(view.traffic.owner[2:]) >= 0


def test_too_many_calls_leave_an_example_of_each_rank_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "MAX_CALLS", 5)
    view = read(make_ranks(8, [{}] * 2))
    assert view.calls.rank == (0, 0)
    assert view.left_out == (
        "Of 16 collectives, these are those of rank 0: "
        "every other rank issued the same collectives as one of these."
    )
    view = read(make_ranks(8, [{}] * 6))
    assert view.calls.rank == (0,) * 5
    assert view.left_out.endswith("these. Of 6 calls, the first 5 are listed.")
    view = read(make_recording(tuple(make_collective(order=order) for order in range(6))))
    assert view.left_out == "Of 6 calls, the first 5 are listed."
    assert view.traffic.count == (6,)  # sums are of all


def test_spans_are_columns_and_timings_add_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = (
        make_span("step", 0, 100, self_ns=60),
        make_span("load", 10, 40, depth=1),
        make_span("step", 0, 300, rank=1),
    )
    recording = make_recording(spans=spans, ranks=(0, 1))
    communication = read(recording)
    assert [communication.spans.names[at] for at in communication.spans.name] == [
        "step",
        "load",
        "step",
    ]
    assert communication.spans.depth == (0, 1, 0)
    first, second = communication.timings
    assert (first.name, first.slowest, first.num_ranks, first.total_ns) == ("step", 1, 2, 300)
    assert (second.name, second.slowest, second.count, second.max_ns) == ("load", 0, 1, 40)
    assert (communication.ranks, communication.matrix) == ((), None)
    monkeypatch.setattr(timeline_rows, "_MAX_SPANS", 2)
    communication = read(recording)
    assert communication.spans.duration_ns == (100, 300)
    assert communication.left_out == "Of 3 timed spans, the 2 longest are drawn."


GROUPS = (
    Group(name="world", torch_name="0", ranks=(RankSpan(0, 4),), num_ranks=4),
    Group(name="even", torch_name="1", ranks=(RankSpan(0, 2, 2),), num_ranks=2),
)


def issue(rank: int, kind: CollectiveKind, num_bytes: int, **changes: Any) -> Collective:
    return make_collective(rank=rank, kind=kind, wire_bytes=num_bytes, num_ranks=4, **changes)


def draw(*calls: Collective, **changes: Any) -> dict[tuple[int, int], int]:
    facts = {"groups": GROUPS, "world_size": 4}
    matrix = read(make_recording(calls, **(facts | changes))).matrix
    assert matrix is not None
    ends = zip(matrix.sender, matrix.receiver, strict=True)
    pairs = [(matrix.ranks[sender], matrix.ranks[receiver]) for sender, receiver in ends]
    return dict(zip(pairs, matrix.num_bytes, strict=True))


def test_a_ring_sends_to_the_next_rank_of_its_group() -> None:
    k = CollectiveKind.ALL_REDUCE
    assert draw(issue(0, k, 5), issue(3, k, 7), issue(2, k, 1, group="even")) == {
        (0, 1): 5,
        (3, 0): 7,
        (2, 0): 1,
    }


def test_an_exchange_goes_to_every_other_rank_and_loses_no_byte() -> None:
    assert draw(issue(1, CollectiveKind.ALL_TO_ALL, 11)) == {(1, 0): 4, (1, 2): 4, (1, 3): 3}
    assert draw(issue(0, CollectiveKind.SCATTER, 9, peer=0)) == {(0, 1): 3, (0, 2): 3, (0, 3): 3}


def test_calls_with_a_single_receiver_go_there() -> None:
    assert draw(
        issue(0, CollectiveKind.SEND, 6, peer=3),
        issue(3, CollectiveKind.RECV, 0, peer=0),
        issue(1, CollectiveKind.GATHER, 2, peer=2),
        issue(2, CollectiveKind.GATHER, 0, peer=2),
    ) == {(0, 3): 6, (1, 2): 2}


def test_rows_add_up_to_the_bytes_each_rank_sent() -> None:
    kinds = [kind for kind in CollectiveKind if kind not in (CollectiveKind.RECV,)]
    calls = [
        issue(rank, kind, 101 * at + rank, peer=(rank + 1) % 4, order=at)
        for rank in range(4)
        for at, kind in enumerate(kinds)
    ]
    rows: Counter[int] = Counter()
    for (sender, _), num_bytes in draw(*calls).items():
        rows[sender] += num_bytes
    wire: Counter[int] = Counter()
    for call in calls:
        wire[call.rank] += call.wire_bytes
    assert rows == wire


def test_the_note_says_what_the_matrix_does_not_know() -> None:
    communication = read(make_recording((issue(0, CollectiveKind.ALL_REDUCE, 5, group="gone"),)))
    assert communication.matrix_note == (
        "Ring estimate: each rank sends to the next in its group. Only 1 of 8 ranks was recorded: "
        "other rows are empty. 1 call left out: their destination was not recorded."
    )


def summarize(*calls: Collective, **changes: Any) -> str:
    facts = {"groups": GROUPS, "world_size": 4}
    return read(make_recording(calls, **(facts | changes))).matrix_summary


def test_a_matrix_that_shows_nothing_is_a_sentence() -> None:
    k = CollectiveKind.ALL_REDUCE
    assert summarize(issue(2, k, 5000, group="even"), issue(2, k, 100, order=1)) == (
        "Of 4 ranks, rank 2 was recorded: it sends 4.88 KiB to rank 0 and 100 B to rank 3 "
        "(ring estimate)."
    )
    exchange = issue(0, CollectiveKind.ALL_TO_ALL, 70)
    wide = Group(name="world", torch_name="0", ranks=(RankSpan(0, 8),), num_ranks=8)
    assert summarize(exchange, groups=(wide,), world_size=8).endswith(
        "10 B to rank 3, 10 B to rank 4 and 30 B to 3 more ranks (ring estimate)."
    )
    same = [issue(rank, k, 5, axis="tp", group="world") for rank in range(4)]
    assert summarize(*same) == (
        "All 4 recorded ranks issued the same collectives, each sending 5 B along tp "
        "(ring estimate)."
    )
    everywhere = [issue(rank, k, 5) for rank in range(4)]
    assert "5 B among all ranks" in summarize(*everywhere)


def test_a_matrix_is_drawn_if_ranks_differ_or_send_elsewhere_than_along_the_mesh() -> None:
    k = CollectiveKind.ALL_REDUCE
    assert summarize(*(issue(rank, k, 5 + rank, axis="tp") for rank in range(4))) == ""
    sends = (issue(rank, CollectiveKind.SEND, 5, axis="pp", peer=3 - rank) for rank in range(4))
    assert summarize(*sends) == ""
    unnamed = (make_collective(rank=rank, group="even", num_ranks=2) for rank in (0, 2))
    assert summarize(*unnamed) == ""
    assert summarize(issue(0, CollectiveKind.BARRIER, 0)) == ""


def read_parts(*calls: Collective) -> tuple[Matrix, MatrixParts]:
    matrix = read(make_recording(calls, groups=GROUPS, world_size=4)).matrix
    assert matrix is not None
    assert matrix.parts is not None
    return matrix, matrix.parts


def sum_pairs(parts: MatrixParts) -> tuple[int, ...]:
    sums = Counter[int]()
    for pair, num_bytes in zip(parts.pair, parts.num_bytes, strict=True):
        sums[pair] += num_bytes
    return tuple(sums[pair] for pair in sorted(sums))


def test_the_parts_of_a_matrix_are_by_all_that_can_be_selected_and_add_up_to_it() -> None:
    exchange = CollectiveKind.ALL_TO_ALL
    calls = [
        issue(rank, exchange, 7 + rank, order=order, phase=phase, axis="tp", owner=f"m{order}")
        for rank in range(4)
        for order, phase in enumerate((Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD))
    ]
    matrix, parts = read_parts(*calls, issue(0, CollectiveKind.ALL_REDUCE, 5, order=3, axis="dp"))
    assert sum_pairs(parts) == matrix.num_bytes
    assert not parts.merged
    assert len(set(parts.axis)) == 2
    phases = list(Phase)
    backward = sum(
        num_bytes
        for phase, num_bytes in zip(parts.phase, parts.num_bytes, strict=True)
        if phases[phase] is Phase.BACKWARD
    )
    assert backward == 2 * (7 + 8 + 9 + 10)


def test_parts_of_a_matrix_are_merged_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        issue(rank, CollectiveKind.ALL_REDUCE, 5 + rank, order=order, owner=f"m{order}", axis="tp")
        for rank in range(4)
        for order in range(10)
    ]
    monkeypatch.setattr(matrix_rows, "_MAX_PARTS", 8)
    matrix, parts = read_parts(*calls)
    assert (len(parts.pair), sum_pairs(parts)) == (4, matrix.num_bytes)
    assert parts.merged == ("owner",)  # the others are the same in all parts
    assert set(parts.owner) == {-1}
    assert set(parts.axis) != {-1}
    monkeypatch.setattr(matrix_rows, "_MAX_PARTS", 3)
    whole = read(make_recording(calls, groups=GROUPS, world_size=4)).matrix
    assert whole is not None
    assert whole.parts is None
    assert whole.num_bytes == matrix.num_bytes


def test_more_than_64_ranks_are_not_drawn() -> None:
    communication = read(make_ranks(65, [{}]))
    assert communication.matrix is None
    assert communication.matrix_note == "Not drawn: 65 ranks are too many to tell apart."
    wide = make_recording(
        (issue(0, CollectiveKind.ALL_TO_ALL, 10_000),),
        world_size=2**20,
        groups=(Group(name="world", torch_name="0", ranks=(RankSpan(0, 2**20),), num_ranks=2**20),),
    )
    assert read(wide).matrix is None


def test_groups_and_axes_are_those_of_the_recording() -> None:
    communication = read(make_llama(num_layers=1))
    assert communication.axes[:2] == ("dp", "tp")
    assert [(row.name, row.ranks, row.num_ranks, row.axis) for row in communication.groups] == [
        ("dp", "0-1016/8", 128, "dp"),
        ("tp", "0-7", 8, "tp"),
    ]
    assert set(communication.phases) == {str(phase) for phase in Phase}


def test_an_unused_mesh_axis_is_listed() -> None:
    run = make_run(axes=(Axis(name="pp", size=8),))
    assert read(make_recording((make_collective(),), run=run)).axes == ("pp", "world")


def mark_steps(*phases: Phase, **changes: Any) -> list[tuple[str, int]]:
    calls = tuple(make_collective(order=at, phase=phase) for at, phase in enumerate(phases))
    return [(mark.name, mark.order) for mark in read(make_recording(calls, **changes)).steps]


def test_steps_begin_with_the_first_forward_collective_after_the_optimizer() -> None:
    forward, backward, optimizer = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
    step = (forward, forward, backward, forward, backward, optimizer)
    assert mark_steps(*step, *step) == [("step 1", 0), ("step 2", 6)]
    assert mark_steps(*step) == []
    # Without collectives of the optimizer, micro-batches and steps look the same.
    micro = (forward, backward, Phase.OUTSIDE)
    assert mark_steps(*micro, *micro) == [("forward 1", 0), ("forward 2", 3)]


def test_steps_begin_with_their_spans_if_they_were_timed() -> None:
    calls = tuple(make_collective(order=at, start_ns=10 * at) for at in range(4))
    spans = (make_span("step", 0, 18), make_span("step", 19, 20), make_span("load", 3, 1))
    steps = read(make_recording(calls, spans=spans)).steps
    assert [(mark.name, mark.order, mark.start_ns) for mark in steps] == [
        ("step 1", 0, 0),
        ("step 2", 2, 19),
    ]
