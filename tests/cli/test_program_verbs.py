"""Commands that take a training program after `--`, as it is, instead of a TARGET."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.cli.program import LaunchedProgram
from shardscope.launch.program import Program
from shardscope.record import (
    BreakSite,
    Explanation,
    Finding,
    MemoryProfile,
    Phase,
    Recording,
    RunInfo,
    Severity,
    Source,
    load,
)

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

assert sys.argv[1:] == ["--width", "64"], sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""
WORDS = ["--", "program.py", "--width", "64"]
pytestmark = pytest.mark.usefixtures("forked_launches")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)


def invoke(*words: str) -> tuple[int, str]:
    """The exit code and what the command prints; what the program prints is not part of it."""
    result = CliRunner().invoke(main, words, env={"COLUMNS": "100"})
    return result.exit_code, result.output


@without_gpu
def test_trace_records_collectives_only() -> None:
    code, output = invoke("trace", "--nnodes", "2", "--steps", "1", "-o", "out.json", *WORDS)
    assert code == 0, output
    recording = load("out.json")
    assert recording.run.instruments == ("trace",)
    assert recording.run.world_size == 16
    assert recording.run.command == "program.py --width 64"
    assert len(recording.collectives) == 6  # of each layer: two gathers and a reduction
    assert "reduce_scatter" in output
    assert "saved out.json" in output


@without_gpu
def test_memory_says_whether_it_fits_the_gpu() -> None:
    code, output = invoke("memory", "--gpu", "a100", "-o", "out.json", *WORDS)
    assert code == 0, output
    recording = load("out.json")
    assert recording.run.instruments == ("memory",)
    assert recording.memory[0].peak_bytes > 0
    assert "fits in 79.1 GiB" in output


@without_gpu
def test_audit_inspects_the_model_and_runs_no_step() -> None:
    code, output = invoke("audit", "--nproc-per-node", "4", "-o", "out.json", *WORDS)
    assert code == 0, output
    recording = load("out.json")
    assert recording.run.instruments == ("audit",)
    weights = [p for module in recording.modules for p in module.parameters if "weight" in p.name]
    assert {parameter.local_shape for parameter in weights} == {(16, 64)}
    assert recording.collectives == ()


@without_gpu
def test_explain_compiles_the_model_of_a_program_that_compiles_nothing() -> None:
    unsharded = PROGRAM.replace("    fully_shard(layer)", "    pass").replace(
        "fully_shard(model)", ""
    )
    Path("program.py").write_text(unsharded)
    code, output = invoke("explain", "-o", "out.json", *WORDS)
    assert code == 0, output
    (explanation,) = load("out.json").explanations
    assert len(explanation.graphs) == 1
    assert explanation.target == "Sequential, compiled on the inputs of its first call"
    assert explanation.target in " ".join(output.split())


@without_gpu
def test_coverage_tests_the_ops_of_the_first_call() -> None:
    code, output = invoke(
        "coverage", "--nproc-per-node", "2", "--level", "core_aten", "--csv", "ops.csv", "-o",
        "out.json", *WORDS,
    )  # fmt: skip
    assert code == 0, output
    (table,) = load("out.json").coverage
    assert table.level == "core_aten"
    assert any("mm" in op.op for op in table.ops)
    assert "aten." in Path("ops.csv").read_text()


@without_gpu
def test_a_contract_is_recorded_from_a_run() -> None:
    code, output = invoke("contract", "record", "--steps", "1", *WORDS)
    assert code == 0, output
    limits = Path("shardscope.toml").read_text()
    assert "reduce_scatter" in limits
    assert "memory" in limits


@without_gpu
def test_a_failing_program_is_a_sentence() -> None:
    Path("program.py").write_text("raise ValueError('no data')\n")
    code, output = invoke("trace", *WORDS)
    assert code == 2
    assert "shardscope: Rank 0 failed: ValueError: no data (program.py, line 1)." in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trace", "train.py", *WORDS], "trace got train.py before -- and the program program.py"),
        (["trace", "--mesh", "dp=2", *WORDS], "--mesh is for a TARGET, and trace got a program"),
        (["memory", "--data", *WORDS], "--data is for a TARGET, and memory got a program"),
        (["audit", "--no-step", *WORDS], "--no-step is for a TARGET"),
        (["trace", "program.py", "--nnodes", "2"], "--nnodes describes the cluster of a program"),
        (["trace", "--"], "No program follows --. Give one: -- train.py, or -- -m package.module"),
        (["trace", "--", "-m"], "No program follows --."),
        (["trace", "--", "missing.py"], "missing.py does not exist. Give the path of the program"),
        (["trace"], "Missing argument 'TARGET'."),
        (["contract", "record"], "Missing argument 'RECORDING...'."),
        (["contract", "record", "a.json", *WORDS], "contract record got a.json before --"),
        (["visualize", *WORDS], "visualize takes a TARGET that defines model(), not a program"),
        (["parallelize", *WORDS], "parallelize takes a TARGET that defines model(), not a program"),
        (["parity", "--mesh", "tp=2", *WORDS], "--mesh is for a TARGET, and parity got a program"),
        (["parity", "a.py", "--single-args", "--tp 1"], "--single-args is for a program after --"),
        (["diagnose", *WORDS], "diagnose takes a TARGET that defines model(), not a program"),
    ],
)
def test_wrong_usage_is_a_sentence(words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_a_module_may_follow_the_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Program] = []

    def observe(program: LaunchedProgram, *_: object, **__: object) -> int:
        launched.append(program.program)
        return 0

    monkeypatch.setattr(LaunchedProgram, "observe", observe)
    result = CliRunner().invoke(main, ["trace", "--", "-m", "package.train", "--lr", "1"])
    assert result.exit_code == 0
    assert launched == [Program("package.train", ("--lr", "1"), is_module=True)]


RUN = RunInfo(torch_version="", shardscope_version="", world_size=4, ranks=())
BREAK = BreakSite(source=Source(file="a.py", line=1, function="f"), reason="print", num_events=1)


@pytest.mark.parametrize(
    ("recording", "command"),
    [
        (Recording(run=RUN), "shardscope report run.json"),
        (
            Recording(
                run=RUN,
                memory=(
                    MemoryProfile(
                        rank=0,
                        peak_bytes=2,
                        peak_order=0,
                        peak_phase=Phase.BACKWARD,
                        needed_bytes=3,
                        device_bytes=2,
                    ),
                ),
            ),
            "shardscope show run.json --view memory",
        ),
        (
            Recording(
                run=RUN,
                explanations=(
                    Explanation(rank=0, target="", fingerprint="", break_sites=(BREAK,)),
                ),
            ),
            "shardscope explain --nproc-per-node 4 -- train.py --lr 1",
        ),
        (
            Recording(
                run=RUN,
                findings=(
                    Finding(rule="", severity=Severity.WARNING, subject="", fact="", remedy=""),
                ),
            ),
            "shardscope show run.json --view overview",
        ),
    ],
    ids=["nothing wrong", "does not fit", "graph breaks", "findings"],
)
def test_the_next_command_is_the_most_useful_one(recording: Recording, command: str) -> None:
    program = LaunchedProgram(Program("train.py", ("--lr", "1")), num_per_node=4)
    assert program.suggest_next(recording, "run.json") == command
