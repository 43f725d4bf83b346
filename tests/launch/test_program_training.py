"""`parity -- program`: entire training steps of unmodified programs, right ones and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardscope.launch.parity import compare_program
from shardscope.launch.program import Program
from shardscope.parallel.equivalence import StepResult
from shardscope.parallel.parity.captured_steps import CapturedTraining, ReplayResult, Replays
from shardscope.parallel.parity.captured_training import depends_on_order
from shardscope.record import TOLERABLE, Finding, Recording, Severity, TensorKind

PROGRAM = Path(__file__).parent / "programs" / "trained.py"
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own"),
    pytest.mark.usefixtures("forked_launches"),
]
OF_A_STEP = {
    TensorKind.LOSS,
    TensorKind.GRADIENT,
    TensorKind.SETTING,
    TensorKind.STATE,
    TensorKind.UPDATED,
}


def test_accelerate_steps_its_scheduler_for_each_rank_on_purpose() -> None:
    pytest.importorskip("accelerate")
    program = Program(str(PROGRAM.with_name("accelerated.py")), ())
    recording = compare_program(program, num_per_node=2)
    assert find_alarms(recording) == []
    details = {v.detail for v in recording.parity[0].tensors if v.kind is TensorKind.SETTING}
    assert "Accelerate steps a scheduler once for each rank" in details


@pytest.mark.parametrize("words", [(), ("summed", "masked")])
def test_ranks_with_parts_of_one_sequence_are_compared_together(words: tuple[str, ...]) -> None:
    program = Program(str(PROGRAM.with_name("sequence.py")), words)
    recording = compare_program(program, num_per_node=2)
    alarms = find_alarms(recording)
    assert [finding.rule for finding in alarms] == ["parity-double-reduction"] * ("summed" in words)
    assert all("Every gradient is 2 times as large" in finding.fact for finding in alarms)
    # A single process cannot be called with a part of the sequence and the mask of all of it.
    places = [gap.place for gap in recording.gaps]
    assert places == ["calls of the model"] * ("masked" in words)


def compare(ways: str) -> Recording:
    return compare_program(Program(str(PROGRAM), (ways,)), num_per_node=2)


def find_alarms(recording: Recording) -> list[Finding]:
    return [finding for finding in recording.findings if finding.severity is not Severity.INFO]


@pytest.mark.parametrize(
    ("ways", "kinds"),
    [
        # The loss of each rank is divided by the tokens of all ranks; rank 0 evaluates at the end.
        ("ddp+loader+padded+counted+accumulated+reduced+saved", OF_A_STEP),
        ("fsdp+slices+by_hand", OF_A_STEP),
        ("tp+random", OF_A_STEP),
        # As a single process, it takes twice as many micro-batches.
        ("ddp+random+global+sgd", OF_A_STEP),
        # A mask is drawn for all samples in a single call.
        ("ddp+random+masked+counted", OF_A_STEP),
        ("zero+sharded+clipped+sgd", {*OF_A_STEP, TensorKind.NORM}),
    ],
)
def test_a_right_program_trains_as_a_single_process_does(ways: str, kinds: set[TensorKind]) -> None:
    recording = compare(ways)
    assert find_alarms(recording) == []
    assert recording.gaps == ()
    (parity,) = recording.parity
    assert all(verdict.agreement in TOLERABLE for verdict in parity.tensors)
    for step in (1, 2):
        assert {verdict.kind for verdict in parity.tensors if verdict.step == step} >= kinds
    assert TensorKind.OUTPUT in {verdict.kind for verdict in parity.tensors}


@pytest.mark.parametrize(
    ("ways", "rule", "clause"),
    [
        (
            "ddp+loader+padded",
            "parity-scaled",
            "a factor of its own: 0.9444 on rank 0, 1.062 on rank 1",
        ),
        (
            "ddp+random+global+bad_accumulation",
            "parity-scaled",
            "The loss of every rank has 0.5 times the weight that it should",
        ),
        ("fsdp+random+by_hand+bad_norm", "parity-norm", "from its own shards only"),
        ("ddp+random+bad_clip", "parity-clipping", "Rank 1 does not clip them, and the others do"),
        ("fsdp+random+bad_early", "parity-stale", "holds none of the model's parameters"),
    ],
)
def test_a_silent_mistake_is_found(ways: str, rule: str, clause: str) -> None:
    recording = compare(ways)
    (finding,) = find_alarms(recording)
    assert finding.rule == rule
    assert clause in finding.fact


def test_what_differs_first_in_a_later_step_is_located_in_that_step() -> None:
    (finding,) = find_alarms(compare("tp+random+bad_later"))
    assert "The first tensor that differs is the input of `up`" in finding.fact


def test_samples_that_are_paired_by_position_have_no_right_order() -> None:
    def train(gradient: float) -> CapturedTraining:
        weight = {"weight": torch.full((4,), gradient)}
        return CapturedTraining([StepResult([], weight, {})])

    result = ReplayResult([], [], {}, {})
    replays = Replays(result, result, trainings=[train(1.0), train(1.0 + 1e-6), None, None])
    assert depends_on_order(replays, train(-1.0))
    assert not depends_on_order(replays, train(1.0 + 1e-5))
    noisy = Replays(result, result, trainings=[train(1.0), train(1.01), None, None])
    assert not depends_on_order(noisy, train(1.05))


def test_settings_of_the_optimizer_and_the_samples_of_ranks_are_compared() -> None:
    recording = compare("ddp+loader+bad_sampler+bad_scheduler")
    settings, samples = find_alarms(recording)
    assert settings.subject == "the optimizer's settings"
    assert "lr is 0.0025 on the ranks and 0.005 on the single device" in settings.fact
    assert samples.rule == "parity-same-samples"
    assert "ranks 0-1 call the model with the same samples" in samples.fact
