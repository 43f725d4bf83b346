"""What `check` has tried, as text: how many variations, what came of each, what was not tried."""

from __future__ import annotations

from msgspec.structs import replace

from checked_programs import make_checked
from shardscope.record import Severity
from shardscope.report.text.checked_ranks import describe_ranks, summarize_check
from shardscope.report.text.summary import render_plain, render_text
from shardscope.report.text.views import render_views


def test_variations_that_make_ranks_diverge_come_first() -> None:
    text = render_text(make_checked(Severity.WARNING), width=100)
    assert "Check  2 of 2 ranks were run, with data, 6 steps, to the end of the program" in text
    assert (
        "4 variations: ranks diverge under 1; issue the same collectives under 1; raise an "
        "exception under 1; 1 not tried." in " ".join(text.split())
    )
    rows = [line for line in text.splitlines() if line.startswith("item() at")]
    assert [row.split("  ")[-1].strip() for row in rows] == [
        "ranks diverge",
        "not tried: not reached",
        "raises: ValueError: no loss",
        "same collectives",
    ]


def test_a_check_that_was_not_varied_says_so() -> None:
    (check,) = make_checked(Severity.ERROR).checks
    assert summarize_check(check) == "What ranks see was not varied."
    nothing = replace(check, is_varied=True)
    assert summarize_check(nothing).startswith("No decision of the program depends on")


def test_ranks_that_stand_for_others_are_counted() -> None:
    (check,) = make_checked().checks
    large = replace(check, world_size=1024, has_data=False, is_complete=False)
    assert describe_ranks(large) == "2 of 1,024 ranks were run, without data, 6 steps, then ended"


def test_the_correctness_view_has_it() -> None:
    text = render_plain(render_views(make_checked(), ["proof"]), width=120)
    assert "not tried: not reached" in text
