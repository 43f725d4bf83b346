"""Unmodified programs run as ranks of a simulated cluster, and as real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import indent

import pytest
import torch

from shardscope.errors import LaunchError
from shardscope.launch.api import RunResult, run
from shardscope.record import CollectiveKind, Recording
from shardscope.record.ranks import expand_ranks

PROGRAMS = Path(__file__).parent / "programs"
# The programs would find the GPU of this machine; real ranks would share it.
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own"),
    pytest.mark.usefixtures("forked_launches"),
]


def run_program(name: str, *args: str, **options: object) -> RunResult:
    return run(str(PROGRAMS / f"{name}.py"), *args, **options)  # type: ignore[arg-type]


def count_kinds(recording: Recording) -> Counter[CollectiveKind]:
    return Counter(collective.kind for collective in recording.collectives)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_ddp_program_runs_two_steps_and_writes_nothing(tmp_path: Path) -> None:
    result = run_program("ddp")
    assert result.failures == ()
    assert result.num_steps == 2
    recording = result.recording
    assert recording.run.world_size == 8
    assert recording.run.is_simulated
    assert set(recording.run.instruments) == {"audit", "memory", "trace"}
    assert count_kinds(recording)[CollectiveKind.ALL_REDUCE] == 2  # a bucket per step
    assert recording.memory[0].device_bytes == 143_155 << 20
    assert any("item()" in gap.fact and "ddp.py:" in gap.place for gap in recording.gaps)
    assert any("torch.save()" in gap.fact for gap in recording.gaps)
    assert list(tmp_path.iterdir()) == []


def test_data_loader_workers_make_batches(tmp_path: Path) -> None:
    result = run_program("ddp", "--workers", "2", steps=1)
    assert result.failures == ()
    assert result.num_steps == 1


def test_a_program_that_spawns_its_processes_runs_as_its_rank() -> None:
    result = run_program("spawned", num_per_node=4, ranks="3", steps=1)
    assert result.failures == ()
    recording = result.recording
    assert expand_ranks(recording.run.ranks) == (3,)
    assert count_kinds(recording)[CollectiveKind.REDUCE_SCATTER] == 4  # a layer each; none at root


def test_a_gan_in_a_process_of_its_own_runs_two_iterations(
    capfd: pytest.CaptureFixture[str],
) -> None:
    result = run_program("adversarial", num_per_node=1)
    assert result.failures == ()
    assert result.num_steps == 2
    printed = capfd.readouterr().out
    assert "iteration 1" in printed
    assert "iteration 2" not in printed
    facts = [gap.fact for gap in result.recording.gaps]
    assert any(fact.startswith("48 calls of Linear without gradients") for fact in facts)
    assert any("the branch that raises was not taken" in fact for fact in facts)


def test_every_pipeline_stage_runs_and_stages_exchange_shapes() -> None:
    result = run_program("pipeline", ranks="roles", steps=1, instruments=("trace",))
    assert result.failures == ()
    recording = result.recording
    assert sorted({collective.rank for collective in recording.collectives}) == [0, 1, 2, 3, 4]
    kinds = Counter(call.kind for call in recording.collectives if call.rank < 4)
    assert kinds[CollectiveKind.SEND] == kinds[CollectiveKind.RECV] > 0


def test_records_without_data_with_data_and_of_real_ranks_are_equal() -> None:
    options = {"num_per_node": 4, "steps": 1, "instruments": ("audit", "trace")}
    simulated = run_program("portable", ranks="all", **options)
    computed = run_program("portable", data=True, **options)
    real = run_program("portable", real=True, **options)
    assert simulated.failures == computed.failures == real.failures == ()
    assert simulated.recording.run.is_simulated
    assert not computed.recording.run.is_simulated
    assert not real.recording.run.is_simulated
    assert computed.recording.gaps == ()  # what was read was real
    assert computed.recording.modules == real.recording.modules

    def describe(recording: Recording) -> list[tuple[object, ...]]:
        return [
            (
                call.rank, call.order, call.group, call.kind, call.axis, call.dtype,
                call.input_bytes, call.output_bytes, call.phase, call.owner, call.trigger,
                call.source and call.source.line,
            )
            for call in recording.collectives
        ]  # fmt: skip

    assert describe(simulated.recording) == describe(real.recording) != []
    assert describe(computed.recording) == describe(real.recording)


def test_a_program_for_gpus_runs_with_data(capfd: pytest.CaptureFixture[str]) -> None:
    result = run_program("ddp", "--workers", "1", num_per_node=2, data=True)
    assert result.failures == ()
    assert result.num_steps == 2
    recording = result.recording
    assert set(recording.run.instruments) == {"audit", "trace"}
    assert {collective.rank for collective in recording.collectives} == {0, 1}
    assert {gap.fact.partition(" ")[0] for gap in recording.gaps} == {"autocast()"}
    lines = [line for line in capfd.readouterr().out.splitlines() if "loss" in line]
    assert len(lines) == 2
    assert "loss 1.000" not in lines[0]  # no stand-in
    assert list(Path().iterdir()) == []


FAILS_ON_RANK_1 = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 1:
    raise ValueError("no such shard")
dist.all_reduce(torch.ones(2, device="cuda"))
"""


def test_only_the_rank_that_failed_first_is_blamed_with_data() -> None:
    Path("program.py").write_text(FAILS_ON_RANK_1)
    result = run("program.py", num_per_node=2, data=True)
    assert result.failures == ("Rank 1 failed: ValueError: no such shard (program.py, line 6).",)


def test_only_the_instruments_that_were_asked_for_record() -> None:
    result = run_program("spawned", num_per_node=2, instruments=("audit",))
    assert result.failures == ()  # although no step was run
    assert result.num_steps == 0
    assert result.recording.run.instruments == ("audit",)
    assert result.recording.collectives == ()


def test_any_rank_of_a_large_cluster_runs() -> None:
    result = run_program("spawned", num_nodes=128, ranks=[1023], steps=1)
    assert result.failures == ()
    (gap,) = [gap for gap in result.recording.gaps if gap.place == "world" and "joined" in gap.fact]
    assert "rank 7 of 8" in gap.fact  # the program counts the GPUs of its host


def test_trainer_of_transformers_runs() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    result = run_program("hf_trainer")
    assert result.failures == ()
    assert result.num_steps == 2
    assert "LlamaForCausalLM" in {module.type for module in result.recording.modules}


def test_accelerate_runs() -> None:
    pytest.importorskip("accelerate")
    result = run_program("accelerated")
    assert result.failures == ()
    assert result.recording.run.num_forwards == 4  # two accumulated for each step


def test_lightning_runs() -> None:
    pytest.importorskip("lightning")
    result = run_program("lightning_parallel")
    assert result.failures == ()
    assert {axis.name for axis in result.recording.run.axes} == {
        "data_parallel", "tensor_parallel",
    }  # fmt: skip


FAILURES = (
    ("raise ValueError('no data')", "failed: ValueError: no data (program.py, line 4)."),
    (
        "try:\n    open('missing')\nexcept OSError:\n    raise SystemExit(1)",
        "failed: FileNotFoundError: [Errno 2] No such file or directory: 'missing'",
    ),
    ("print('nothing to do')", "ended without calling a model"),
    ("open('missing.txt')", "if another rank writes the file, create it before the run"),
    ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph() was called in a simulated world"),
    ("import missing_package", "ModuleNotFoundError: No module named 'missing_package'"),
)


def test_a_failure_is_a_sentence() -> None:
    branches = [
        f"if os.environ['RANK'] == '{rank}':\n{indent(code, '    ')}"
        for rank, (code, _) in enumerate(FAILURES)
    ]
    Path("program.py").write_text("\n".join(("import os", "import torch", *branches)))
    result = run("program.py", steps=1, num_per_node=len(FAILURES), ranks="all")
    assert not result.has_recording
    assert len(result.failures) == len(FAILURES)
    for rank, (_, sentence) in enumerate(FAILURES):
        (failure,) = (text for text in result.failures if text.startswith(f"Rank {rank} "))
        assert sentence in failure
    assert [file.name for file in Path().iterdir()] == ["program.py"]


STOPS_LATE = """
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.randn(2, 4).cuda()).sum().backward()
    optimizer.step()
    if step == 1:
        raise RuntimeError("the disk is full")
"""


def test_steps_before_a_failure_are_kept() -> None:
    Path("program.py").write_text(STOPS_LATE)
    result = run("program.py", steps=5)
    assert "RuntimeError: the disk is full (program.py, line 9)" in result.failures[0]
    assert result.num_steps == 2
    assert result.recording.stops[0].error == "RuntimeError: the disk is full"
    assert result.recording.memory[0].peak_bytes > 0


def test_processes_that_the_program_leaves_behind_are_ended() -> None:
    marker = f"shardscope-left-behind-{os.getpid()}"
    Path("program.py").write_text(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', "
        f"'import time; time.sleep(600)  # {marker}'])\n"
    )
    run("program.py")
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert not [line for line in processes.stdout.splitlines() if marker in line and "-c" in line]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_nodes": 0}, "--nnodes is 0. Give a number of at least 1."),
        ({"ranks": "8"}, "--ranks names 8, but the cluster has ranks 0 to 7."),
        ({"ranks": "first"}, "--ranks is 'first'. Give ranks and spans such as 0,8-15"),
        ({"gpu": "v100"}, "The GPU 'v100' is not known. Choose one of h200, h100, a100, b200."),
        (
            {"real": True, "checkpoints": "skip"},
            "Checkpoints of real ranks cannot be skipped: these write their own files.",
        ),
        ({"checkpoints": "keep"}, "checkpoints is 'keep'. Choose 'scratch' or 'skip'."),
        ({"steps": 0}, "The number of steps is 0. Give at least 1."),
        ({"real": True, "num_nodes": 2}, "need a torchrun on each of them"),
        ({"data": True, "num_nodes": 4}, "With --data all 32 ranks would run at once on this"),
        ({"data": True, "real": True}, "--data and --real were both given."),
        ({"instruments": ("time",)}, "The instruments are 'time'. Choose some of audit, explain"),
        ({"instruments": ()}, "The instruments are none. Choose some of"),
        (
            {"data": True, "num_nodes": 1, "instruments": ("memory",)},
            "The memory of a GPU is estimated without data only",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(LaunchError) as error:
        run_program("ddp", **options)
    assert sentence in str(error.value)


def test_a_missing_program_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"^train.py does not exist. Give the path"):
        run("train.py")


def test_the_command_prints_a_summary_and_the_next_command() -> None:
    command = [sys.executable, "-m", "shardscope", "run", "--steps", "1", "-o", "run.json"]
    done = subprocess.run(
        [*command, "--", str(PROGRAMS / "spawned.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0: 1.0" in done.stdout  # what the program prints
    assert "fits in 140 GiB" in done.stdout
    assert done.stdout.rstrip().endswith("next: shardscope report run.json")
