"""`--json`: every command prints one document to standard output and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from cli.small_target import TARGET, write
from cli.test_help import COMMANDS
from compared_recordings import make_pair
from sample_recordings import make_llama
from shardscope.cli import main
from shardscope.cli.verb import Verb
from shardscope.record import load, save
from shardscope.report.result.schema import make_result_schema
from warm_python import run_python

VALIDATOR = jsonschema.Draft202012Validator(make_result_schema())
WITHOUT_JSON = {("tui",), ("mcp",), ("serve",), ("completion",)}
VERBS = {path: command for path, command in COMMANDS.items() if isinstance(command, Verb)}


def run(*args: str, exit_code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(main, [*args, "--json"])
    assert result.exit_code == exit_code, result.stdout + result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    VALIDATOR.validate(document)
    assert document["exit_code"] == exit_code
    assert document["command"].startswith(f"shardscope {args[0]}")
    return document


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_command_has_the_option_or_a_reason_why_not(path: tuple[str, ...]) -> None:
    command = VERBS[path]
    options = [option for parameter in command.params for option in parameter.opts]
    assert ("--json" in options) != bool(command.instead_of_json)
    assert not command.instead_of_json or path in WITHOUT_JSON


def test_a_command_without_the_option_says_what_to_use() -> None:
    document = run("tui", "run.json", exit_code=2)
    assert document["error"]["message"] == (
        "tui has no --json. It draws a screen; shardscope show --json prints the recording."
    )


def test_instruments_report_figures_and_the_files_that_they_saved(here: Path) -> None:
    write(here, TARGET)
    traced = run("trace", "train.py", "--mesh", "dp=4")
    assert traced["verdict"] == "ok"
    assert traced["run"]["mesh"] == "dp=4"
    assert traced["figures"]["communication"]["count"] == 4
    assert traced["files"] == [{"path": "train.shardscope.json.gz"}]
    assert traced["summary"].startswith("As expected: FSDP ")
    collectives = load("train.shardscope.json.gz").collectives
    sent = sum(call.wire_bytes for call in collectives)
    assert traced["figures"]["communication"]["wire_bytes"] == sent

    audited = run("audit", "train.py", "--mesh", "dp=4", "-o", "audit.json", exit_code=1)
    assert [entry["rule"] for entry in audited["findings"]] == ["root-not-sharded"]
    placed = {entry["name"]: entry for entry in audited["figures"]["sharding"]["parameters"]}
    assert placed["0.weight"]["placements"] == {"dp": "Shard(0)"}

    drawn = run("visualize", "train.py", "0.weight", "--mesh", "dp=4", "-o", "drawn.json")
    slices = drawn["figures"]["layouts"][0]["slices"]
    assert slices[0] == {"ranks": "0", "indices": "0:16, :"}

    too_large = run(
        "memory",
        "train.py",
        "--mesh",
        "dp=4",
        "--gpu-memory",
        "512MiB",
        "-o",
        "memory.json",
        exit_code=1,
    )
    figures = too_large["figures"]["memory"]
    assert figures["fits"] is False
    assert figures["needed_bytes"] > figures["device_bytes"] == 512 << 20
    assert sum(figures["kinds"].values()) == figures["peak_bytes"]
    assert sum(line["num_bytes"] for line in figures["lines"]) == figures["peak_bytes"]
    assert too_large["verdict"] == "problems"
    assert too_large["findings"][0]["remedy"]

    explained = run("explain", "train.py", "-o", "explain.json")
    assert explained["figures"]["compiler"][0]["num_graphs"] == 1

    merged = run("merge", "train.shardscope.json.gz", "memory.json", exit_code=1)
    assert {"communication", "memory"} <= set(merged["figures"])

    assert run("contract", "record", "train.shardscope.json.gz")["files"][0]["path"] == (
        "shardscope.toml"
    )
    kept = run("contract", "check", "train.shardscope.json.gz")
    assert kept["verdict"] == "ok"
    assert kept["figures"]["contract"]["num_violations"] == 0


def test_reading_commands_report_figures_and_files(here: Path) -> None:
    before, after = make_pair()
    save(before, "before.json")
    save(after, "after.json")
    changed = run("diff", "before.json", "after.json", "--fail-on", "worse", exit_code=1)
    assert changed["verdict"] == "problems"
    assert changed["figures"]["comparisons"][0]["num_worse"] > 0
    assert changed["messages"][0].startswith("--fail-on matched: worse")
    assert run("report", "before.json")["files"] == [{"path": "before.html"}]
    assert run("export", "before.json", "--to", "csv")["files"] == [{"path": "before.csv"}]
    exported = run("export", "before.json", "--to", "chakra")
    assert all((here / file["path"]).is_file() for file in exported["files"])
    selected = run("show", "before.json", "--module", "layers.0")
    everything = run("show", "before.json")
    assert selected["figures"]["communication"]["count"] > 0
    assert (
        selected["figures"]["communication"]["count"]
        < everything["figures"]["communication"]["count"]
    )


def test_limits_that_are_exceeded_are_listed_with_their_line(here: Path) -> None:
    save(make_llama(), "run.json")
    run("contract", "record", "run.json", "--by", "axis")
    contract = (here / "shardscope.toml").read_text()
    (here / "shardscope.toml").write_text(re.sub(r"count = \d+", "count = 1", contract))
    document = run("contract", "check", "run.json", exit_code=1)
    figures = document["figures"]["contract"]
    assert document["verdict"] == "problems"
    assert figures["num_violations"] >= len(figures["violations"]) > 0
    violation = figures["violations"][0]
    assert violation["line"].startswith("shardscope.toml:")
    assert violation["expected"] == "exactly 1"
    assert violation["evidence"]


def test_a_command_that_only_saves_says_so_in_its_summary(here: Path) -> None:
    save(make_llama(num_layers=1, ranks=(0,)), here / "run.json")
    document = run("contract", "record", "run.json")
    assert re.fullmatch(r"saved shardscope\.toml \(\d+ limits\)", document["summary"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "gone.json"), "there is no file 'gone.json'. Check the path."),
        (("show",), "Missing argument 'FILE...'."),
        (("show", "x", "--veiw", "all"), "No such option '--veiw'. Did you mean '--view'?"),
        (("tarce", "x"), "No such command 'tarce'. Did you mean 'trace'?"),
        (("report", "run.json", "-o", "-"), "-o - and --json both write to standard output."),
        (("diff", "a", "b", "--format", "json"), "--format json and --json both write"),
        (("contract", "chek"), "No such command 'chek'. Did you mean 'check'?"),
    ],
)
def test_errors_are_documents_with_the_sentence(args: tuple[str, ...], message: str) -> None:
    document = run(*args, exit_code=2)
    assert document["verdict"] == "failed"
    assert message in document["error"]["message"]
    assert message in document["summary"]


def test_a_program_that_fails_has_both_its_recording_and_its_error(here: Path) -> None:
    failing = TARGET + "\ndef step(model, batch):\n    model(batch).sum()\n    1 / 0\n"
    write(here, failing)
    document = run("trace", "train.py", "--mesh", "dp=4", exit_code=2)
    assert document["verdict"] == "failed"
    assert "ZeroDivisionError" in document["error"]["message"]
    assert document["summary"].startswith(
        "failed: see error. Recorded before: Does not run: Rank 0 stop"
    )
    assert document["figures"]["communication"]["count"] == 2
    assert document["figures"]["stops"][0]["rank"] == 0
    assert (here / document["files"][0]["path"]).is_file()


def test_only_the_document_goes_to_standard_output_whatever_the_program_prints(
    here: Path,
) -> None:
    noise = (
        "import os, subprocess\nprint('from python')\nos.write(1, b'from the descriptor\\n')\n"
        "subprocess.run(['echo', 'from a child'])\n"
    )
    write(here, noise + TARGET)
    words = ("trace", "train.py", "--mesh", "dp=2", "--json")
    done = run_python("-m", "shardscope", *words)
    assert done.returncode == 0, done.stderr
    VALIDATOR.validate(json.loads(done.stdout))
    for source in ("python", "the descriptor", "a child"):
        assert f"from {source}\n" in done.stderr


def test_the_flag_of_a_program_is_not_ours(here: Path) -> None:
    for words in (["run", "train.py", "--json"], ["run", "--", "train.py", "--json"]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("shardscope: ")


def test_help_stays_text() -> None:
    result = CliRunner().invoke(main, ["show", "--json", "--help"])
    assert result.stdout.startswith("Usage:")


def test_a_closed_pipe_is_no_error(here: Path) -> None:
    save(make_llama(), "run.json")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        words = [sys.executable, "-m", "shardscope", "show", "run.json", "--json"]
        done = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert done.stderr == b""
