"""The figures that are told first: in the terminal and on the page the same ones."""

from __future__ import annotations

from sample_recordings import make_collective, make_recording, make_run
from shardscope.record import MemoryProfile, Phase, Recording
from shardscope.report.figures import list_figures
from shardscope.report.mentioned import add_mentioned_modules
from shardscope.report.page.build import build_page
from shardscope.report.traffic import fold_ranks


def tell(recording: Recording) -> dict[str, str]:
    return {one.view: one.words for one in list_figures(recording, fold_ranks(recording))}


def test_a_sentence_says_what_its_cards_say(any_recording: Recording) -> None:
    # A page has modules also where a recording merely names them.
    recording = add_mentioned_modules(any_recording)
    figures = list_figures(recording, fold_ranks(recording))
    for figure in figures:
        for card in figure.cards:
            assert card.value in figure.words
    views = [one.view for one in figures for _ in one.cards]
    assert [fact.view for fact in build_page(any_recording).facts] == views


def test_ranks_that_differ_are_told_as_the_most() -> None:
    calls = tuple(make_collective(rank=rank) for rank in range(3) for _ in range(rank))
    words = tell(make_recording(calls, ranks=(0, 1, 2)))["communication"]
    assert words == "≤ 2 collectives per rank, ≤ 14.0 KiB sent (ring estimate); ranks 0-2 of 8"


def test_a_first_step_that_needs_most_is_told() -> None:
    profile = MemoryProfile(
        rank=3,
        peak_bytes=2**30,
        peak_order=0,
        peak_phase=Phase.BACKWARD,
        first_peak_bytes=2**31,
    )
    told = tell(make_recording(memory=(profile,)))
    estimate = "(estimated: the step ran on tensors without data)"
    assert told["memory"] == f"2.00 GiB at the peak, in the first step, on rank 3 {estimate}"


def test_a_trace_of_silence_is_told() -> None:
    assert tell(make_recording(run=make_run(instruments=("trace",)))) == {
        "": "no collectives were issued"
    }
    assert tell(make_recording()) == {}
