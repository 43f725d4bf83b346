"""Real gloo processes: the same code records, files merge, and simulated worlds said the truth."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

import rank_programs
from rank_processes import TIMEOUT_S, rank_environment, run_ranks
from shardscope import Recording, load, simulate
from shardscope.cli import main
from shardscope.hang import match_ranks
from shardscope.record import BucketReduce, Collective, Module, format_ranks

PROGRAM = Path(rank_programs.__file__)
AGREEING = (
    "train_tensor_parallel_with_fsdp",
    "train_with_ddp",
    "train_in_a_pipeline",
    "call_everything",
    "exchange_objects",
)


def merge(output: Path, *files: Path) -> Result:
    arguments = ["merge", *(str(file) for file in files), "-o", str(output)]
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four real ranks recorded of every program."""
    folder = tmp_path_factory.mktemp("gloo")
    names = (*AGREEING, "disagree_on_a_reduction", "disagree_on_what_comes_next")
    for code, printed in run_ranks(4, PROGRAM, str(folder), *names):
        assert code == 0, printed
    return folder


@pytest.fixture(scope="module")
def merged(folder: Path) -> dict[str, Recording]:
    """The recordings of ranks that agree, merged."""
    recordings = {}
    for name in AGREEING:
        output = folder / f"{name}.json.gz"
        result = merge(output, *folder.glob(f"{name}-?.json.gz"))
        assert result.exit_code == 0, result.output
        recordings[name] = load(output)
    return recordings


@pytest.mark.parametrize("name", AGREEING)
def test_merging_finds_all_ranks_no_gaps_and_nothing_wrong(
    merged: dict[str, Recording], name: str
) -> None:
    recording = merged[name]
    assert format_ranks(recording.run.ranks) == "0-3"
    assert not recording.run.is_simulated
    assert recording.run.device_type == "cpu"
    assert recording.gaps == ()
    assert recording.findings == ()
    assert match_ranks(recording) == ()
    assert {c.rank for c in recording.collectives} == {0, 1, 2, 3}
    assert {group.backend for group in recording.groups} == {"gloo"}


def test_groups_have_one_name_on_all_their_ranks(merged: dict[str, Recording]) -> None:
    recording = merged["train_tensor_parallel_with_fsdp"]
    assert sorted(group.name for group in recording.groups) == [
        "dp[0-2/2]",
        "dp[1-3/2]",
        "tp[0-1]",
        "tp[2-3]",
    ]
    users = {
        group.name: {c.rank for c in recording.collectives if c.group == group.name}
        for group in recording.groups
    }
    assert users == {"dp[0-2/2]": {0, 2}, "dp[1-3/2]": {1, 3}, "tp[0-1]": {0, 1}, "tp[2-3]": {2, 3}}


def test_phases_of_each_rank_are_its_own_and_on_its_collectives_clock(
    merged: dict[str, Recording],
) -> None:
    recording = merged["train_tensor_parallel_with_fsdp"]
    assert [(span.rank, span.name, span.depth) for span in recording.spans] == [
        (rank, name, depth) for rank in range(4) for name, depth in (("optimizer", 1), ("step", 0))
    ]
    for span in recording.spans[1::2]:
        starts = [call.start_ns for call in recording.collectives if call.rank == span.rank]
        assert span.start_ns <= min(starts)
        assert max(starts) <= span.start_ns + span.duration_ns


def comparable(collective: Collective) -> Collective:
    """Without what a real rank and a simulated one may differ in."""
    return replace(
        collective,
        start_ns=0,
        returned_ns=0,  # a simulation has no clock
        # A real program without a mesh has no axes; a simulated world always has.
        axis=None if collective.axis == "world" else collective.axis,
        # Only gloo has no average: FSDP then divides by hand and asks for the sum.
        reduce_op="sum" if collective.reduce_op == "avg" else collective.reduce_op,
    )


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", AGREEING)
def test_a_simulated_rank_issues_what_the_real_one_does(folder: Path, name: str, rank: int) -> None:
    real = load(folder / f"{name}-{rank}.json.gz")
    with simulate(mesh={"world": 4}, rank=rank):
        simulated = rank_programs.PROGRAMS[name]().recording
    assert len(simulated.collectives) == len(real.collectives)
    for one, other in zip(simulated.collectives, real.collectives, strict=True):
        assert comparable(one) == comparable(other)
    assert simulated.modules == real.modules
    assert len(real.collectives) > 3


def test_ddp_buckets_name_their_parameters(merged: dict[str, Recording]) -> None:
    recording = merged["train_with_ddp"]
    everything = {name for module in recording.modules for name in parameter_names(module)}
    for rank in range(4):
        buckets = [
            set(c.cause.parameters)
            for c in recording.collectives
            if c.rank == rank and isinstance(c.cause, BucketReduce)
        ]
        first_step, second_step = buckets[:1], buckets[1:]
        assert first_step == [everything]
        assert len(second_step) > 1
        assert set.union(*second_step) == everything


def parameter_names(module: Module) -> list[str]:
    return [f"{module.name}.{parameter.name}" for parameter in module.parameters]


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        (
            "disagree_on_a_reduction",
            "ranks disagree on reduce op at position 1 of group world[0-3]",
        ),
        ("disagree_on_what_comes_next", "ranks disagree on kind at position 1 of group world[0-3]"),
    ],
)
def test_ranks_that_diverge_are_a_finding_and_exit_code_1(
    folder: Path, tmp_path: Path, name: str, fact: str
) -> None:
    result = merge(tmp_path / "merged.json", *folder.glob(f"{name}-?.json.gz"))
    assert result.exit_code == 1
    (finding,) = load(tmp_path / "merged.json").findings
    assert finding.rule == "rank-mismatch"
    assert finding.rank == 1
    assert finding.fact.startswith(fact)
    assert finding.source is not None
    assert finding.source.file.endswith("rank_programs.py")
    assert "rank-mismatch" in result.output


def test_a_rank_that_left_no_file_is_a_gap(folder: Path, tmp_path: Path) -> None:
    files = [folder / f"call_everything-{rank}.json.gz" for rank in (0, 1, 3)]
    result = merge(tmp_path / "merged.json", *files)
    assert result.exit_code == 0
    (gap,) = load(tmp_path / "merged.json").gaps
    assert gap.fact == "no recording of 1 of 4 ranks: 2"


def test_a_killed_rank_leaves_its_stream_up_to_its_last_event(tmp_path: Path) -> None:
    (survived, _), (killed, _) = run_ranks(2, PROGRAM, str(tmp_path), "die_in_the_third_step")
    assert (survived, killed) == (0, -signal.SIGKILL)
    left = load(tmp_path / "stream-1.jsonl")
    assert [c.input_bytes for c in left.collectives] == [16, 20, 24]
    assert [module.name for module in left.modules] == ["", "up", "down"]
    result = merge(
        tmp_path / "merged.json", tmp_path / "run-0.json.gz", tmp_path / "stream-1.jsonl"
    )
    assert result.exit_code == 0, result.output
    merged = load(tmp_path / "merged.json")
    assert format_ranks(merged.run.ranks) == "0-1"
    assert [(c.rank, c.input_bytes) for c in merged.collectives] == [
        (rank, size) for rank in (0, 1) for size in (16, 20, 24)
    ]
    (gap,) = merged.gaps
    assert gap.rank == 1


def test_torchrun_needs_nothing_else(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, str(PROGRAM), str(tmp_path), "train_with_ddp"],
        env=rank_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    result = merge(tmp_path / "merged.json", *tmp_path.glob("train_with_ddp-?.json.gz"))
    assert result.exit_code == 0, result.output
    assert format_ranks(load(tmp_path / "merged.json").run.ranks) == "0-1"
