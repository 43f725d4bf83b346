"""Key metrics: the same in the terminal and on the page."""

from __future__ import annotations

from sample_recordings import make_collective, make_recording, make_run
from shardscope.record import MemoryProfile, Phase, Recording
from shardscope.report.html.html import build_page
from shardscope.report.model.select import infer_modules
from shardscope.report.model.traffic_totals import fold_ranks
from shardscope.report.text.key_metrics import list_key_metrics


def describe_metrics(recording: Recording) -> dict[str, str]:
    return {
        metric.view: metric.words for metric in list_key_metrics(recording, fold_ranks(recording))
    }


def test_a_summary_sentence_has_the_values_of_its_cards(any_recording: Recording) -> None:
    # A page has modules also where a recording merely names them.
    recording = infer_modules(any_recording)
    metrics = list_key_metrics(recording, fold_ranks(recording))
    for metric in metrics:
        for card in metric.cards:
            assert card.value in metric.words
    views = [metric.view for metric in metrics for _ in metric.cards]
    assert [fact.view for fact in build_page(any_recording).facts] == views


def test_ranks_that_differ_are_reported_by_their_maximum() -> None:
    calls = tuple(make_collective(rank=rank) for rank in range(3) for _ in range(rank))
    words = describe_metrics(make_recording(calls, ranks=(0, 1, 2)))["communication"]
    assert words == "≤ 2 collectives per rank, ≤ 14.0 KiB sent (ring estimate); ranks 0-2 of 8"


def test_a_first_step_that_needs_most_is_reported() -> None:
    profile = MemoryProfile(
        rank=3,
        peak_bytes=2**30,
        peak_order=0,
        peak_phase=Phase.BACKWARD,
        first_peak_bytes=2**31,
    )
    metrics = describe_metrics(make_recording(memory=(profile,)))
    estimate = "(estimated: the step ran on tensors without data)"
    assert metrics["memory"] == f"2.00 GiB at the peak, in the first step, on rank 3 {estimate}"


def test_a_trace_without_collectives_is_reported() -> None:
    assert describe_metrics(make_recording(run=make_run(instruments=("trace",)))) == {
        "": "no collectives were issued"
    }
    assert describe_metrics(make_recording()) == {}
