"""`check` on programs whose ranks diverge: as they are, or under a condition."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from shardscope.checks import check
from shardscope.errors import LaunchError
from shardscope.record import CheckOutcome, Finding, Recording, Severity, expand_ranks

PROGRAM = Path(__file__).parent / "programs" / "diverging.py"
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own"),
    pytest.mark.usefixtures("forked_launches"),
]


@cache
def run_check(mistake: str, *, size: int = 2, **options: object) -> Recording:
    return check(PROGRAM, mistake, num_per_node=size, **options).recording  # type: ignore[arg-type]


def line_of(code: str) -> int:
    lines = PROGRAM.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if code in line]
    return number


def find_only(recording: Recording) -> Finding:
    (finding,) = recording.findings
    return finding


def test_ranks_that_agree_have_no_finding_whatever_was_tried() -> None:
    recording = run_check("agreed")
    assert recording.findings == ()
    (record,) = recording.checks
    assert (record.world_size, record.num_steps, record.has_data) == (2, 3, True)
    assert record.is_complete
    conditions = {v.condition.partition(" (")[0]: v.outcome for v in record.variations}
    assert conditions["the batch of rank 1 has no entry 'image'"] is CheckOutcome.SAME
    assert conditions["the samples of rank 1 are shorter"] is CheckOutcome.SAME
    assert conditions["the batch of rank 1 is empty"] is CheckOutcome.SAME
    # All ranks read the same value of the flag: it cannot be another on rank 1.
    flag = f"item() at {PROGRAM.name}:{line_of('is_bad.item()')}"
    assert not any(flag in condition for condition in conditions)


def test_a_collective_of_the_last_rank_only_is_an_error_with_both_lines() -> None:
    finding = find_only(run_check("last_rank", size=3))
    assert (finding.rule, finding.severity) == ("divergence", Severity.ERROR)
    assert finding.rank == 2
    assert f"{PROGRAM.name}:{line_of('dist.all_reduce(loss.detach())')}" in finding.fact
    assert f"{PROGRAM.name}:{line_of('dist.all_reduce(parameter.grad)')}" in finding.fact
    assert "ranks 0-1 issue all_reduce" in finding.fact
    assert "rank 2 issues all_reduce" in finding.fact
    assert "every rank" in finding.remedy


@pytest.mark.parametrize(
    ("mistake", "condition", "code", "remedy"),
    [
        ("nan", "is False on rank 1", "not torch.isfinite(loss)", "all_reduce the flag"),
        ("modality", "rank 1 has no entry 'image'", "in enumerate(loader)", "on every rank"),
        (
            "all_to_all_of_own_length",
            "the samples of rank 1 are shorter",
            "in enumerate(loader)",
            "Pad to a common size",
        ),
    ],
)
def test_a_condition_of_a_rank_that_lets_ranks_diverge_is_named(
    mistake: str, condition: str, code: str, remedy: str
) -> None:
    recording = run_check(mistake)
    finding = recording.findings[0]
    assert (finding.rule, finding.severity) == ("possible-divergence", Severity.WARNING)
    assert condition in finding.fact
    assert remedy in finding.remedy
    assert finding.source is not None
    assert finding.source.line == line_of(code)
    diverged = [v for v in recording.checks[0].variations if v.outcome is CheckOutcome.DIVERGED]
    assert any(condition in variation.condition for variation in diverged)


def test_an_all_to_all_names_what_is_sent_and_what_is_expected() -> None:
    fact = run_check("all_to_all_of_own_length").findings[0].fact
    assert "rank 0 sends 256 bytes to rank 1" in fact
    assert "rank 1 expects 64 bytes" in fact


def test_receives_that_wait_for_each_other_are_an_error() -> None:
    finding = find_only(run_check("transfers"))
    assert finding.rule == "divergence"
    assert "wait for each other" in finding.fact
    assert "batch_isend_irecv" in finding.remedy


def test_without_variations_only_the_program_as_it_is_is_compared() -> None:
    recording = run_check("modality", variations=False)
    assert recording.findings == ()
    assert recording.checks[0].variations == ()


def test_a_program_that_raises_is_no_divergence_but_an_error_of_the_user() -> None:
    with pytest.raises(LaunchError, match="Rank 1 failed: ValueError: no more data"):
        run_check("exception")


def test_roles_of_a_large_world_are_compared_without_data() -> None:
    recording = check(PROGRAM, "last_rank", num_nodes=8, num_per_node=8).recording
    (record,) = recording.checks
    assert not record.has_data
    assert [role.rank for role in record.roles] == [0, 1, 63]
    represented = [rank for role in record.roles for rank in expand_ranks(role.ranks)]
    assert sorted(represented) == list(range(64))
    finding = find_only(recording)
    assert finding.rank == 63
    assert "rank 63 issues all_reduce" in finding.fact


def test_receives_of_simulated_ranks_that_wait_for_each_other_are_an_error() -> None:
    finding = find_only(check(PROGRAM, "transfers", num_nodes=2).recording)
    assert finding.rule == "divergence"
    assert "a deadlock of receives: rank 0 waits for rank 1 in recv" in finding.fact


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_groups_in_another_order_are_an_error(num_nodes: int) -> None:
    """With data, and of ranks that run one after the other without."""
    num_per_node = 4 if num_nodes == 1 else 8
    result = check(PROGRAM, "group_order", num_nodes=num_nodes, num_per_node=num_per_node)
    finding = find_only(result.recording)
    assert result.recording.checks[0].has_data == (num_nodes == 1)
    assert finding.rule == "divergence"
    assert "rank 0 waits in all_reduce" in finding.fact
    assert "Issue the collectives of these groups in the same order" in finding.remedy


def test_ranks_that_validate_on_the_same_data_decide_the_same() -> None:
    program = PROGRAM.with_name("evaluating.py")
    recording = check(program, num_per_node=2).recording
    assert recording.findings == ()
    conditions = [variation.condition for variation in recording.checks[0].variations]
    assert any("item()" in c and "is NaN on ranks 0-1" in c for c in conditions)
