"""`parity -- program`: the ranks of a program against the same program as a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.errors import LaunchError
from shardscope.launch.parity import compare_program
from shardscope.launch.program import Program
from shardscope.record import TOLERABLE, Recording, TensorKind, load

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own"),
    pytest.mark.usefixtures("forked_launches"),
]


def compare(ways: str, *single_args: str) -> Recording:
    program = Program(str(PROGRAMS / "compared.py"), (ways,))
    return compare_program(program, num_per_node=2, single_args=single_args)


def find_wrong(recording: Recording) -> dict[TensorKind, set[str]]:
    (parity,) = recording.parity
    assert parity.tensors
    wrong: dict[TensorKind, set[str]] = {}
    for verdict in parity.tensors:
        if verdict.agreement not in TOLERABLE:
            wrong.setdefault(verdict.kind, set()).add(verdict.name)
    return wrong


def gap_places(recording: Recording) -> set[str]:
    return {gap.place for gap in recording.gaps}


def test_a_correct_program_agrees_whatever_its_loop_does() -> None:
    """DDP with tied weights, dropout, a loss in the model, accumulation, scaling and clipping."""
    recording = compare("single+hf+tied+dropout+batch_norm+accumulated+scaled", "--alone")
    assert find_wrong(recording) == {}
    assert recording.findings == ()
    (parity,) = recording.parity
    assert parity.has_exact
    assert parity.has_backward
    assert parity.is_in_processes
    assert [verdict.name for verdict in parity.tensors][:2] == [
        "['loss'] of rank 0",
        "['logits'] of rank 0",
    ]
    gradients = [v.name for v in parity.tensors if v.kind is TensorKind.GRADIENT]
    assert "embed.weight" in gradients
    assert "head.weight" not in gradients  # tied
    # A BatchNorm on each rank computes other gradients than on all samples at once.
    assert gap_places(recording) == {"data", "inputs", "random numbers", "buffers"}
    assert {v.kind for v in parity.tensors} >= {
        TensorKind.NORM,
        TensorKind.CLIPPED,
        TensorKind.UPDATED,
    }
    assert {v.step for v in parity.tensors} == {1, 2}
    assert recording.run.world_size == 2
    assert recording.run.instruments == ("parity",)


def test_fsdp_in_mixed_precision_agrees_within_its_own_noise() -> None:
    recording = compare("fsdp_bf16")
    assert find_wrong(recording) == {}
    assert "double precision" in gap_places(recording)


def test_a_program_with_a_mesh_of_four_is_replayed_on_a_mesh_of_one(tmp_path: Path) -> None:
    file = str(tmp_path / "out.json")
    program = [str(PROGRAMS / "compared.py"), "mesh"]
    words = ["parity", "--nproc-per-node", "4", "-o", file, "--", *program]
    result = CliRunner().invoke(main, words, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "tensors agree (losses, gradients, optimizer state and more of 2 steps)" in result.output
    recording = load(file)
    assert [(axis.name, axis.size) for axis in recording.run.axes] == [("dp", 2), ("tp", 2)]
    assert find_wrong(recording) == {}
    (parity,) = recording.parity
    gradients = {v.name for v in parity.tensors if v.kind is TensorKind.GRADIENT}
    assert gradients >= {"embed.weight", "up.weight", "down.weight", "down.bias", "head.weight"}


@pytest.mark.parametrize(
    ("ways", "rule", "clause"),
    [
        ("tp_without_reduction", "parity-missing-reduction", "Each rank holds only its partial"),
        ("tp_bias", "parity-double-reduction", "multiple of the bias, which every rank adds"),
    ],
)
def test_a_layer_sharded_by_hand_is_blamed(ways: str, rule: str, clause: str) -> None:
    recording = compare(ways)
    (finding,) = recording.findings
    assert (finding.rule, finding.subject) == (rule, "down")
    assert "`down` is the first module whose output differs; its inputs agree" in finding.fact
    assert clause in finding.fact
    assert TensorKind.OUTPUT in find_wrong(recording)
    assert recording.parity[0].divergences[0].module == "down"


def test_a_layer_sharded_by_hand_agrees_if_it_is_right() -> None:
    recording = compare("tp+batch_norm+hf+dataclass")
    assert find_wrong(recording) == {}
    assert recording.findings == ()
    names = {(verdict.name, verdict.kind) for verdict in recording.parity[0].tensors}
    assert (".loss", TensorKind.OUTPUT) in names
    assert ("norm.running_mean", TensorKind.BUFFER) in names
    assert {("up.weight", kind) for kind in (TensorKind.GRADIENT, TensorKind.UPDATED)} <= names


def test_gradients_that_are_not_synchronized_are_found() -> None:
    recording = compare("no_sync")
    (finding,) = recording.findings
    assert finding.rule == "parity-missing-reduction"
    assert "Outputs agree. No gradient is reduced over ranks." in finding.fact
    assert TensorKind.GRADIENT in find_wrong(recording)


def test_the_sum_of_gradients_of_mean_losses_is_wrong() -> None:
    recording = compare("summed")
    (finding,) = recording.findings
    assert (finding.rule, finding.subject) == ("parity-scaled", "all gradients")
    assert "reduced over the ranks to their sum" in finding.fact
    assert "The loss of every rank has 2 times the weight that it should" in finding.fact
    assert set(find_wrong(recording)) == {TensorKind.GRADIENT}


def test_weights_that_depend_on_the_rank_are_found() -> None:
    recording = compare("unequal")
    (finding,) = recording.findings
    assert finding.rule == "parity-weights"
    assert "different values before the first step" in finding.fact
    assert "up.weight" in find_wrong(recording)[TensorKind.PARAMETER]


def test_a_program_that_needs_several_ranks_is_a_sentence_with_the_remedy() -> None:
    with pytest.raises(LaunchError, match="cannot be replayed as a single process") as raised:
        compare("single")
    assert "needs more than one rank" in str(raised.value)
    assert '--single-args "--tp 1"' in str(raised.value)


def test_ranks_that_send_to_each_other_are_refused() -> None:
    with pytest.raises(LaunchError, match="as stages of a pipeline and ring attention do"):
        compare("sent")


def test_steps_are_compared_also_where_a_model_returns_no_tensor() -> None:
    recording = compare("tp+hf+opaque")
    assert find_wrong(recording) == {}
    assert recording.findings == ()
    kinds = {verdict.kind for verdict in recording.parity[0].tensors}
    assert TensorKind.OUTPUT not in kinds
    assert kinds >= {TensorKind.LOSS, TensorKind.GRADIENT, TensorKind.UPDATED}


def test_one_rank_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(LaunchError, match="Give --nproc-per-node 2 or more"):
        compare_program(Program(str(PROGRAMS / "compared.py"), ("ddp",)), num_per_node=1)
