"""`shardscope memory`: does it fit, and what for."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.small_target import TARGET, write
from shardscope.cli import main
from shardscope.cli.memory import parse_gpu_memory
from shardscope.errors import TargetError
from shardscope.record import MemoryKind, load

K = MemoryKind


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["memory", *args])


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def held(path: str, kind: MemoryKind) -> int:
    (profile,) = load(path).memory
    return max(sample.num_bytes[list(K).index(kind)] for sample in profile.samples)


def test_it_prints_and_saves_a_profile(tmp_path: Path) -> None:
    done = run(write(tmp_path, TARGET), "--mesh", "dp=4", "-o", "out.json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "at the peak" in done.stdout
    assert "Memory over the step" in done.stdout
    assert load("out.json").run.world_size == 4
    shown = CliRunner().invoke(main, ["show", "out.json"])
    assert "Memory by module" in shown.stdout


def test_without_a_step_of_its_own_the_target_is_trained_with_adamw(tmp_path: Path) -> None:
    assert run(write(tmp_path, TARGET), "--mesh", "dp=1", "-o", "out.json").exit_code == 0
    assert held("out.json", K.OPTIMIZER_STATE) >= 2 * held("out.json", K.PARAMETERS)


def test_the_targets_own_optimizer_is_used(tmp_path: Path) -> None:
    own = "\ndef optimizer(model):\n    return torch.optim.SGD(model.parameters())\n"
    assert run(write(tmp_path, TARGET + own), "--mesh", "dp=1", "-o", "out.json").exit_code == 0
    assert held("out.json", K.OPTIMIZER_STATE) == 0


def test_a_step_of_its_own_without_an_optimizer_gets_none(tmp_path: Path) -> None:
    own = "\ndef step(model, batch):\n    model(batch).sum().backward()\n"
    assert run(write(tmp_path, TARGET + own), "--mesh", "dp=1", "-o", "out.json").exit_code == 0
    assert held("out.json", K.OPTIMIZER_STATE) == 0


def test_without_a_mesh_the_model_is_not_sharded(tmp_path: Path) -> None:
    done = run(write(tmp_path, TARGET), "-o", "out.json")
    assert done.exit_code == 0
    assert held("out.json", K.GATHERED) == 0
    assert load("out.json").run.world_size == 1


@pytest.mark.parametrize(("size", "code"), [("80GiB", 0), ("100MiB", 1)])
def test_the_exit_code_says_whether_it_fits(tmp_path: Path, size: str, code: int) -> None:
    done = run(write(tmp_path, TARGET), "--mesh", "dp=4", "--gpu-memory", size)
    assert done.exit_code == code
    assert ("does not fit" in done.stdout) == bool(code)
    assert ("out-of-memory" in done.stdout) == bool(code)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 << 30),
        ("80 GiB", 80 << 30),
        ("80g", 80 << 30),
        ("80GB", 80 * 10**9),
        ("1.5tib", 3 << 39),
        ("85899345920", 80 << 30),
        ("85899345920B", 80 << 30),
        ("24576MiB", 24 << 30),
    ],
)
def test_sizes_are_understood(text: str, num_bytes: int) -> None:
    assert parse_gpu_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "80XB", "lots", "9" * 40, "80GiB!"])
def test_invalid_sizes_are_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"--gpu-memory must be a size, such as 80GiB; got"):
        parse_gpu_memory(text)
    done = run(write(tmp_path, TARGET), "--gpu-memory", text or " ")
    assert done.exit_code == 2
    assert done.stderr.startswith("shardscope: --gpu-memory")


@pytest.mark.parametrize(("text", "meant"), [("80", "80GiB"), ("512B", "80GiB"), ("9MiB", "80GiB")])
def test_implausible_sizes_are_refused_in_one_sentence(text: str, meant: str) -> None:
    with pytest.raises(TargetError, match=f"only .* bytes. Did you mean --gpu-memory {meant}"):
        parse_gpu_memory(text)


def test_a_step_without_an_optimizer_is_reported(tmp_path: Path) -> None:
    own = "\ndef step(model, batch):\n    model(batch).sum().backward()\n"
    done = run(write(tmp_path, TARGET + own), "--mesh", "dp=1")
    assert done.exit_code == 0
    assert "no optimizer was stepped" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("addition", "sentence"),
    [
        ("def optimizer(model):\n    return 3", "optimizer() returned int"),
        ("def optimizer(model):\n    raise KeyError('x')", "optimizer() failed: KeyError"),
        ("optimizer = 3", "defines optimizer as int"),
        ("def step(model, batch):\n    model(batch[:, :3])", "step() failed: RuntimeError"),
    ],
)
def test_failures_of_the_target_are_one_sentence(
    tmp_path: Path, addition: str, sentence: str
) -> None:
    done = run(write(tmp_path, f"{TARGET}\n{addition}\n"), "--mesh", "dp=1")
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_another_rank_can_be_simulated(tmp_path: Path) -> None:
    name = write(tmp_path, TARGET)
    assert run(name, "--mesh", "dp=3", "--rank", "2", "-o", "rank-{rank}.json").exit_code == 0
    assert load("rank-2.json").memory[0].rank == 2
    assert run(name, "--mesh", "dp=3", "-o", "rank-{rank}.json").exit_code == 0
    merged = CliRunner().invoke(main, ["show", "rank-0.json", "rank-2.json"])
    assert "the most of 2 ranks" in merged.stdout


def test_export_has_counters_for_perfetto_and_says_that_csv_has_nothing(tmp_path: Path) -> None:
    assert run(write(tmp_path, TARGET), "-o", "out.json").exit_code == 0
    export = CliRunner().invoke(main, ["export", "out.json", "--to", "perfetto", "-o", "-"])
    assert '"ph":"C"' in export.stdout
    export = CliRunner().invoke(main, ["export", "out.json", "--to", "csv"])
    assert export.exit_code == 0
    assert "no collectives, so the table is empty" in export.stderr
