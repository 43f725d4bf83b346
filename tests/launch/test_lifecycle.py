"""How launched programs end, what is kept of them, and what they find when they start."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from shardscope.errors import LaunchError
from shardscope.launch import api
from shardscope.launch.api import RunResult, run
from shardscope.launch.program import Program
from shardscope.record import load

PROGRAM = Path(__file__).parent / "programs" / "lifecycle.py"
ACTIONS = runpy.run_path(str(PROGRAM))["ACTIONS"]
NUM_RANKS = len(ACTIONS)
RANKS = {action.__name__: rank for rank, action in enumerate(ACTIONS)}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")


def find_line(text: str) -> str:
    """The place of a program's line, as failures name it."""
    lines = PROGRAM.read_text().splitlines()
    return f"{PROGRAM}, line {lines.index(text) + 1}"


def list_commands() -> list[str]:
    """The command lines of all processes."""
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """All ranks of the program, each of which ends in another way."""
    folder = tmp_path_factory.mktemp("lifecycle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", None)
        patch.setenv("LIFECYCLE_SLEEP", "7654.3")
        patch.chdir(folder)
        result = run(PROGRAM, ranks="all", num_per_node=NUM_RANKS, instruments=("trace",))
        patch.setattr("tempfile.tempdir", None)
    assert [file for file in folder.iterdir() if file.name.startswith("shardscope")] == []
    return result


@no_gpu
class TestEnds:
    @pytest.mark.parametrize(
        ("action", "sentence", "line"),
        [
            ("raise_in_second_step", "failed: ValueError: no more data (PLACE).",
             '    raise ValueError("no more data")'),
            ("exit_after_a_step", "called sys.exit(5) (PLACE).", "    sys.exit(5)"),
            ("exit_at_once", "called os._exit(7) (PLACE).", "    os._exit(7)"),
            ("crash", "was ended by signal 11 (SIGSEGV) at PLACE.", "    ctypes.string_at(0)"),
            ("kill", "was ended by signal 9 (SIGKILL). The machine may be out of memory.", None),
            ("fail_in_thread", "failed in a thread: ZeroDivisionError: integer division or modulo "
             "by zero (PLACE).", "    thread = threading.Thread(target=lambda: 1 // 0)"),
            ("evaluate", "called its model once, but took no training step", None),
            ("start_another_program", "ended without a training step, but started other programs "
             f"({sys.executable} -c pass)", None),
            ("select_by_value", "(PLACE). The shape of the op's result depends on values",
             "    torch.repeat_interleave(output, output.long().sum(1), dim=0)"),
        ],
    )  # fmt: skip
    def test_a_failure_is_a_sentence_with_the_line(
        self, ended: RunResult, action: str, sentence: str, line: str | None
    ) -> None:
        prefix = f"Rank {RANKS[action]} "
        (failure,) = (text for text in ended.failures if text.startswith(prefix))
        assert sentence.replace("PLACE", find_line(line) if line else "") in failure

    def test_programs_that_resist_their_end_do_not_fail(self, ended: RunResult) -> None:
        failed = {failure.split()[1] for failure in ended.failures}
        expected = (
            "raise_in_second_step", "exit_after_a_step", "exit_at_once", "crash", "kill",
            "fail_in_thread", "evaluate", "start_another_program", "select_by_value",
        )  # fmt: skip
        assert failed == {str(RANKS[action]) for action in expected}

    def test_what_was_recorded_before_the_end_is_kept(self, ended: RunResult) -> None:
        recorded = {call.rank for call in ended.recording.collectives}
        empty = {RANKS[name] for name in ("fail_in_thread", "evaluate", "start_another_program")}
        assert recorded == set(range(NUM_RANKS)) - empty

    def test_no_process_is_left_behind(self, ended: RunResult) -> None:
        assert ended.num_steps == 0  # of the rank with the fewest
        assert [command for command in list_commands() if "7654.3" in command] == []


WAITS = """
import sys, threading, torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters())
model(torch.randn(2, 4).cuda()).sum().backward()
optimizer.step()
print("ready", flush=True)
threading.Event().wait()
"""


@no_gpu
def test_a_program_that_waits_is_ended_and_its_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "PATIENCE_SECONDS", 3)
    Path("program.py").write_text(WAITS)
    result = run("program.py")
    (failure,) = result.failures
    assert failure.startswith("Rank 0 waited at program.py, line 8 for something that does not")
    assert result.num_steps == 1
    assert result.recording.memory[0].peak_bytes > 0


@no_gpu
def test_an_interrupt_ends_everything_and_saves_what_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAITS)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardscope", "run", "-o", "run.json", "--", "program.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Rank 0 was interrupted" in errors
    assert load(tmp_path / "run.json").run.is_simulated
    assert list(scratch.glob("shardscope-run-*")) == []
    assert [command for command in list_commands() if str(scratch) in command] == []


FAILS_ON_RANK_ONE = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
optimizer = torch.optim.SGD(model.parameters())
print("on rank", dist.get_rank())
while True:
    model(torch.randn(2, 4).cuda()).sum().backward()
    optimizer.step()
    if dist.get_rank() == 1:
        dist.all_gather([torch.ones(4).cuda()] * 2, torch.ones(4).cuda())
        raise ValueError("only here")
"""


@no_gpu
def test_the_output_of_a_failed_rank_and_its_other_branch_are_shown(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILS_ON_RANK_ONE)
    command = ["run", "--nproc-per-node", "2", "--ranks", "all", "-o", "run.json"]
    done = subprocess.run(
        [sys.executable, "-m", "shardscope", *command, "--", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "on rank 0\n" in done.stdout
    assert "Rank 1 has printed, at the end:\non rank 1\n" in done.stderr
    assert "shardscope: Rank 1 failed: ValueError: only here (program.py, line 12)." in done.stderr
    recording = load(tmp_path / "run.json")
    assert "rank-mismatch" in {finding.rule for finding in recording.findings}
    assert recording.run.ranks_per_node == 2


FACTS = """
import json, os, pickle, signal, sys
class Local: pass
facts = {
    "argv": sys.argv, "path": sys.path[:2], "file": __file__, "name": __name__,
    "package": __package__, "loader": type(__loader__).__name__, "cwd": os.getcwd(),
    "names": sorted(name for name in globals() if name.startswith("__")),
    "pickled": type(pickle.loads(pickle.dumps(Local()))) is Local,
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)],
    "group": os.getpgrp() == os.getpid(),
    "variables": sorted(
        (name, value) for name, value in os.environ.items()
        if name.endswith(("RANK", "WORLD_SIZE", "RESTARTS", "RESTART_COUNT", "ROLE_NAME", "HANDLE"))
    ),
}
if "LOCAL_RANK" in os.environ:
    import torch.distributed as dist
    facts["elastic"] = dist.is_torchelastic_launched()
print(json.dumps(facts))
"""


def read_facts(*words: str) -> dict[str, object]:
    """What the program prints when Python is started with these words."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stderr
    facts: dict[str, object] = json.loads(lines[0])
    return facts


@no_gpu
def test_a_program_finds_what_it_finds_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(FACTS)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=1")
    ours = ("shardscope", "run", "--nproc-per-node", "1", "--")
    words = ("program.py", "--lr", "1 e")
    assert read_facts("-m", *ours, *words) == read_facts("-m", *torchrun, *words)


@pytest.mark.parametrize("script", ["program.py", "package", "application.zip", "-m"])
def test_a_program_runs_as_python_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(FACTS)
    Path("package").mkdir()
    Path("package", "__main__.py").write_text(FACTS)
    with zipfile.ZipFile("application.zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    words = ["-m", "package"] if script == "-m" else [script]
    program = f"Program({words[-1]!r}, ('--lr', '1 e'), {script == '-m'})"
    code = f"from shardscope.launch.program import Program; {program}.run()"
    assert read_facts("-P", "-c", code) == read_facts(*words, "--lr", "1 e")


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("train.ipynb", b"{}", "is a notebook. Save it as a script first"),
        ("train.sh", b"#!/bin/bash\n", "is not a Python program: its first line is #!/bin/bash"),
        ("train", b"\x7fELF\0\0", "is not a Python program, but a binary file"),
    ],
)
def test_what_is_not_a_python_program_is_refused(
    tmp_path: Path, name: str, content: bytes, fact: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LaunchError) as error:
        Program(str(tmp_path / name)).check()
    assert fact in str(error.value)


def test_a_folder_without_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"is a folder without __main__\.py\. Give the path"):
        Program(str(tmp_path)).check()


GUARDED = """
import subprocess, sys
from shardscope.launch.write_guard import forbid_writes
is_possible = forbid_writes(apart_from=[sys.argv[1]])
done = subprocess.run("echo inside > inside/file; echo outside > file", shell=True)
print(is_possible)
"""


def test_other_programs_may_write_to_the_scratch_folder_only(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, str(tmp_path / "inside")],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (tmp_path / "inside" / "file").read_text() == "inside\n"
    assert (tmp_path / "file").exists() == (done.stdout == "False\n")
