"""Programs in the style of large trainers: several meshes, stages, experts and `parallelize`s."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from older_torch import IS_OLDER
from shardscope.launch.api import run
from shardscope.record import CollectiveKind, FullyShard, Phase, Recording
from shardscope.record.ranks import expand_ranks

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own"),
    pytest.mark.usefixtures("forked_launches"),
]


@pytest.fixture(scope="module")
def recording() -> Recording:
    """One step of every stage of own_parallelize.py."""
    result = run(str(PROGRAMS / "own_parallelize.py"), ranks="0,4", steps=1)
    assert result.failures == ()
    return result.recording


def test_the_axes_are_those_that_hold_the_parameters(recording: Recording) -> None:
    assert [(axis.name, axis.size) for axis in recording.run.axes] == [("pp", 2), ("dp", 4)]
    assert {call.axis for call in recording.collectives} == {"pp", "dp", "efsdp", "ep"}


def test_a_rank_of_each_stage_is_run(recording: Recording) -> None:
    assert expand_ranks(recording.run.ranks) == (0, 4)
    assert sorted(profile.rank for profile in recording.memory) == [0, 4]


def test_every_stage_of_a_rank_is_audited_by_the_names_of_its_trace(recording: Recording) -> None:
    placed = {
        f"{module.name}.{parameter.name}": parameter.fsdp_group
        for module in recording.modules
        for parameter in module.parameters
        if parameter.local_bytes is not None
    }
    for stage in ("Stage0", "Stage1"):
        assert placed[f"{stage}.dense.weight"] == stage
        assert placed[f"{stage}.experts.weight"] == f"{stage}.experts"
    owners = {call.owner for call in recording.collectives if isinstance(call.cause, FullyShard)}
    assert owners == set(placed.values())


def test_a_step_that_ran_disproves_what_the_audit_expects_to_fail(recording: Recording) -> None:
    assert [finding.rule for finding in recording.findings] == []


def test_gradients_are_reduced_in_backward_although_the_schedule_asks_for_it(
    recording: Recording,
) -> None:
    calls = [call for call in recording.collectives if call.kind is CollectiveKind.REDUCE_SCATTER]
    assert {call.phase for call in calls} == {Phase.BACKWARD}
    # Not for each microbatch: two groups in two stages.
    assert Counter(call.rank for call in calls) == {0: 4, 4: 4}


def test_tokens_are_sent_to_experts_and_back(recording: Recording) -> None:
    calls = [call for call in recording.collectives if call.kind is CollectiveKind.ALL_TO_ALL]
    forward = [call for call in calls if call.rank == 0 and call.phase is Phase.FORWARD]
    # Numbers of tokens, tokens and results: for 2 stages and 2 microbatches, and for the two
    # calls in which the stages learn their shapes.
    assert len(forward) == 3 * (2 * 2 + 2)
    assert {call.owner for call in calls} == {"Stage0.experts", "Stage1.experts"}
    facts = [gap.fact for gap in recording.gaps if "own_parallelize.py" in gap.place]
    assert facts
    assert all("as if each expert got as many tokens as any other" in fact for fact in facts)


@pytest.mark.skipif(IS_OLDER, reason="before torch 2.13 it is counted in full")
def test_the_mask_of_a_compiled_function_is_not_counted_in_full(recording: Recording) -> None:
    dense_mask_bytes = 8192 * 8192
    assert all(profile.peak_bytes < 2.1 * dense_mask_bytes for profile in recording.memory)


def test_a_step_of_a_trainer_that_checks_for_overflow_is_not_skipped() -> None:
    result = run(str(PROGRAMS / "own_optimizer.py"), ranks="3")
    assert result.failures == ()
    assert result.num_steps == 2
    recording = result.recording
    # A buffer of gradients and a flag, in each step.
    assert [call.input_bytes for call in recording.collectives] == [4 * (32 * 32 + 32), 1] * 2
    facts = " ".join(gap.fact for gap in recording.gaps)
    assert "could not be" not in facts
    (profile,) = recording.memory
    assert profile.peak_bytes > 0
