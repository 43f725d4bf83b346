"""After a hang the finding names the ranks behind, their last collective, and the waiting ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from sample_recordings import make_collective, make_recording
from shardscope.comm.findings import review
from shardscope.hang import match_ranks
from shardscope.record import (
    Call,
    CollectiveKind,
    Gap,
    Group,
    RankSpan,
    Severity,
    Source,
    Span,
    SpanBegin,
    Stop,
)

WORLD = "world"


def collective(line, group=WORLD, kind="all_reduce", **changes):
    """A call at a line of train.py, to be put on a rank by `hang`."""
    facts = {
        "kind": CollectiveKind(kind),
        "group": group,
        "owner": None,
        "source": Source(file="train.py", line=line),
        "cause": Call(api=f"torch.distributed.{changes.pop('api', kind)}"),
    }
    return facts | changes


def send(line, peer, **changes):
    return collective(line, kind="send", peer=peer, **changes)


def recv(line, peer, **changes):
    return collective(line, kind="recv", peer=peer, **changes)


def hang(calls, *, world_size=4, groups=(), backend="gloo", finished=(), errors=None, **changes):
    """Ranks that issued the calls given by rank and stopped, but for those that finished."""
    collectives = []
    for rank, mine in calls.items():
        orders = Counter()
        for order, facts in enumerate(mine):
            group = facts["group"]
            position = {"rank": rank, "order": order, "group_order": orders[group]}
            collectives.append(make_collective(**(position | {"start_ns": order * 100} | facts)))
            orders[group] += 1
    errors = errors or {}
    stops = [
        Stop(rank=rank, error=errors.get(rank), is_gapless=True)
        for rank in calls
        if rank not in finished
    ]
    gaps = [
        Gap(place=f"run-{stop.rank}.jsonl", fact="no end", rank=stop.rank, is_loss=True)
        for stop in stops
        if stop.error is None
    ]
    everyone = (RankSpan(0, world_size),)
    members = [(WORLD, everyone), *groups]
    facts = {
        "stops": tuple(stops),
        "gaps": tuple(gaps),
        "groups": tuple(
            Group(name=name, torch_name=name, ranks=ranks, num_ranks=2, backend=backend)
            for name, ranks in members
        ),
    }
    ranks = tuple(sorted(calls))
    return make_recording(
        tuple(collectives), world_size=world_size, ranks=ranks, **(facts | changes)
    )


def in_phase(recording, rank, name, start_ns):
    """The rank was in a phase that it entered then."""
    stops = tuple(
        replace(stop, open_spans=(SpanBegin(rank=rank, name=name, start_ns=start_ns),))
        if stop.rank == rank
        else stop
        for stop in recording.stops
    )
    return replace(recording, stops=stops)


TWO = [collective(10), collective(11)]
THREE = [*TWO, collective(12)]


def test_rank_in_a_data_loader_is_behind_and_the_others_wait():
    recording = hang({0: THREE, 1: TWO, 2: THREE, 3: THREE})
    (finding,) = match_ranks(in_phase(recording, 1, "load", 500))
    assert (finding.rule, finding.severity) == ("rank-behind", Severity.WARNING)
    assert (finding.subject, finding.rank) == ("group world", 1)
    assert finding.fact == (
        "rank 1 is behind; ranks 0,2-3 wait for rank 1 in all_reduce float32 4,096 bytes (outside "
        "any module, forward, train.py:12) at position 2 of group world; rank 1 last issued "
        "all_reduce float32 4,096 bytes (outside any module, forward, train.py:11) in group world "
        "before the recording stops in phase load"
    )
    assert finding.remedy.startswith("Look at what rank 1 did after train.py:11")
    assert "If the run was killed while it still made progress" in finding.remedy
    assert finding.source == Source(file="train.py", line=11)


def test_all_ranks_in_the_same_place_are_no_finding():
    assert match_ranks(hang(dict.fromkeys(range(4), THREE))) == ()


def test_run_that_finished_is_not_searched_for_a_hang():
    recording = hang(dict.fromkeys(range(4), THREE), finished=range(4))
    assert match_ranks(recording) == ()


def test_rank_that_never_issued_anything_is_behind():
    (finding,) = match_ranks(hang({0: TWO, 1: TWO, 2: TWO, 3: []}))
    assert finding.rank == 3
    assert "rank 3 issued no collective before the recording stops" in finding.fact
    assert "before its first collective" in finding.remedy


def test_rank_that_raised_is_named_with_what_it_raised():
    closed = "RuntimeError: Connection closed by peer"
    errors = {0: closed, 1: "ValueError: bad batch", 2: closed, 3: closed}
    (finding,) = match_ranks(hang({0: THREE, 1: TWO, 2: THREE, 3: THREE}, errors=errors))
    assert (finding.rank, finding.severity) == (1, Severity.ERROR)
    assert "then raised ValueError: bad batch" in finding.fact
    assert finding.remedy.startswith("Fix what rank 1 raised first")


def test_killed_rank_whose_siblings_failed_is_an_error():
    errors = dict.fromkeys((0, 1, 3), "RuntimeError: Connection closed by peer")
    (finding,) = match_ranks(hang({0: THREE, 1: THREE, 2: TWO, 3: THREE}, errors=errors))
    assert (finding.rank, finding.severity) == (2, Severity.ERROR)
    assert "in the log of rank 2" in finding.remedy


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit: 1", "SignalException: 15"])
def test_rank_that_was_interrupted_is_not_blamed_for_the_interruption(error):
    (finding,) = match_ranks(hang({0: THREE, 1: TWO, 2: THREE, 3: THREE}, errors={1: error}))
    assert (finding.rank, finding.severity) == (1, Severity.WARNING)
    assert finding.remedy.startswith("Look at what rank 1 did after train.py:11")


def test_rank_that_left_its_trace_early_is_a_mismatch_and_nothing_else():
    recording = hang({0: THREE, 1: TWO, 2: THREE, 3: THREE}, finished=[1])
    (finding,) = match_ranks(recording)
    assert (finding.rule, finding.rank) == ("rank-mismatch", 1)
    assert finding.source == Source(file="train.py", line=11)


def test_rank_that_took_another_branch_is_a_mismatch_and_nothing_else():
    diverging = [*TWO, collective(20, kind="barrier")]
    (finding,) = match_ranks(hang({0: [*THREE, collective(13)], 1: THREE, 2: THREE, 3: diverging}))
    assert (finding.rule, finding.rank) == ("rank-mismatch", 3)


def test_ranks_that_wait_for_a_mismatch_elsewhere_are_not_reported_as_well():
    pair = ("pair", (RankSpan(0, 2),))
    calls = {
        0: [collective(10), collective(11, group="pair")],
        1: [collective(10), collective(11, group="pair", kind="barrier")],
        2: TWO,
        3: TWO,
    }
    (finding,) = match_ranks(hang(calls, groups=[pair]))
    assert (finding.rule, finding.subject) == ("rank-mismatch", "group pair")


def test_skipped_collective_shows_where_the_lines_first_differ():
    loop = [collective(10), collective(11)] * 4
    skipped = [*loop[:3], *loop[4:]]
    (finding,) = match_ranks(hang({0: loop, 1: loop, 2: skipped, 3: loop}))
    assert finding.rank == 2
    assert (
        "the lines first differ at position 3, train.py:10 on rank 2 and train.py:11 on the "
        "others: a collective may have been skipped there" in finding.fact
    )


def test_several_ranks_behind_are_one_finding_with_the_place_of_each():
    calls = {0: THREE, 1: TWO, 2: TWO[:1], 3: THREE}
    (finding,) = match_ranks(hang(calls))
    assert "rank 2 is behind; ranks 0-1,3 wait for rank 2" in finding.fact
    two_behind = {0: THREE, 1: TWO, 2: [collective(10), collective(15)], 3: THREE}
    (finding,) = match_ranks(hang(two_behind))
    assert finding.fact.startswith("ranks 1-2 are behind; ranks 0,3 wait for ranks 1-2 in ")
    assert "rank 1 last issued all_reduce" in finding.fact
    assert "train.py:15) in group world before the recording stops" in finding.fact


def test_deadlock_of_two_receives_is_named():
    calls = {0: [*TWO, recv(20, 1)], 1: [*TWO, recv(30, 0)], 2: TWO, 3: TWO}
    (finding,) = match_ranks(hang(calls))
    assert (finding.rule, finding.severity, finding.rank) == ("deadlock", Severity.ERROR, None)
    assert finding.subject.startswith("ranks 0-1, group")
    assert finding.fact == (
        "a deadlock of receives: rank 0 waits for rank 1 in recv float32 4,096 bytes peer 1 "
        "(outside any module, forward, train.py:20) in group world; rank 1 waits for rank 0 in "
        "recv float32 4,096 bytes peer 0 (outside any module, forward, train.py:30) in group world"
    )
    assert finding.remedy.startswith("Let one of these ranks send before it receives")


def test_deadlock_is_found_where_a_third_rank_left_no_file():
    calls = {0: [*TWO, recv(20, 1)], 1: [*TWO, recv(30, 0)], 3: TWO}
    (finding,) = match_ranks(hang(calls))
    assert finding.rule == "deadlock"


def test_ring_of_receives_is_one_deadlock():
    calls = {rank: [recv(20, (rank - 1) % 6)] for rank in range(6)}
    (finding,) = match_ranks(hang(calls, world_size=6))
    assert finding.rule == "deadlock"
    assert "… 2 more …" in finding.fact


def test_pipeline_that_receives_in_the_wrong_order_names_the_two_stages():
    calls = {0: [recv(20, 1)], 1: [recv(20, 2)], 2: [recv(20, 3)], 3: [recv(21, 2)]}
    (finding,) = match_ranks(hang(calls))
    assert finding.rank is None
    assert finding.subject.startswith("ranks 2-3, group")
    assert finding.fact.endswith("; ranks 0-1 wait too")


def test_two_groups_in_opposite_order_are_a_deadlock():
    pairs = [("a", (RankSpan(0, 2),)), ("b", (RankSpan(0, 2),))]
    calls = {
        0: [*TWO, collective(20, group="a")],
        1: [*TWO, collective(30, group="b")],
        2: THREE,
        3: THREE,
    }
    (finding,) = match_ranks(hang(calls, groups=pairs))
    assert (finding.rule, finding.subject) == ("deadlock", "ranks 0-1, groups a, b")
    assert "; ranks 2-3 wait too" in finding.fact
    assert finding.remedy.startswith("Issue the collectives and transfers of these groups in the")


def test_receive_and_collective_that_wait_for_each_other_are_a_deadlock():
    calls = {0: [recv(20, 1)], 1: [collective(12)], 2: [collective(12)], 3: [collective(12)]}
    (finding,) = match_ranks(hang(calls))
    assert finding.rule == "deadlock"
    assert finding.fact.startswith("a deadlock: rank 0 waits for rank 1 in recv")


def test_sends_that_wait_for_each_other_are_only_likely():
    calls = {0: [send(20, 1)], 1: [send(20, 0)]}
    (finding,) = match_ranks(hang(calls, world_size=2))
    assert (finding.rule, finding.severity) == ("deadlock", Severity.WARNING)
    assert "unless one of them was busy elsewhere" in finding.fact


def test_receive_that_waits_for_a_busy_sender_names_the_sender():
    calls = {0: [recv(20, 1)], 1: TWO[:0], 2: [], 3: []}
    (finding,) = match_ranks(hang(calls))
    assert (finding.rule, finding.rank) == ("rank-behind", 1)


def test_chain_of_waits_ends_at_the_rank_that_does_not_wait():
    groups = [
        ("tp0", (RankSpan(0, 4),)),
        ("tp1", (RankSpan(4, 4),)),
        *((f"dp{rank}", (RankSpan(rank, 2, 4),)) for rank in range(4)),
    ]

    def step(rank, line):
        return [
            collective(line, group=f"tp{rank // 4}"),
            collective(line + 1, group=f"dp{rank % 4}"),
        ]

    calls = {rank: step(rank, 10) for rank in range(8)}
    for rank in (0, 1, 2, 3):
        calls[rank] = [*calls[rank], *step(rank, 10)]
    for rank in (4, 6, 7):
        calls[rank] = [*calls[rank], step(rank, 10)[0]]
    recording = hang(calls, world_size=8, groups=groups)
    (finding,) = match_ranks(in_phase(recording, 5, "load", 900))
    assert finding.rank == 5
    assert "ranks 4,6-7 wait for rank 5 in" in finding.fact
    assert "rank 1 waits for rank 5 in" in finding.fact
    assert "ranks 0,2-3 wait for those in turn" in finding.fact


@pytest.mark.parametrize(("backend", "rule"), [("gloo", "rank-behind"), ("nccl", "deadlock")])
def test_phase_entered_after_a_collective_shows_that_gloo_did_not_wait_in_it(backend, rule):
    # Rank 0 issued the collective and went on; rank 1 waits for it in a receive. On a GPU the host
    # continues while the device waits, so that a phase proves nothing.
    calls = {0: [collective(12)], 1: [recv(20, 0)]}
    recording = in_phase(hang(calls, world_size=2, backend=backend), 0, "load", 500)
    (finding,) = match_ranks(recording)
    assert finding.rule == rule
    assert finding.rank == (0 if rule == "rank-behind" else None)


def test_phase_left_after_a_collective_shows_the_same():
    calls = {0: [collective(12)], 1: [recv(20, 0)]}
    span = Span(rank=0, name="step", start_ns=0, duration_ns=900, self_ns=900)
    (finding,) = match_ranks(hang(calls, world_size=2, spans=(span,)))
    assert (finding.rule, finding.rank) == ("rank-behind", 0)


def test_phase_left_because_of_an_exception_shows_nothing():
    calls = {0: [recv(20, 1)], 1: [recv(30, 0)]}
    spans = tuple(
        Span(rank=rank, name="step", start_ns=0, duration_ns=900, self_ns=900) for rank in calls
    )
    errors = dict.fromkeys(calls, "RuntimeError: Timed out waiting 1000ms for recv")
    (finding,) = match_ranks(hang(calls, world_size=2, spans=spans, errors=errors))
    assert finding.rule == "deadlock"


def test_hang_long_after_a_mismatch_that_blocked_no_rank_is_reported_too():
    odd = [collective(10), collective(11, dtype="int8"), *THREE, *THREE]
    even = [collective(10), collective(11), *THREE, *THREE]
    findings = match_ranks(hang({0: even, 1: odd[:-1], 2: even, 3: even}))
    assert [(finding.rule, finding.rank) for finding in findings] == [
        ("rank-mismatch", 1),
        ("rank-behind", 1),
    ]


def test_root_of_a_broadcast_may_have_gone_on():
    calls = {0: [collective(12, kind="broadcast", peer=0)], 1: [recv(20, 0)]}
    (finding,) = match_ranks(hang(calls, world_size=2))
    assert (finding.rule, finding.severity) == ("deadlock", Severity.WARNING)


def test_a_rank_whose_stream_lost_records_may_be_behind():
    recording = hang({0: THREE, 1: TWO, 2: THREE, 3: THREE})
    stops = tuple(replace(stop, is_gapless=stop.rank != 1) for stop in recording.stops)
    (finding,) = match_ranks(replace(recording, stops=stops))
    assert (finding.rank, finding.severity) == (1, Severity.WARNING)
    assert finding.fact.endswith(
        "rank 1, which must issue it too, left no complete recording and may be behind"
    )


def test_a_rank_without_a_file_may_be_behind_if_all_others_wait_in_one_collective():
    (finding,) = match_ranks(hang({0: THREE, 2: THREE, 3: THREE}))
    assert finding.rank == 1
    assert "rank 1, which must issue it too, left no recording and may be behind" in finding.fact


def test_no_rank_is_reported_if_most_ranks_left_no_file():
    assert match_ranks(hang({0: THREE, 2: THREE}, world_size=8)) == ()


def test_known_rank_that_is_behind_is_named_rather_than_the_one_without_a_file():
    (finding,) = match_ranks(hang({0: THREE, 2: TWO, 3: THREE}))
    assert finding.rank == 2


def test_collective_that_others_got_past_is_one_that_a_recording_lost():
    calls = {0: THREE, 1: TWO, 2: THREE, 3: THREE}
    assert match_ranks(hang(calls, finished=[0, 2, 3])) == ()


def test_simulated_rank_that_raised_is_named_although_no_rank_waits():
    recording = hang({0: THREE, 1: TWO}, world_size=2, finished=[0], errors={1: "ValueError: x"})
    recording = replace(recording, run=replace(recording.run, is_simulated=True))
    (finding,) = match_ranks(recording)
    assert (finding.rule, finding.rank) == ("rank-behind", 1)


def from_anyone(line, num_ranks, **changes):
    return recv(line, None, num_ranks=num_ranks, **changes)


def test_receive_from_any_rank_waits_for_the_ranks_that_could_send():
    (finding,) = match_ranks(hang({0: [from_anyone(20, 3)], 1: [], 2: []}, world_size=3))
    assert (finding.rule, finding.severity, finding.rank) == ("rank-behind", Severity.WARNING, 1)
    assert finding.fact == (
        "ranks 1-2 are behind; rank 0 waits for any of ranks 1-2 in recv float32 4,096 bytes from "
        "any rank (outside any module, forward, train.py:20) in group world; ranks 1-2 issued no "
        "collective before the recording stops"
    )


def test_receives_from_any_rank_are_a_deadlock_if_every_rank_waits():
    calls = {0: [from_anyone(20, 3)], 1: [from_anyone(21, 3)], 2: [recv(22, 0, num_ranks=3)]}
    (finding,) = match_ranks(hang(calls, world_size=3))
    assert (finding.rule, finding.severity) == ("deadlock", Severity.ERROR)
    assert "a deadlock of receives: rank 0 waits for rank 1 in recv" in finding.fact
    assert {"train.py:20", "train.py:21"} <= {word.strip("),;") for word in finding.fact.split()}


def test_receive_from_any_rank_and_a_rank_in_a_collective_are_a_deadlock():
    calls = {0: [from_anyone(20, 2)], 1: [collective(30)]}
    (finding,) = match_ranks(hang(calls, world_size=2))
    assert finding.rule == "deadlock"
    assert "rank 0 waits for rank 1 in recv" in finding.fact
    assert "rank 1 waits for rank 0 in all_reduce" in finding.fact


def test_receive_from_any_rank_that_one_rank_can_still_answer_is_no_deadlock():
    calls = {0: [from_anyone(20, 3)], 1: [recv(21, 0, num_ranks=3)], 2: []}
    (finding,) = match_ranks(hang(calls, world_size=3))
    assert (finding.rule, finding.rank) == ("rank-behind", 2)
    assert "rank 2 is behind" in finding.fact


def test_receive_from_any_rank_that_no_rank_answered_before_it_ended_is_a_mismatch():
    calls = {0: [from_anyone(20, 3)], 1: [], 2: [send(21, 1, num_ranks=3)]}
    findings = match_ranks(hang(calls, world_size=3, finished=[1, 2]))
    assert [finding.rule for finding in findings] == ["rank-mismatch"]
    calls = {0: [from_anyone(20, 2)], 1: []}
    (finding,) = match_ranks(hang(calls, world_size=2, finished=[1]))
    assert finding.fact == (
        "in group world, no rank sends what rank 0 waits for: recv float32 4,096 bytes from any "
        "rank (outside any module, forward, train.py:20), although rank 1 ended"
    )


@pytest.mark.parametrize(
    "calls",
    [
        {0: [from_anyone(20, 2)], 1: [send(21, 0, num_ranks=2)]},
        {0: [from_anyone(20, 3)], 1: []},  # rank 2 left no file
    ],
    ids=["answered", "of unknown ranks"],
)
def test_receive_from_any_rank_that_may_be_over_gives_no_finding(calls):
    assert match_ranks(hang(calls, world_size=calls[0][0]["num_ranks"])) == ()


@pytest.mark.parametrize("receive", [recv(30, 0), from_anyone(30, 2)], ids=["one", "any"])
def test_send_and_receive_whose_tags_may_differ_are_a_gap(receive):
    recording = hang({0: [*TWO, send(20, 1)], 1: [*TWO, receive]}, world_size=2)
    reviewed = review(review(recording))
    assert reviewed.findings == ()
    (gap,) = set(reviewed.gaps) - set(recording.gaps)
    assert gap.place == "group world"
    assert gap.fact.startswith("rank 0 stopped after issuing send float32 4,096 bytes peer 1 (")
    assert "train.py:20) and rank 1 after issuing recv float32 4,096 bytes" in gap.fact
    assert gap.fact.endswith(
        "if their tags differ, the two ranks wait for each other; tags are not recorded"
    )


@pytest.mark.parametrize(
    ("calls", "options"),
    [
        ({0: [send(20, 1)], 1: [recv(30, 0)]}, {"backend": "nccl"}),  # it ignores tags
        ({0: [send(20, 1), *TWO], 1: [recv(30, 0), *TWO]}, {}),
        ({0: [send(20, 1, api="isend")], 1: [recv(30, 0)]}, {}),
        ({0: [send(20, 1)], 1: [recv(30, 0)]}, {"finished": [0]}),
        ({0: [send(20, 2)], 1: [recv(30, 2)]}, {}),
    ],
    ids=["NCCL", "later calls", "asynchronous", "finished", "other peers"],
)
def test_transfers_that_met_are_no_gap(calls, options):
    recording = hang(calls, world_size=2, **options)
    assert review(recording).gaps == recording.gaps


def test_phase_entered_after_a_send_shows_that_it_returned():
    recording = hang({0: [send(20, 1)], 1: [recv(30, 0)]}, world_size=2)
    recording = in_phase(recording, 0, "compute", 500)
    assert review(recording).gaps == recording.gaps


def test_hostile_positions_and_cycles_cost_little():
    calls = {rank: [recv(20, (rank + 1) % 2_000)] for rank in range(2_000)}
    (finding,) = match_ranks(hang(calls, world_size=2_000))
    assert len(finding.fact) < 1_500
    calls = {rank: [from_anyone(20, 2_000)] for rank in range(2_000)}
    (finding,) = review(hang(calls, world_size=2_000)).findings
    assert len(finding.fact) < 1_500


def simulated(calls):
    recording = hang(calls, world_size=len(calls), finished=calls)
    return replace(recording, run=replace(recording.run, is_simulated=True))


def test_simulated_receives_that_would_block_each_other_are_a_deadlock():
    calls = {0: [recv(20, 1), send(21, 1)], 1: [recv(30, 0), send(31, 0)]}
    (finding,) = match_ranks(simulated(calls))
    assert (finding.rule, finding.severity) == ("deadlock", Severity.ERROR)
    assert "train.py:20" in finding.fact
    assert "train.py:30" in finding.fact


@pytest.mark.parametrize(
    "calls",
    [
        {0: [send(21, 1), recv(20, 1)], 1: [recv(30, 0), send(31, 0)]},
        {0: [recv(20, 1, api="irecv"), send(21, 1)], 1: [recv(30, 0, api="irecv"), send(31, 0)]},
        {0: [recv(20, 1), send(21, 1)], 1: [recv(30, 0, thread="t"), send(31, 0)]},
        {0: [recv(20, 1), recv(20, 1)], 1: [send(31, 0), send(31, 0)]},
    ],
    ids=["sends first", "asynchronous", "on two threads", "in order"],
)
def test_simulated_transfers_that_can_go_on_are_no_finding(calls):
    assert match_ranks(simulated(calls)) == ()
