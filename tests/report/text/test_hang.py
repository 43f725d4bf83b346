"""The sentence on a hang: what happened on which ranks, who waits, and where."""

from __future__ import annotations

import pytest

from shardscope.record import RankSpan, Recording, RunInfo, Source
from shardscope.record.base import CollectiveKind
from shardscope.record.hang_records import (
    CauseKind,
    Certainty,
    HangAnalysis,
    HangCall,
    HangCause,
    HangWait,
    SlowRank,
)
from shardscope.report.text.hang_causes import describe_hang, describe_ranks, summarize_hang
from shardscope.report.text.summary import render_text

CALL = HangCall(
    kind=CollectiveKind.ALL_REDUCE,
    op="all_reduce",
    num_bytes=64,
    source=Source(file="train.py", line=12),
)


def make_cause(kind: CauseKind, *ranks: int, group: str = "dp[0-3]") -> HangCause:
    return HangCause(
        kind=kind,
        certainty=Certainty.LIKELY,
        ranks=tuple(RankSpan(rank) for rank in ranks),
        fact="rank 3 is behind; ranks 0-2 wait for rank 3",
        remedy="Do something.",
        evidence=("it slept",),
        group=group,
        position=7,
    )


def make_hang(cause: HangCause | None, *, waiters: int = 3, num_ranks: int = 4) -> HangAnalysis:
    wait = HangWait(
        group="dp[0-3]",
        position=7,
        waiters=(RankSpan(0, waiters),),
        missing=(RankSpan(3),),
        call=CALL,
    )
    return HangAnalysis(
        is_hang=cause is not None,
        ranks=(RankSpan(0, num_ranks),),
        causes=() if cause is None else (cause,),
        waits=() if cause is None else (wait,),
    )


def test_a_sentence_names_the_rank_what_happened_and_the_call() -> None:
    hang = make_hang(make_cause(CauseKind.SKIPPED_CALL, 3))
    assert describe_hang(hang) == (
        "rank 3 skipped a collective (likely), and all other ranks wait for it in all_reduce 64 B "
        "at train.py:12"
    )
    assert summarize_hang(hang).startswith("It hangs: rank 3 skipped")


@pytest.mark.parametrize(
    ("waiters", "words"),
    [(1, "rank 0 waits for it"), (2, "ranks 0-1 wait for it"), (3, "all other ranks wait for it")],
)
def test_those_who_wait_are_named(waiters: int, words: str) -> None:
    hang = make_hang(make_cause(CauseKind.CRASH, 3), waiters=waiters)
    assert f"rank 3 ended (likely), and {words} in" in describe_hang(hang)


@pytest.mark.parametrize("kind", list(CauseKind))
def test_every_class_has_words_for_one_rank_and_for_several(kind: CauseKind) -> None:
    assert describe_ranks(make_cause(kind, 3)).count("rank 3") == 1
    assert "ranks 1,3 " in describe_ranks(make_cause(kind, 1, 3))
    assert describe_hang(make_hang(make_cause(kind, 3)))


def test_what_is_not_known_is_not_called_healthy() -> None:
    assert describe_hang(make_hang(None)) == "no rank waits for another in these files"
    alone = make_hang(None, num_ranks=1)
    assert describe_hang(alone) == "the files of a single rank do not show who waits for whom"


def test_the_cause_comes_before_the_tables_and_its_facts_are_a_list() -> None:
    hang = make_hang(make_cause(CauseKind.DATA_LOADING, 3))
    run = RunInfo(
        torch_version="",
        shardscope_version="",
        world_size=4,
        ranks=(RankSpan(0, 4),),
        instruments=("hang",),
    )
    lines = render_text(Recording(run=run, hangs=(hang,)), width=120).splitlines()
    assert lines[1].startswith("Hangs: rank 3 is in its data loader (likely), and all other")
    start = lines.index("Likely cause")
    assert lines[start + 1].startswith("Rank 3 is in its data loader  likely")
    assert lines[start + 2 : start + 5] == [
        "  – ranks 0-2 wait for rank 3",
        "  – it slept",
        "  → Do something.",
    ]
    assert lines.index("Who waits for whom") > start


def test_a_slow_rank_is_a_sentence_too() -> None:
    slow = SlowRank(
        rank=5,
        num_collectives=10,
        num_last=9,
        excess_ns=3_000_000_000,
        mean_late_ns=300_000_000,
        group="dp[0-7]",
    )
    hang = HangAnalysis(is_hang=False, ranks=(RankSpan(0, 8),), slow_ranks=(slow,))
    assert summarize_hang(hang) == "No rank waits; the others waited for rank 5 3.00 s in all."
