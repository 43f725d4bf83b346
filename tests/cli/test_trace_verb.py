"""`shardscope trace` as a user would type it: targets, meshes, views and outcomes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cli.small_target import TARGET, run, write
from shardscope.errors import OutputError
from shardscope.record import load
from warm_python import Program


def test_step_of_a_file_is_recorded_printed_and_saved(here: Path) -> None:
    result = run(write(here, TARGET), "--mesh", "dp=8")
    assert result.exit_code == 0, result.output
    assert "dp=8" in result.output
    assert "saved train.shardscope.json.gz" in result.output
    recording = load(here / "train.shardscope.json.gz")
    kinds = [c.kind.value for c in recording.collectives]
    assert kinds == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert recording.run.world_size == 8
    assert recording.run.is_simulated


def test_rank_and_output_are_the_users_choice(here: Path) -> None:
    result = run(write(here, TARGET), "--mesh", "dp=4,tp=2", "--rank", "5", "-o", "five.json")
    assert result.exit_code == 0, result.output
    assert load(here / "five.json").collectives[0].rank == 5


def test_stream_holds_what_happened_before_the_step_was_killed(here: Path) -> None:
    text = TARGET + (
        "\ndef step(model, batch):\n    import os\n    model(batch)\n    os._exit(9)  # killed\n"
    )
    arguments = ["trace", write(here, text), "--mesh", "dp=2", "--stream", "run-{rank}.jsonl"]
    assert Program("-m", "shardscope", *arguments).wait().returncode == 9
    recording = load(here / "run-0.jsonl")
    assert [c.kind.value for c in recording.collectives] == ["all_gather"] * 2
    assert [(stop.rank, stop.error) for stop in recording.stops] == [(0, None)]


def test_stream_that_cannot_be_written_is_refused_before_the_program_runs(here: Path) -> None:
    (here / "run-0.jsonl").touch()
    result = run(write(here, "1 / 0"), "--mesh", "dp=2", "--stream", "run-{rank}.jsonl")
    assert result.exit_code == 2
    assert "run-0.jsonl' already exists" in result.stderr


def test_own_step_takes_the_place_of_forward_and_backward(here: Path) -> None:
    text = TARGET + "\ndef step(model, batch):\n    model(batch)\n"
    run(write(here, text), "--mesh", "dp=2")
    phases = {c.phase.value for c in load(here / "train.shardscope.json.gz").collectives}
    assert phases == {"forward"}


@pytest.mark.parametrize(
    "batch",
    ['{"input": torch.randn(4, 16)}', "(torch.randn(4, 16),)", "[torch.randn(4, 16)]"],
)
def test_batches_of_any_shape_are_fed(here: Path, batch: str) -> None:
    text = TARGET.replace("return torch.randn(4, 16)", f"return {batch}")
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("options", [(), ("--device", "cpu"), ("--data",)])
def test_ddp_runs_with_and_without_data(here: Path, options: tuple[str, ...]) -> None:
    text = TARGET.split("def parallelize")[0] + (
        "def parallelize(model, mesh):\n"
        "    from torch.nn.parallel import DistributedDataParallel\n"
        "    return DistributedDataParallel(model)\n"
    )
    result = run(write(here, text), "--mesh", "dp=4", *options)
    assert result.exit_code == 0, result.output
    causes = [c.cause for c in load(here / "train.shardscope.json.gz").collectives]
    assert "2.weight" in causes[0].parameters  # type: ignore[union-attr]


def test_rank_in_the_name_of_the_output_is_the_simulated_rank(here: Path) -> None:
    result = run(write(here, TARGET), "--mesh", "dp=4", "--rank", "3", "-o", "r{rank}.json")
    assert result.exit_code == 0, result.output
    assert load(here / "r3.json").collectives[0].rank == 3


def test_trace_prints_its_result_even_if_it_cannot_save(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OutputError("cannot write 'x': No space left on device. Choose a place.")

    monkeypatch.setattr("shardscope.cli.destination.save", fail)
    result = run(write(here, TARGET), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "By kind and mesh axis" in result.stdout
    assert "No space left on device" in result.stderr
    assert "saved" not in result.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_trace_saves_its_recording_even_if_it_cannot_print(here: Path) -> None:
    command = ["-m", "shardscope", "trace", write(here, TARGET), "--mesh", "dp=2"]
    done = Program(*command, stdout="/dev/full").wait()
    assert done.returncode == 2
    assert done.stderr.startswith("shardscope: standard output cannot be written: No space left")
    assert load(here / "train.shardscope.json.gz").collectives


@pytest.mark.parametrize(
    ("by", "title"),
    [
        ("module", "Modules"),
        ("axis", "By axis"),
        ("kind", "By kind"),
        ("cause", "By cause"),
    ],
)
def test_trace_prints_the_requested_view(here: Path, by: str, title: str) -> None:
    result = run(write(here, TARGET), "--mesh", "dp=2", "--by", by)
    assert result.exit_code == 0
    titles = [line for line in result.output.splitlines() if line.startswith(("By", "Modules"))]
    assert titles[0].startswith(title)


# The largest values of each column are wanted of a weight that is sharded by rows. Detached:
# torch 2.11 mixes tensors and DTensors in the backward of topk, and fails.
GATHERS = """
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024))

    def forward(self, k):
        return torch.topk(self.weight.detach(), k, dim=0).values.to_local()

def model():
    return Net()

def batch(model):
    return (2,)

def parallelize(model, mesh):
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0)]))
"""


def test_trace_with_a_finding_exits_with_1_and_saves(here: Path) -> None:
    result = run(write(here, GATHERS), "--mesh", "tp=2")
    assert "implicit-all-to-all" in result.output
    assert result.exit_code == 1
    assert load(here / "train.shardscope.json.gz").findings


def test_a_gpu_is_simulated_unless_device_is_cpu(here: Path) -> None:
    name = write(here, GATHERS)
    run(name, "--mesh", "tp=2", "-o", "cuda.json")
    run(name, "--mesh", "tp=2", "-o", "cpu.json", "--device", "cpu")
    cuda, cpu = load(here / "cuda.json"), load(here / "cpu.json")
    assert [str(c.kind) for c in cuda.collectives] == ["all_to_all"]
    assert cuda.gaps == ()
    assert [str(c.kind) for c in cpu.collectives] == ["all_gather"]
    assert ["on CUDA meshes it issues an all_to_all" in gap.fact for gap in cpu.gaps] == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to hold the data")
def test_data_on_a_missing_gpu_is_refused(here: Path) -> None:
    refused = run(write(here, TARGET), "--mesh", "dp=2", "--data", "--device", "cuda")
    assert refused.exit_code == 2
    assert "this machine has no GPU for --device cuda" in refused.output


# A backward whose forward ran before the trace: which module it belongs to is not known.
GAP = (
    TARGET
    + """
def batch(model):
    return model(torch.randn(4, 16))

def step(model, batch):
    batch.sum().backward()
"""
)


def test_gaps_of_a_trace_are_fatal_only_if_strict(here: Path) -> None:
    name = write(here, GAP)
    assert run(name, "--mesh", "dp=2").exit_code == 0
    assert load(here / "train.shardscope.json.gz").gaps
    assert run(name, "--mesh", "dp=2", "--force", "--strict").exit_code == 1


def test_strict_trace_without_gaps_exits_with_0(here: Path) -> None:
    assert run(write(here, TARGET), "--mesh", "dp=2", "--strict").exit_code == 0


def test_recording_is_not_overwritten_without_force(here: Path) -> None:
    name = write(here, TARGET)
    (here / "run.json").write_text("precious")
    refused = run(name, "--mesh", "dp=2", "-o", "run.json")
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert (here / "run.json").read_text() == "precious"
    assert run(name, "--mesh", "dp=2", "-o", "run.json", "--force").exit_code == 0


def test_run_whose_output_has_no_name_gets_a_free_one(here: Path) -> None:
    name = write(here, TARGET)
    (here / "train.shardscope.json.gz").write_text("precious")
    result = run(name, "--mesh", "dp=2")
    assert result.exit_code == 0
    assert "saved train-2.shardscope.json.gz" in result.stdout
    assert (here / "train.shardscope.json.gz").read_text() == "precious"
    forced = run(name, "--mesh", "dp=2", "--force")
    assert "saved train.shardscope.json.gz" in forced.stdout
    assert load(here / "train.shardscope.json.gz").collectives


def test_an_interrupted_step_is_saved_up_to_the_interruption(here: Path) -> None:
    stop = "\ndef step(model, batch):\n    model(batch)\n    raise KeyboardInterrupt\n"
    result = run(write(here, TARGET + stop), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert result.stderr == "shardscope: interrupted\n"
    assert len(load(here / "train.shardscope.json.gz").collectives) > 0
