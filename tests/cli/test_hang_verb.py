"""hang: one sentence that says who hangs a run, the evidence for it, JSON, files that are saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from benchmarks.hang.faults import Fault, Outcome, run_fault
from benchmarks.hang.schedule import World
from benchmarks.hang.scoring import WRITERS
from click.testing import CliRunner, Result

from shardscope import explain_hang, load
from shardscope.cli import main
from shardscope.record import expand_ranks

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "result.schema.json"
Run = Callable[..., Result]


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(
        main, ["hang", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False
    )


def write(folder: Path, kind: str, *formats: str, rank: int = 5, axis: str = "dp") -> Outcome:
    """Files of a fault of a rank of 8, in its last step."""
    world = World({"dp": 4, "tp": 2})
    outcome = run_fault(world, Fault(kind, axis, rank, 3), seed=1)
    for name in formats:
        WRITERS[name](outcome, folder)
    return outcome


def test_the_first_sentence_says_which_rank_and_what_the_others_wait_in(
    hang: Run, tmp_path: Path
) -> None:
    write(tmp_path, "data_loading", "stream", "py_spy")
    result = hang("run-*.jsonl", "pyspy_*")
    assert result.exit_code == 1
    sentence = result.output.splitlines()[2]
    assert sentence.startswith("Hangs: rank 5 is in its data loader (certain), and all other ranks")
    assert "wait for it in " in sentence
    head, _, rest = result.output.partition("Likely cause")
    assert "Findings" not in result.output
    assert "rank-behind" in rest.splitlines()[1]
    assert "→ Let the loader fail instead of wait" in rest
    sections = ["Who waits for whom", "How far the ranks have come", "What the ranks do", "Files"]
    places = [rest.index(section) for section in sections]
    assert places == sorted(places)
    assert len(head.splitlines()) < 6


def test_formats_can_be_mixed_and_a_missing_rank_is_named(hang: Run, tmp_path: Path) -> None:
    write(tmp_path, "skip", "flight", "flight_json", "stream", "nccl_log", "log")
    (cause, *_) = explain_hang(".").hangs[0].causes
    assert (cause.kind, expand_ranks(cause.ranks)) == ("skipped_call", (5,))
    for number in range(8):  # hosts in the names, and no file of the rank that is waited for
        name = f"gpu4-node{number}_nccl_trace_rank_{number}"
        shutil.move(f"nccl_trace_rank_{number}", name)
    Path("gpu4-node5_nccl_trace_rank_5").unlink()
    result = hang("gpu4-*")
    assert "rank 5 left no file" in result.output
    (analysis,) = explain_hang("gpu4-*").hangs
    assert expand_ranks(analysis.missing_ranks) == (5,)


def test_a_document_has_the_published_shape_and_fits(hang: Run, tmp_path: Path) -> None:
    write(tmp_path, "size", "stream")
    result = hang("run-*.jsonl", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    assert document["verdict"] == "problems"
    (figures,) = document["figures"]["hangs"]
    assert figures["verdict"].startswith("It hangs: rank 5 passes other arguments")
    assert figures["causes"][0]["kind"] == "mismatch"
    assert figures["causes"][0]["remedy"]
    assert {side["ranks"] for side in figures["sides"]} == {"5", "1-3/2,7"}


def test_an_analysis_is_saved_only_on_demand_and_shown_again(hang: Run, tmp_path: Path) -> None:
    write(tmp_path, "crash", "stream")
    files = set(tmp_path.iterdir())
    hang("run-*.jsonl")
    assert set(tmp_path.iterdir()) == files
    result = hang("run-*.jsonl", "-o", "hang.json.gz")
    assert "saved hang.json.gz" in result.output
    recording = load("hang.json.gz")
    assert recording.hangs == explain_hang("run-*.jsonl").hangs
    shown = CliRunner().invoke(main, ["show", "hang.json.gz"], env={"COLUMNS": "200"})
    assert "Hangs: rank 5 ended (certain)" in shown.output


def test_files_of_one_rank_do_not_say_that_nothing_hangs(hang: Run, tmp_path: Path) -> None:
    write(tmp_path, "skip", "flight")
    result = hang("nccl_trace_rank_0")
    assert "No hang" not in result.output


def test_text_of_a_log_cannot_control_the_terminal(hang: Run, tmp_path: Path) -> None:
    Path("run.log").write_text(
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "\x1b[2Jtrain.py", line 1, in <module>\n'
        "[rank0]: ValueError: \x1b]0;title\x07 ::error::x\n"
    )
    result = hang("run.log")
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    assert not any(line.startswith("::") for line in result.output.splitlines())
