"""explain tells the truth: numbers and lines of a table of functions, written by hand."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from explain_cases import CASES, Case
from shardscope import explain, explaining
from shardscope.record import Explanation, Recording


def explain_case(case: Case) -> Recording:
    """One call by explain; several of one compiled function."""
    torch._dynamo.reset()
    function: Any = case.make()
    if len(case.calls) == 1:
        return explain(function, *case.calls[0])
    compiled = torch.compile(function, backend="eager")
    with explaining() as explained, suppress(ValueError):
        for arguments in case.calls:
            compiled(*arguments)
    return explained.recording


def numbers_of(one: Explanation) -> dict[str, int]:
    return {
        "graphs": one.num_graphs,
        "ops": one.num_ops,
        "sites": one.num_break_sites,
        "events": one.num_break_events,
        "recompiles": one.num_recompiles,
        "skips": one.num_skipped_frames,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_counts_are_exact_for_every_case(case: Case) -> None:
    recording = explain_case(case)
    (found,) = recording.explanations
    wanted = {name: getattr(case, name) for name in numbers_of(found)}
    assert bool(found.failure) == (case.name == "uncaught_exception"), found.failure
    assert numbers_of(found) == wanted
    assert recording.gaps == ()
    lines = [site.source.text for site in found.break_sites]
    assert [line for line in lines if not line.endswith("# break")] == []


def test_there_are_enough_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 30
