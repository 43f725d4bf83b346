"""Who sends to whom: the same sums in the terminal and on the page."""

from __future__ import annotations

from msgspec.structs import replace

from sample_recordings import make_collective, make_recording
from shardscope.record import CollectiveKind, Group, RankSpan
from shardscope.record.units import format_bytes
from shardscope.report.export.markdown import render_markdown
from shardscope.report.html.html import build_page
from shardscope.report.model.traffic_totals import (
    fold_ranks,
    sum_sent_bytes,
)
from shardscope.report.result.recording_figures import read_figures
from shardscope.report.text.charts import render_matrix
from shardscope.report.text.summary import render_plain


def _in_group(rank, kind, **changes):
    return make_collective(rank=rank, group="g", kind=kind, num_ranks=4, wire_bytes=300, **changes)


def _with_group(*calls):
    group = Group(name="g", torch_name="1", ranks=(RankSpan(0, 4, 2),), num_ranks=4)
    return make_recording(tuple(calls), groups=(group,))


def test_rings_send_to_the_next_rank_of_their_group():
    recording = _with_group(
        _in_group(0, CollectiveKind.ALL_REDUCE), _in_group(6, CollectiveKind.ALL_GATHER)
    )
    assert sum_sent_bytes(recording).sent == {(0, 2): 300, (6, 0): 300}


def test_other_transfers_go_to_their_receivers():
    assert sum_sent_bytes(_with_group(_in_group(2, CollectiveKind.ALL_TO_ALL))).sent == {
        (2, 0): 100,
        (2, 4): 100,
        (2, 6): 100,
    }
    assert sum_sent_bytes(_with_group(_in_group(2, CollectiveKind.SEND, peer=6))).sent == {
        (2, 6): 300
    }
    assert sum_sent_bytes(_with_group(_in_group(2, CollectiveKind.RECV, peer=6))).sent == {}
    assert sum_sent_bytes(_with_group(_in_group(3, CollectiveKind.ALL_REDUCE))).sent == {}


def test_groups_of_a_million_ranks_are_not_listed_for_each_call():
    size = 2**20
    all_ranks = (RankSpan(0, size),)
    groups = tuple(
        Group(name=f"g{index}", torch_name="", ranks=all_ranks, num_ranks=size)
        for index in range(2000)
    )
    calls = tuple(
        make_collective(group=group.name, rank=index, kind=CollectiveKind.ALL_REDUCE)
        for index, group in enumerate(groups)
    )
    recording = make_recording(calls, world_size=size, groups=groups)
    assert sum_sent_bytes(recording).sent[1999, 2000] == 7168
    shared = replace(calls[0], kind=CollectiveKind.ALL_TO_ALL)
    recording = make_recording((*calls, shared), world_size=size, groups=groups)
    assert sum_sent_bytes(recording) is None
    assert "too many pairs" in render_plain(next(render_matrix(recording)), width=100)


def test_the_terminal_and_the_page_add_up_the_same_and_lose_no_byte():
    kinds = [kind for kind in CollectiveKind if kind is not CollectiveKind.RECV]
    calls = tuple(
        make_collective(rank=rank, kind=kind, wire_bytes=5**at + rank, peer=(rank + 2) % 8)
        for rank in range(8)
        for at, kind in enumerate(kinds)
    )
    recording = make_recording(calls)
    matrix = build_page(recording).communication.matrix
    rows = dict.fromkeys(matrix.ranks, 0)
    for sender, num_bytes in zip(matrix.sender, matrix.num_bytes, strict=True):
        rows[matrix.ranks[sender]] += num_bytes
    assert rows == {r: sum(call.wire_bytes for call in calls if call.rank == r) for r in range(8)}
    _, picture = render_matrix(recording)
    drawn = render_plain(picture, width=60).splitlines()[1:-1]
    assert [line.split("  ")[-1] for line in drawn] == list(map(format_bytes, rows.values()))
    pairs = zip(matrix.sender, matrix.receiver, matrix.num_bytes, strict=True)
    assert sum_sent_bytes(recording).sent == {(a, b): num_bytes for a, b, num_bytes in pairs}


def test_calls_with_unknown_receivers_are_counted():
    lost = (_in_group(0, CollectiveKind.SEND), _in_group(3, CollectiveKind.ALL_REDUCE))
    assert sum_sent_bytes(_with_group(*lost)) == ({}, 2)
    (title,) = render_matrix(_with_group(*lost))
    assert "2 calls left out: their destination was not recorded" in title.plain
    title, _ = render_matrix(_with_group(*lost, _in_group(0, CollectiveKind.BROADCAST)))
    assert "what 1 recorded rank sent (ring estimate); 2 calls left out" in title.plain


def test_of_ranks_that_send_the_same_figures_are_of_the_one_with_most_collectives():
    alone = make_collective(rank=0, wire_bytes=300)
    halves = [make_collective(rank=1, wire_bytes=150) for _ in range(2)]
    recording = make_recording((alone, *halves), ranks=(0, 1))
    figures = read_figures(recording, fold_ranks(recording)).communication
    assert (figures.rank, figures.count) == (1, 2)
    assert figures.causes[0].count == figures.modules[0].count == 2
    assert "| `world` | all_reduce | 2 | 8.00 KiB | 300 B |" in render_markdown(recording)
