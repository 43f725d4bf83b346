"""What a TARGET finds around it: its modules, its arguments, and a launcher's other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.small_target import TARGET, run, write
from rank_processes import run_ranks
from shardscope.record import load
from warm_python import run_python


def test_module_is_a_target_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "pack").mkdir()
    (here / "pack" / "__init__.py").write_text("")
    write(here / "pack", TARGET)
    monkeypatch.syspath_prepend(here)
    result = run("pack.train", "--mesh", "dp=2")
    assert result.exit_code == 0, result.output
    assert (here / "train.shardscope.json.gz").exists()


def test_program_has_arguments_of_its_own_and_the_recording_names_our_command(here: Path) -> None:
    text = TARGET + (
        "\nimport argparse, sys\n"
        "def parse():\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--lr', default=1.0)\n"
        "    assert sys.argv == ['train.py'], sys.argv\n"
        "    return parser.parse_args()\n"
        "parse()\n"
        "def batch(model):\n    parse()\n    return torch.randn(4, 16)\n"
        "def step(model, batch):\n    parse()\n    model(batch)\n"
    )
    name = write(here, text)
    done = run_python("-m", "shardscope", "trace", name, "--mesh", "dp=2")
    assert done.returncode == 0, done.stderr
    recording = load(here / "train.shardscope.json.gz")
    assert recording.run.command == "shardscope trace train.py --mesh dp=2"


def test_arguments_and_path_are_restored(here: Path) -> None:
    before = sys.argv, list(sys.path)
    for text in (TARGET, TARGET + "\ndef step(model, batch):\n    1 / 0\n", "1 / 0"):
        run(write(here, text), "--mesh", "dp=2", "--force")
        assert (sys.argv, list(sys.path)) == before


def _install_script(folder: Path) -> Path:
    """A console script as pip makes it: its own folder, not the current one, is on the path."""
    folder.mkdir()
    (folder / "shardscope").write_text("from shardscope.cli import main\nmain()\n")
    return folder / "shardscope"


def test_installed_command_finds_modules_in_the_current_folder(here: Path) -> None:
    (here / "pack").mkdir()
    write(here / "pack", "from .sizes import NUM\n" + TARGET)
    write(here / "pack", "NUM = 16\n", name="sizes.py")
    done = run_python(_install_script(here / "bin"), "trace", "pack.train", "--mesh", "dp=2")
    assert done.returncode == 0, done.stderr
    assert (here / "train.shardscope.json.gz").exists()


def test_package_is_a_target_too(here: Path) -> None:
    (here / "whole_package").mkdir()
    write(here / "whole_package", TARGET, name="__init__.py")
    result = run("whole_package", "--mesh", "dp=2")
    assert result.exit_code == 0, result.output
    assert (here / "whole_package.shardscope.json.gz").exists()


def test_the_error_for_a_file_with_relative_imports_gives_its_dotted_name(here: Path) -> None:
    folder = here / "outer" / "inner"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    write(folder, "from .sizes import NUM\n")
    result = run("outer/inner/train.py", "--mesh", "dp=2")
    assert result.exit_code == 2
    hint = "It belongs to a package: name it outer.inner.train, not by its path"
    assert f"{hint}.\n" in result.stderr
    os.chdir(folder)
    assert f"{hint}, in the folder {here}.\n" in run("train.py", "--mesh", "dp=2").stderr


@pytest.mark.parametrize("given", [{"RANK": "3"}, {"RANK": "3", "WORLD_SIZE": "4"}])
def test_stray_variables_of_a_launcher_do_not_override_the_mesh(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    result = run(write(here, TARGET), "--mesh", "dp=8")
    assert result.exit_code == 0, result.output
    assert "dp=8" in result.output
    assert load(here / "train.shardscope.json.gz").run.is_simulated


def _launch(monkeypatch: pytest.MonkeyPatch, *, rank: int, num_processes: int) -> None:
    values = {"RANK": rank, "WORLD_SIZE": num_processes, "MASTER_PORT": 29500}
    for name, value in ({"MASTER_ADDR": "localhost"} | values).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("option", "example"),
    [("-o", "-o run-{rank}.json.gz"), ("--stream", "--stream run-{rank}.jsonl")],
)
def test_launched_ranks_do_not_write_one_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, option: str, example: str
) -> None:
    _launch(monkeypatch, rank=1, num_processes=4)
    result = run(write(here, "1 / 0"), option, "out.json")
    assert result.exit_code == 2
    assert result.stderr == (
        "shardscope: all 4 processes would write 'out.json'. Put {rank} into the name, as in "
        f"{example}, so that each writes its own file.\n"
    )


def test_mesh_that_does_not_fit_the_launched_processes_is_a_sentence(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _launch(monkeypatch, rank=0, num_processes=1)
    result = run(write(here, TARGET), "--mesh", "dp=2", "-o", "out.json")
    assert result.exit_code == 2
    assert "--mesh has 2 ranks, but 1 process was started. Give --mesh axes" in result.stderr
    assert "multiply to 1, or start 2 processes." in result.stderr


def test_launched_ranks_trace_the_real_run_and_write_the_requested_files(here: Path) -> None:
    name = write(here, TARGET)
    for code, printed in run_ranks(2, "-m", "shardscope", "trace", name, "-o", "run-{rank}.json"):
        assert code == 0, printed
    _check_real_ranks(here, "run-{rank}.json")


def test_torchrun_traces_the_real_run_and_each_rank_writes_a_file(here: Path) -> None:
    name = write(here, TARGET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # Not by the exit code: torch's gloo now and then aborts a process as it ends, without us too.
    subprocess.run(
        [*launcher, "--no-python", sys.executable, "-m", "shardscope", "trace", name],
        check=False,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    _check_real_ranks(here, "train-{rank}.shardscope.json.gz")


def _check_real_ranks(here: Path, written: str) -> None:
    recordings = [load(here / written.format(rank=rank)) for rank in (0, 1)]
    assert [r.collectives[0].rank for r in recordings] == [0, 1]
    assert not recordings[0].run.is_simulated
    assert recordings[0].run.axes[0].name == "dp"
