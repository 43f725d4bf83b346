"""The section on phases: what took how long, on which rank most, at any width."""

from __future__ import annotations

import pytest

from sample_recordings import make_collective, make_phases, make_recording, make_span
from shardscope.record import Gap, PhaseTotal, sum_spans
from shardscope.record.units import format_duration
from shardscope.report.text.summary import render_text


def _rows(recording, width=100):
    """The cells of the section's table, by phase."""
    lines = render_text(recording, width=width).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("Phases"))
    return lines[start], [" ".join(line.split()) for line in lines[start + 1 :]]


def test_phases_are_shown_longest_first_with_calls_and_times():
    spans = (
        make_span("inner", 0, 1_500_000, depth=1),
        make_span("inner", 2_000_000, 500_000, depth=1),
        make_span("outer", 0, 12_300_000, self_ns=10_300_000),
    )
    title, rows = _rows(make_recording(spans=spans))
    assert title == "Phases  self: less phases within it"
    assert rows == [
        "phase calls total self mean max",
        "outer 1 12.3 ms 10.3 ms 12.3 ms 12.3 ms ███████",
        "inner 2 2.00 ms 2.00 ms 1.00 ms 1.50 ms █",
    ]


def test_ranks_that_differ_show_the_slowest():
    spans = tuple(make_span("load", 0, 1_000 * (rank + 1), rank=rank) for rank in range(4))
    title, rows = _rows(make_recording(spans=spans, ranks=(0, 1, 2, 3)))
    assert "≤: ranks differ" in title
    assert rows[1].startswith("load 1 ≤ 4.00 µs ≤ 4.00 µs ≤ 4.00 µs 4.00 µs rank 3")


def test_clocks_are_named_where_there_is_more_than_the_hosts():
    spans = (make_span("h", 0, 5), make_span("h", 0, 7_000, device="cuda:0"))
    _, rows = _rows(make_recording(spans=spans))
    assert rows[0].startswith("phase clock calls")
    assert rows[1].startswith("h cuda:0 1 7.00 µs")
    assert rows[2].startswith("h cpu 1 5 ns")


def test_of_very_many_phases_the_longest_are_shown():
    spans = tuple(make_span(f"step {n}", n, n + 1) for n in range(100))
    _, rows = _rows(make_recording(spans=spans))
    assert rows[1].startswith("step 99 ")
    assert rows[-1].startswith("… 60 more, which took less")
    assert len(rows) == 42


def test_a_recording_of_phases_alone_does_not_ask_for_collectives():
    text = render_text(make_phases())
    assert "No collectives" not in text
    lost = make_recording(spans=(make_span(),), gaps=(Gap(place="x", fact="y", is_loss=True),))
    assert "No collectives are left" in render_text(lost)


@pytest.mark.parametrize("by", ["module", "axis", "kind", "cause"])
def test_phases_stand_below_the_collectives_in_every_view(by):
    recording = make_recording((make_collective(),), spans=(make_span("load"),))
    lines = render_text(recording, by=by).splitlines()
    assert lines[-1].split()[0] == "load"
    assert "Phases" not in render_text(make_recording((make_collective(),)), by=by)


def test_totals_count_a_phase_within_itself_once():
    spans = (
        make_span("f", 2, 4, depth=1, is_inner=True),
        make_span("f", 0, 10, self_ns=6),
        make_span("f", 20, 2, rank=1),
    )
    assert sum_spans(spans) == (
        PhaseTotal(name="f", count=2, num_inner=1, total_ns=10, self_ns=10, max_ns=10),
        PhaseTotal(name="f", rank=1, count=1, total_ns=2, self_ns=2, max_ns=2),
    )
    assert sum_spans(spans)[0].mean_ns == 10
    assert sum_spans(spans[:1])[0].mean_ns == 0  # the one around it is not known


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (99_950, "100 µs"),
        (999_500, "1.00 ms"),
        (12_345_678, "12.3 ms"),
        (1_000_000_000, "1.00 s"),
        (86_400_000_000_000, "86,400 s"),
    ],
)
def test_durations_have_three_digits_and_the_unit_that_suits(ns, text):
    assert format_duration(ns) == text
