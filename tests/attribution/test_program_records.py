"""What the records of a program take from the process: the number of ranks on its node."""

from __future__ import annotations

import pytest

from shardscope.attribution.program_records import describe_run

TORCHRUN = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}
CASES = [
    ({}, None),
    (TORCHRUN, 4),
    (TORCHRUN | {"WORLD_SIZE": "8"}, None),  # of another world than the simulated one
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, None),
    ({"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
    ({"PMI_SIZE": "16", "MPI_LOCALNRANKS": "2"}, 2),
    ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "4(x4)"}, 4),
    ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x1),4(x2)"}, None),
    # torchrun, started once on each node by Slurm
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"} | TORCHRUN, 4),
]


@pytest.mark.parametrize(("variables", "expected"), CASES)
def test_the_number_of_ranks_on_a_node_is_what_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int | None
) -> None:
    for name in {name for known, _ in CASES for name in known}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert describe_run(0, 16, (), instrument="trace").ranks_per_node == expected
