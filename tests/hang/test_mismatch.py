"""Ranks that disagree have a finding with position, sides and remedy; legal differences do not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sample_recordings import make_collective, make_llama, make_ranks, make_recording
from shardscope.hang import match_ranks
from shardscope.record import CollectiveKind, Gap, Group, Phase, RankSpan, Severity, Source


def _change(recording, rank, order, **changes):
    calls = tuple(
        replace(call, **changes) if (call.rank, call.order) == (rank, order) else call
        for call in recording.collectives
    )
    return replace(recording, collectives=calls)


def _drop(recording, rank, order):
    calls = [c for c in recording.collectives if (c.rank, c.order) != (rank, order)]
    return replace(recording, collectives=tuple(calls))


def _uniform(kind, **facts):
    return make_ranks(4, [{"kind": kind, **facts}] * 3)


@pytest.mark.parametrize("kind", list(CollectiveKind)[:8])
def test_ranks_that_agree_have_no_finding(kind):
    assert match_ranks(_uniform(kind)) == ()


def test_real_shape_of_recording_has_no_finding():
    assert match_ranks(make_llama(num_layers=3, dp=1, ranks=tuple(range(8)))) == ()


def test_empty_and_single_rank_have_no_finding(llama):
    assert match_ranks(make_recording()) == ()
    assert match_ranks(llama) == ()


def test_different_kind_names_group_position_ranks_module_phase_line_and_remedy():
    recording = _change(
        _uniform(CollectiveKind.ALL_REDUCE),
        2,
        1,
        kind=CollectiveKind.ALL_GATHER,
        owner="layers.1.mlp",
        phase=Phase.BACKWARD,
        source=Source(file="train.py", line=40),
    )
    (finding,) = match_ranks(recording)
    assert (finding.rule, finding.severity) == ("rank-mismatch", Severity.ERROR)
    assert finding.subject == "group world"
    assert finding.fact == (
        "ranks disagree on kind at position 1 of group world: ranks 0-1,3 issued all_reduce "
        "float32 4,096 bytes (the root module, forward); rank 2 issued all_gather float32 4,096 "
        "bytes (layers.1.mlp, backward, train.py:40)"
    )
    assert finding.remedy.startswith("Make every rank of the group take the same branch")
    assert finding.rank == 2
    assert finding.source == Source(file="train.py", line=40)


_MUST_AGREE = [
    (CollectiveKind.ALL_REDUCE, {"dtype": "bfloat16"}, "dtype"),
    (CollectiveKind.ALL_REDUCE, {"input_bytes": 8, "output_bytes": 8}, "size"),
    (CollectiveKind.ALL_REDUCE, {"reduce_op": "max"}, "reduce op"),
    (CollectiveKind.ALL_REDUCE, {"reduce_op": "max", "dtype": "x"}, "dtype and reduce op"),
    (CollectiveKind.ALL_GATHER, {"output_bytes": 8}, "size"),
    (CollectiveKind.REDUCE_SCATTER, {"input_bytes": 8}, "size"),
    (CollectiveKind.REDUCE_SCATTER, {"reduce_op": "avg"}, "reduce op"),
    (CollectiveKind.BROADCAST, {"peer": 3}, "root"),
    (CollectiveKind.REDUCE, {"peer": 3}, "root"),
    (CollectiveKind.GATHER, {"peer": 3}, "root"),
    (CollectiveKind.SCATTER, {"peer": 3}, "root"),
    (CollectiveKind.ALL_TO_ALL, {"dtype": "bfloat16"}, "dtype"),
]


@pytest.mark.parametrize(("kind", "change", "word"), _MUST_AGREE)
def test_what_must_agree_is_a_finding(kind, change, word):
    recording = _change(_uniform(kind, peer=0, reduce_op="sum"), 3, 0, **change)
    (finding,) = match_ranks(recording)
    assert finding.fact.startswith(f"ranks disagree on {word} at position 0 of group world: ")


_MAY_DIFFER = [
    (CollectiveKind.ALL_GATHER, {"input_bytes": 8}),
    (CollectiveKind.REDUCE_SCATTER, {"output_bytes": 8}),
    (CollectiveKind.ALL_TO_ALL, {"input_bytes": 8, "output_bytes": 16}),
    (CollectiveKind.GATHER, {"input_bytes": 8, "output_bytes": 0}),
    (CollectiveKind.SCATTER, {"input_bytes": 0, "output_bytes": 8}),
    (CollectiveKind.BROADCAST, {"input_bytes": 0}),
    (CollectiveKind.REDUCE, {"output_bytes": 0}),
    (CollectiveKind.BARRIER, {"dtype": "uint8", "input_bytes": 1}),
    (CollectiveKind.ALL_REDUCE, {"owner": "x", "phase": Phase.BACKWARD, "op": "other"}),
]


@pytest.mark.parametrize(("kind", "change"), _MAY_DIFFER)
def test_what_may_differ_is_no_finding(kind, change):
    assert match_ranks(_change(_uniform(kind), 3, 0, **change)) == ()


def test_rank_that_stops_early_is_named():
    (finding,) = match_ranks(_drop(_uniform(CollectiveKind.ALL_REDUCE), 1, 2))
    assert "on whether there is a collective at position 2" in finding.fact
    assert "rank 1 issued nothing after all_reduce" in finding.fact
    assert finding.rank == 1


def test_member_that_issues_no_collective_is_named():
    recording = _uniform(CollectiveKind.ALL_REDUCE)
    calls = tuple(call for call in recording.collectives if call.rank != 3)
    (finding,) = match_ranks(replace(recording, collectives=calls))
    assert "rank 3 issued nothing" in finding.fact


def test_ranks_without_a_recording_are_not_compared():
    recording = _uniform(CollectiveKind.ALL_REDUCE)
    calls = tuple(call for call in recording.collectives if call.rank != 3)
    partial_recording = make_recording(calls, world_size=4, ranks=(0, 1, 2))
    assert match_ranks(partial_recording) == ()


def test_only_the_first_divergence_of_a_group_is_reported():
    recording = make_ranks(4, [{"dtype": str(i)} for i in range(9)])
    for order in (4, 6):
        recording = _change(recording, 2, order, dtype="int8")
    (finding,) = match_ranks(recording)
    assert "position 4" in finding.fact


def _lose(recording, rank, *orders, gap_rank=...):
    """The rank's stream was damaged: these collectives are not in it."""
    for order in orders:
        recording = _drop(recording, rank, order)
    gap_rank = rank if gap_rank is ... else gap_rank
    gap = Gap(place="run-2.jsonl, line 3", fact="damaged", rank=gap_rank, is_loss=True)
    return replace(recording, gaps=(*recording.gaps, gap))


@pytest.mark.parametrize("orders", [(0,), (3,), (8,), (7, 8), (0, 1, 4), tuple(range(9))], ids=str)
def test_a_rank_that_lost_records_is_not_reported(orders):
    complete = make_ranks(4, [{"dtype": str(i)} for i in range(9)])
    assert match_ranks(_lose(complete, 2, *orders)) == ()


def test_a_loss_without_a_rank_may_be_of_any_rank():
    complete = make_ranks(4, [{"dtype": str(i)} for i in range(9)])
    assert match_ranks(_lose(complete, 2, 8, gap_rank=None)) == ()


def test_gap_that_is_no_loss_does_not_hide_a_mismatch():
    gap = Gap(place="op", fact="odd", rank=1)
    recording = _drop(_uniform(CollectiveKind.ALL_REDUCE), 1, 2)
    assert len(match_ranks(replace(recording, gaps=(gap,)))) == 1


def test_rest_of_a_damaged_recording_is_compared_at_its_position():
    recording = _lose(make_ranks(4, [{"dtype": str(i)} for i in range(9)]), 2, 1)
    (finding,) = match_ranks(_change(recording, 2, 5, dtype="int8"))
    assert "disagree on dtype at position 5" in finding.fact
    assert finding.rank == 2


def test_others_are_compared_where_a_rank_lost_records_and_it_is_named_as_unknown():
    recording = _lose(_uniform(CollectiveKind.ALL_REDUCE), 2, 2)
    (finding,) = match_ranks(_drop(recording, 1, 2))
    assert "rank 1 issued nothing after" in finding.fact
    assert finding.fact.endswith("; not known of rank 2, whose recording lost records")
    assert finding.rank == 1


def test_missing_position_is_a_loss_even_without_a_gap():
    complete = make_ranks(4, [{"dtype": str(i)} for i in range(9)])
    assert match_ranks(_drop(complete, 2, 4)) == ()


def test_a_huge_position_costs_no_time():
    calls = tuple(make_collective(rank=rank, group_order=2**62) for rank in range(2))
    assert match_ranks(make_recording(calls)) == ()


def test_each_group_is_compared_separately():
    pairs = [
        Group(name=f"tp{first}", torch_name="", ranks=(RankSpan(first, 2),), num_ranks=2)
        for first in (0, 2)
    ]
    calls = [make_collective(rank=rank, group=f"tp{rank // 2 * 2}") for rank in range(4)]
    recording = make_recording(tuple(calls), world_size=4, groups=tuple(pairs))
    assert match_ranks(recording) == ()
    subjects = [f.subject for f in match_ranks(_change(recording, 3, 0, dtype="int8"))]
    assert subjects == ["group tp2"]


def test_many_variants_are_abbreviated():
    calls = tuple(make_collective(rank=rank, dtype=f"int{rank}") for rank in range(8))
    (finding,) = match_ranks(make_recording(calls))
    assert finding.fact.endswith("; 4 more variants")


def _transfers(*moves, ranks=(0, 1, 2)):
    """Calls from (kind, rank, peer, bytes); positions count per rank."""
    calls, orders = [], dict.fromkeys(ranks, 0)
    for kind, rank, peer, num_bytes in moves:
        calls.append(
            make_collective(
                rank=rank,
                order=orders[rank],
                group_order=orders[rank],
                kind=CollectiveKind(kind),
                peer=peer,
                input_bytes=num_bytes if kind == "send" else 0,
                output_bytes=num_bytes if kind == "recv" else 0,
            )
        )
        orders[rank] += 1
    return make_recording(tuple(calls), world_size=4, ranks=ranks)


def test_sends_that_meet_receives_have_no_finding():
    recording = _transfers(
        ("send", 0, 1, 8), ("send", 0, 1, 16), ("recv", 1, 0, 8), ("recv", 1, 0, 16)
    )
    assert match_ranks(recording) == ()


def test_transfers_on_some_ranks_do_not_shift_collectives_of_others():
    recording = _transfers(("send", 0, 1, 8), ("recv", 1, 0, 8))
    calls = [
        make_collective(rank=rank, order=9, group_order=order)
        for rank, order in ((0, 1), (1, 1), (2, 0))
    ]
    assert match_ranks(replace(recording, collectives=(*recording.collectives, *calls))) == ()


def test_send_without_receive_is_a_finding():
    (finding,) = match_ranks(_transfers(("send", 0, 1, 8)))
    assert finding.fact.startswith(
        "in group world, rank 1 never receives what rank 0 sent it: send float32 8 bytes peer 1"
    )
    assert finding.remedy.startswith("Give every send one receive")
    assert finding.rank == 0


def test_receive_without_send_is_a_finding():
    (finding,) = match_ranks(_transfers(("recv", 1, 0, 8)))
    assert "rank 0 never sends what rank 1 waits for: recv" in finding.fact


def test_transfer_of_different_sizes_is_a_finding():
    moves = [("send", 0, 1, 8), ("recv", 1, 0, 8), ("send", 0, 1, 8), ("recv", 1, 0, 4)]
    (finding,) = match_ranks(_transfers(*moves))
    assert "the two ends differ in size: rank 0's send float32 8 bytes" in finding.fact
    assert "(transfer 1 of that route)" in finding.fact


def test_both_waiting_to_receive_is_a_finding():
    assert len(match_ranks(_transfers(("recv", 0, 1, 8), ("recv", 1, 0, 8)))) == 1


def test_transfers_with_unrecorded_ranks_are_not_compared():
    assert match_ranks(_transfers(("send", 0, 3, 8), ("recv", 2, 3, 8))) == ()


def test_a_receive_from_any_rank_is_not_compared():
    assert match_ranks(_transfers(("send", 0, 1, 8), ("recv", 1, None, 8))) == ()


def _with_loss(recording, rank):
    gap = Gap(place="run.jsonl", fact="no end", rank=rank, is_loss=True)
    return replace(recording, gaps=(gap,))


@pytest.mark.parametrize("lossy", [0, 1])
def test_a_transfer_whose_other_end_may_be_lost_is_not_compared(lossy):
    kind, rank, peer = ("send", 0, 1) if lossy == 1 else ("recv", 1, 0)
    assert match_ranks(_with_loss(_transfers((kind, rank, peer, 8)), lossy)) == ()
    assert len(match_ranks(_with_loss(_transfers((kind, rank, peer, 8)), 1 - lossy))) == 1


def test_transfers_after_a_lost_one_are_not_paired_by_their_number():
    moves = [("send", 0, 1, n) for n in (8, 16, 24)] + [("recv", 1, 0, n) for n in (8, 16, 24)]
    recording = _drop(_transfers(*moves), 0, 1)
    assert match_ranks(_with_loss(recording, 0)) == ()


def test_transfers_before_the_loss_are_still_compared():
    moves = [("send", 0, 1, 8), ("recv", 1, 0, 4), ("recv", 1, 0, 8)]
    (finding,) = match_ranks(_with_loss(_transfers(*moves), 0))
    assert "the two ends differ in size" in finding.fact


def test_collectives_after_a_lost_transfer_are_not_compared():
    # Whether the lost one was a send or a collective is not known, so neither is the position.
    moves = [("send", 0, 1, 8), ("recv", 1, 0, 8)]
    calls = [
        make_collective(rank=rank, order=order + 1, group_order=order + 1, dtype=f"int{order}")
        for rank in (0, 1)
        for order in range(3)
    ]
    recording = _transfers(*moves, ranks=(0, 1))
    recording = replace(recording, collectives=(*recording.collectives, *calls))
    assert match_ranks(recording) == ()
    assert match_ranks(_with_loss(_drop(recording, 0, 0), 0)) == ()


def test_the_rank_in_the_minority_is_named():
    calls = [make_collective(rank=rank) for rank in range(4)]
    odd = make_collective(rank=2, order=1, group_order=1, kind=CollectiveKind.BARRIER)
    (finding,) = match_ranks(make_recording((*calls, odd), ranks=(0, 1, 2, 3), world_size=4))
    assert finding.rank == 2
