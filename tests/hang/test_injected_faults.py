"""Injected faults of each kind are named from each set of files: rank, place and class."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.hang.faults import KINDS
from benchmarks.hang.scoring import FILES, Case, choose_cases, score_case


def choose() -> list[Case]:
    """A case of each kind with each set of files, in a small world."""
    chosen: dict[tuple[str, tuple[str, ...]], Case] = {}
    for case in choose_cases(600, seed=11):
        size = 1
        for length in case.axes.values():
            size *= length
        if size <= 16:
            chosen.setdefault((case.fault.kind, case.files), case)
    return list(chosen.values())


CASES = choose()


def test_there_is_a_case_of_each_kind_with_each_set_of_files() -> None:
    wanted = {(kind, files) for kind in KINDS for files in FILES[kind]}
    assert {(case.fault.kind, case.files) for case in CASES} == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_is_named(tmp_path: Path, case: Case) -> None:
    score = score_case(case, tmp_path / "files")
    assert score.is_right, score.said
