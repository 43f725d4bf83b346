"""Parallel programs on two and four real gloo ranks: run, trained, saved, compiled."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import rank_parallel
from parallel_cases import all_cases
from parallel_cases.case import Case
from rank_parallel import parse
from rank_processes import run_ranks

TWO = [
    "fused gated mlp",
    "tied embedding and head",
    "cross-entropy over a cut vocabulary",
    "convolutions on cut data",
    "experts cut by expert",
    "attention with rotary positions in complex numbers",
    "llama with its sequence cut",
    "buffer written by index, cut where it is written",
    "an op that nobody knows",
    "takes a nest",
    "an empty batch",
    "fully sharded on 2",
    "open batch cut, fully sharded",
    "one step | gpt",
    "saved | llama with its sequence cut",
    "compiled | convolutions and batch norm",
    "built | gated mlp",
]
FOUR = [
    "mlp with bias, hidden some ranks empty",
    "llama on a 2-d mesh, sequence cut",
    "fully sharded beside tensor parallel",
    "one dim cut by two axes, some ranks empty",
    "one step | replicas of fully sharded",
    "compiled | two axes",
]
CASES = all_cases()


def case_of(name: str) -> Case:
    return CASES[parse(name)[1]]


# One test for each world: workers that share the tests out would each start their own.
@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks_compute_what_one_device_does(size: int, tmp_path: Path) -> None:
    names = TWO if size == 2 else FOUR
    program = Path(rank_parallel.__file__)
    # Each cuts its programs itself: ranks of one's own mind would not agree by chance.
    ended = run_ranks(size, program, str(tmp_path), *names, timeout_s=400, is_fresh=size == 2)
    for code, printed in ended:
        assert code == 0, printed
    wrong = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert wrong == [{}] * size


def test_cases_are_made_for_as_many_ranks() -> None:
    for size, names in ((2, TWO), (4, FOUR)):
        meshes = {name: case_of(name).mesh for name in names}
        sizes = {
            name: math.prod(int(part.split("=")[1]) for part in mesh.split(","))
            for name, mesh in meshes.items()
        }
        assert sizes == dict.fromkeys(names, size)
