"""`shardscope contract`: record, check, and what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.cli import main
from shardscope.record import Call, Recording, Source, save


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["contract", *args])


@pytest.fixture
def step(here: Path, llama: Recording) -> Path:
    """A folder with a recording, `step.json`, and its contract."""
    save(llama, here / "step.json")
    done = run("record", "step.json")
    assert (done.exit_code, done.output) == (0, "saved shardscope.toml (36 limits)\n")
    return here


def add_call(folder: Path, llama: Recording) -> None:
    """`grown.json`: the same with another all-reduce in a layer."""
    new = samples.make_collective(
        order=999,
        axis="tp",
        owner="layers.3.attention",
        cause=Call(api="torch.distributed.all_reduce"),
        source=Source(file=str(folder / "train.py"), line=42, text="dist.all_reduce(x)"),
    )
    save(replace(llama, collectives=(*llama.collectives, new)), folder / "grown.json")


def test_a_contract_that_was_recorded_passes_its_check(step: Path) -> None:
    done = run("check", "step.json")
    checks = "findings: which checks ran was not recorded\n"
    assert (done.exit_code, done.output) == (0, f"{checks}shardscope.toml: all 36 limits kept\n")


def test_a_violation_is_printed_in_eighty_columns_and_exits_with_1(
    step: Path, llama: Recording
) -> None:
    add_call(step, llama)
    done = run("check", "grown.json")
    assert done.exit_code == 1
    lines = [line.rstrip() for line in done.output.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[1:6] == [
        "collectives  shardscope.toml:11",
        "  expected  exactly 356",
        "  actual    357 on rank 0",
        "  cause     all_reduce[tp], forward, 7 KiB sent in layers.3.attention: call of",
        "            torch.distributed.all_reduce",
    ]
    assert "train.py:42dist.all_reduce(x)" in "".join("".join(lines).split())
    assert lines[-1] == "shardscope.toml: 2 of 36 limits broken"


def test_github_annotations_have_paths_relative_to_the_folder(step: Path, llama: Recording) -> None:
    add_call(step, llama)
    done = run("check", "grown.json", "--format", "github")
    assert done.exit_code == 1
    first, second, last = done.stdout_bytes.decode().splitlines()
    assert first.startswith(
        "::error file=train.py,line=42,title=shardscope contract%3A collectives::"
    )
    assert second.startswith("::error file=train.py,line=42,")
    assert last == "shardscope.toml: 2 of 36 limits broken"


def test_format_json_prints_the_violations_as_json(step: Path, llama: Recording) -> None:
    add_call(step, llama)
    done = run("check", "grown.json", "--format", "json")
    assert done.exit_code == 1
    told = json.loads(done.stdout_bytes)
    assert (told["contract"], told["num_limits"]) == ("shardscope.toml", 36)
    count, size = told["breaches"]
    assert (count["kind"], count["value"], count["line"]) == ("too much", 357, 11)
    assert count["evidence"][0]["source"]["line"] == 42
    assert size["limit"]["figure"] == "bytes"
    assert json.loads(run("check", "step.json", "--format", "json").stdout_bytes)["breaches"] == []


def test_several_instruments_and_several_ranks_are_checked_together(here: Path) -> None:
    for rank in (0, 1):
        calls = tuple(samples.make_collective(rank=rank, order=order) for order in range(rank + 1))
        run_info = samples.make_run(world_size=2, ranks=(rank,), instruments=("trace",))
        save(samples.make_recording(calls, world_size=2, run=run_info), here / f"r{rank}.json")
    save(samples.make_holdings(), here / "memory.json")
    (here / "shardscope.toml").write_text(
        "[contract]\npeak_memory = 1300\n[[contract.comm]]\nmin_count = 1\nmax_count = 2\n"
    )
    done = run("check", "r0.json", "r1.json", "memory.json")
    assert (done.exit_code, done.output) == (0, "shardscope.toml: all 2 limits kept\n")
    (here / "shardscope.toml").write_text("[[contract.comm]]\ncount = 1\n")
    done = run("check", "r0.json", "r1.json")
    assert done.exit_code == 1
    assert "actual    2 on rank 1" in done.output


def test_a_limit_that_was_not_measured_is_a_violation(step: Path) -> None:
    (step / "more.toml").write_text("[contract]\npeak_memory = '80GiB'\n")
    done = run("check", "step.json", "--contract", "more.toml")
    assert done.exit_code == 1
    assert "not measured" in done.output
    assert "shardscope memory TARGET" in done.output


def test_recording_again_keeps_comments_and_lists_removed_limits(step: Path) -> None:
    path = step / "shardscope.toml"
    own = "\n[[contract.comm]]\nmodule = 'gone'  # long since\ncount = 1\n"
    path.write_text(path.read_text().replace("gaps = 0", "gaps = 9  # hm") + own)
    assert run("record", "step.json").exit_code == 2
    done = run("record", "step.json", "--force", "--slack", "5%")
    assert done.exit_code == 0
    assert done.output == "saved shardscope.toml (36 limits; removed 1 that matched nothing)\n"
    assert "gaps = 0  # hm" in path.read_text()
    assert "long since" not in path.read_text()
    assert run("check", "step.json").exit_code == 0


def test_an_empty_file_can_be_recorded_into(step: Path) -> None:
    (step / "empty.toml").write_text("# limits\n")
    done = run("record", "step.json", "-o", "empty.toml", "--force")
    assert (done.exit_code, done.output) == (0, "saved empty.toml (36 limits)\n")
    assert run("check", "step.json", "--contract", "empty.toml").exit_code == 0


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("check", "step.json", "--contract", "none.toml"), "There is no contract 'none.toml'"),
        (("check", "none.json"), "none.json"),
        (
            ("record", "step.json", "-o", "x.toml", "--slack", "much"),
            "--slack must be a percentage or fraction from 0% to 100%, such as 5% or 0.05; got "
            "'much'",
        ),
        (("record", "step.json", "-o", "x.toml", "--slack", "-5%"), "got '-5%'"),
        (("record", "step.json", "-o", "x.toml", "--slack", "200%"), "from 0% to 100%"),
        (("record", "step.json", "-o", "no/x.toml"), "no folder"),
        (("record", "step.json"), "already exists"),
        (("check", "step.json", "--contract", "bad.toml"), "bad.toml, line 2: Unknown key 'gap'"),
        (("record", "step.json", "-o", "bad.toml", "--force"), "Did you mean 'gaps'?"),
    ],
)
def test_bad_input_prints_one_sentence_and_exits_with_2(
    step: Path, args: tuple[str, ...], sentence: str
) -> None:
    (step / "bad.toml").write_text("[contract]\ngap = 0\n")
    done = run(*args)
    assert done.exit_code == 2
    assert sentence in done.output
    assert done.output.startswith("shardscope: ")
    assert len(done.output.splitlines()) == 1
    assert "Traceback" not in done.output
    assert not (step / "x.toml").exists()
