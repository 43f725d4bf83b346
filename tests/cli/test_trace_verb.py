"""`shardscope trace` as a user would type it: targets, meshes, mistakes and outcomes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardscope.cli import main
from shardscope.record import load

TARGET = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

def batch(model):
    return torch.randn(4, 16)

def parallelize(model, mesh):
    from torch.distributed.fsdp import fully_shard
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"])
    return model
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["trace", *args])


def write(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return name


def test_step_of_a_file_is_recorded_printed_and_saved(here: Path) -> None:
    result = run(write(here, TARGET), "--mesh", "dp=8")
    assert result.exit_code == 0, result.output
    assert "dp=8" in result.output
    assert "recording saved to train.shardscope.json.gz" in result.output
    recording = load(here / "train.shardscope.json.gz")
    kinds = [c.kind.value for c in recording.collectives]
    assert kinds == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert recording.run.world_size == 8
    assert recording.run.is_simulated


def test_rank_and_output_are_the_users_choice(here: Path) -> None:
    result = run(write(here, TARGET), "--mesh", "dp=4,tp=2", "--rank", "5", "-o", "five.json")
    assert result.exit_code == 0, result.output
    assert load(here / "five.json").collectives[0].rank == 5


def test_module_is_a_target_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "pack").mkdir()
    (here / "pack" / "__init__.py").write_text("")
    write(here / "pack", TARGET)
    monkeypatch.syspath_prepend(here)
    result = run("pack.train", "--mesh", "dp=2")
    assert result.exit_code == 0, result.output
    assert (here / "train.shardscope.json.gz").exists()


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


def test_ddp_asks_for_data_and_runs_with_it(here: Path) -> None:
    text = TARGET.split("def parallelize")[0] + (
        "def parallelize(model, mesh):\n"
        "    from torch.nn.parallel import DistributedDataParallel\n"
        "    return DistributedDataParallel(model)\n"
    )
    name = write(here, text)
    refused = run(name, "--mesh", "dp=4")
    assert refused.exit_code == 2
    assert "run again with --data" in refused.output
    result = run(name, "--mesh", "dp=4", "--data")
    assert result.exit_code == 0, result.output
    causes = [c.cause for c in load(here / "train.shardscope.json.gz").collectives]
    assert "2.weight" in causes[0].parameters  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["missing.py", "--mesh", "dp=2"], "missing.py does not exist"),
        (["no.such.module", "--mesh", "dp=2"], "There is no file or module 'no.such.module'"),
        (["train.py"], "There is no mesh to run train on"),
        (["train.py", "--mesh", "dp"], "not understood at 'dp'"),
        (["train.py", "--mesh", "dp=0"], "not understood at 'dp=0'"),
        (["train.py", "--mesh", "dp=2,dp=4"], "names the axis 'dp' twice"),
        (["train.py", "--mesh", "dp=2", "--rank", "2"], "has ranks 0 to 1"),
        (["train.py", "--mesh", "dp=2", "-o", "no/such/folder.json"], "no/such"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(
    here: Path, args: list[str], sentence: str
) -> None:
    write(here, TARGET)
    result = run(*args)
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert result.output.count("shardscope: ") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def batch(model): pass", "defines no function model()"),
        ("def model(): pass", "defines no function batch()"),
        ("def model(: pass", "could not be imported: SyntaxError"),
        ("import no_such_thing", "could not be imported: ModuleNotFoundError"),
        ("1 / 0", "could not be imported: ZeroDivisionError"),
        (TARGET + "\nstep = 3\n", "defines step as int"),
        (TARGET + "\ndef model():\n    return 3\n", "model() returned int"),
        (TARGET + "\ndef model():\n    return [][0]\n", "model() failed: IndexError"),
        (TARGET + "\ndef batch(model):\n    return [][0]\n", "batch() failed: IndexError"),
    ],
)
def test_bad_target_gets_one_sentence_and_exit_code_2(here: Path, text: str, sentence: str) -> None:
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_missing_function_comes_with_an_example(here: Path) -> None:
    result = run(write(here, "x = 1"), "--mesh", "dp=2")
    assert "def model():" in result.output
    assert "def batch(model):" in result.output


def test_step_that_fails_loses_nothing(here: Path) -> None:
    text = TARGET + "\ndef step(model, batch):\n    model(batch)\n    raise ValueError('too hot')\n"
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "step() failed: ValueError: too hot (" in result.output
    assert "train.py, line" in result.output
    recording = load(here / "train.shardscope.json.gz")
    assert len(recording.collectives) == 2
    assert "too hot" in recording.gaps[0].fact


def test_recording_is_not_overwritten_without_force(here: Path) -> None:
    name = write(here, TARGET)
    (here / "train.shardscope.json.gz").write_text("precious")
    refused = run(name, "--mesh", "dp=2")
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert (here / "train.shardscope.json.gz").read_text() == "precious"
    assert run(name, "--mesh", "dp=2", "--force").exit_code == 0


def test_torchrun_traces_the_real_thing_and_each_rank_writes_a_file(here: Path) -> None:
    name = write(here, TARGET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launcher, "--no-python", sys.executable, "-m", "shardscope", "trace", name],
        check=True,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    recordings = [load(here / f"train-{rank}.shardscope.json.gz") for rank in (0, 1)]
    assert [r.collectives[0].rank for r in recordings] == [0, 1]
    assert not recordings[0].run.is_simulated
    assert recordings[0].run.axes[0].name == "dp"
