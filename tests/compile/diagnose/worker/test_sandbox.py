"""Nothing that another process writes lands outside its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import isolated_calls as calls
from shardscope.compile.diagnose.worker.pool import Workers
from shardscope.compile.diagnose.worker.sandbox import Sandbox
from shardscope.errors import OutputError


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def test_a_real_compilation_touches_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("home", "inductor", "triton", "tmp", "cwd", "output", "debug"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sentinel").write_text(name)
    before = contents(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    monkeypatch.setenv("TORCH_COMPILE_DEBUG_DIR", str(tmp_path / "debug"))
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path / "debug"))
    # Most of the time would go to these.
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    monkeypatch.chdir(tmp_path / "cwd")
    with (
        Sandbox(tmp_path / "output") as sandbox,
        Workers(sandbox, has_standby=False) as workers,
    ):
        got = workers.call(calls.compile_with_inductor)
        assert torch.equal(got, torch.relu(torch.linspace(-1, 1, 8)) + 1)
        assert list((sandbox.folder / "inductor").rglob("*.cpp"))
        during = {
            name: text
            for name, text in contents(tmp_path).items()
            if not name.startswith("output/worker-")
        }
        assert during == before
    assert contents(tmp_path) == before


def test_workers_are_in_the_folder_and_as_wide_as_their_parent(
    workers: Workers, sandbox: Sandbox
) -> None:
    places = workers.call(calls.describe_places)
    assert places["cwd"] == str(sandbox.work)
    assert places["tmp"] == str(sandbox.folder / "tmp")
    assert places["threads"] == torch.get_num_threads()
    assert places["environment"]["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


@pytest.mark.parametrize(
    "name",
    [
        "TORCHDYNAMO_REPRO_AFTER",
        "TORCHDYNAMO_DEBUG_FUNCTION",
        "TORCH_COMPILE_DEBUG",
        "TORCH_LOGS",
        "TORCH_LOGS_OUT",
        "TORCH_TRACE",
        "TORCHINDUCTOR_MM_LOGGING_FILE",
        "TRITON_KERNEL_DUMP",
    ],
)
def test_what_makes_torch_write_elsewhere_is_not_passed_on(
    name: str, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    environment = sandbox.environment({"EXTRA": "yes"})
    assert name not in environment
    assert (environment["SOMETHING_ELSE"], environment["EXTRA"]) == ("kept", "yes")


def test_modules_are_looked_for_where_the_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "", "/elsewhere"]))
    path = Sandbox(tmp_path / "out").environment()["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(tmp_path / "src"), str(tmp_path), "/elsewhere"]
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in Sandbox(tmp_path / "out").environment()


def test_tidying_removes_only_what_was_made(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (tmp_path / "worker-mine").mkdir()
    with Sandbox(tmp_path) as sandbox:
        os.symlink(outside, sandbox.work / "link")
        assert sandbox.folder.parent == tmp_path
    assert not sandbox.folder.exists()
    assert contents(tmp_path) == {"outside": b"", "outside/file": b"mine", "worker-mine": b""}


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot make a folder for compilers in .*file"):
        Sandbox(tmp_path / "file")


def test_relative_places_of_modules_are_found_from_another_folder(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/opt/mine")
    places = sandbox.environment()["PYTHONPATH"].split(os.pathsep)
    assert places == [str(tmp_path / "src"), "/opt/mine"]
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in sandbox.environment()
