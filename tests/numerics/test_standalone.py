"""The comparison in repro scripts agrees with the comparison in shardscope."""

from __future__ import annotations

import pytest
import torch

from shardscope.numerics import comparison_source
from verdict_cases import NEARER, REWRITTEN, RIGHT, WRONG


@pytest.fixture(scope="module")
def check():
    names = {"torch": torch}
    exec(comparison_source(), names)
    return names["check"]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_outputs_are_reported(check, name):
    case = WRONG[name]
    assert check([case.compiled], [case.eager], [case.exact]).startswith("output 0")


@pytest.mark.parametrize("name", [*RIGHT, *NEARER])
def test_what_is_right_passes(check, name):
    case = {**RIGHT, **NEARER}[name]
    assert check([case.compiled], [case.eager], [case.exact]) == ""


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_program_that_is_written_otherwise_passes(check, name):
    case = REWRITTEN[name]
    runs = case.run(case.other), case.run(case.original), case.run_exact()
    samples = [list(case.run_rounded(seed).values()) for seed in range(1, 5)]
    assert check(*(list(values.values()) for values in runs), samples) == ""


def test_a_different_number_of_outputs_is_reported(check):
    assert check([1], [1, 2], [1, 2]) == "1 outputs instead of 2"


def test_the_source_is_short_and_needs_torch_alone():
    source = comparison_source()
    assert "shardscope" not in source
    assert "import" not in source
    assert len(source.splitlines()) < 90
