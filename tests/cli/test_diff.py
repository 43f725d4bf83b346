"""`shardscope diff`: what it prints, and what it exits with."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from compared_recordings import make_pair, make_traced
from shardscope.cli import main
from shardscope.record import save


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call the command line in a folder with a pair of recordings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    before, after = make_pair()
    save(before, tmp_path / "a.json")
    save(after, tmp_path / "b.json.gz")
    save(make_traced({"layers.0.up": 1}), tmp_path / "one.json")
    save(make_traced({"layers.0.up": 2}), tmp_path / "two.json")
    return lambda *args: CliRunner().invoke(main, ["diff", *args])


def test_changes_are_printed_and_exit_with_0(run):
    result = run("a.json", "b.json.gz")
    assert result.exit_code == 0
    assert result.stdout.startswith("shardscope diff · a.json → b.json.gz\n")
    assert "layers.{0…3}.attention.wo ×4" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_no_fold_shows_every_layer_and_inputs(run):
    result = run("a.json", "b.json.gz", "--no-fold")
    assert "layers.3.attention.wo" in result.stdout
    assert "all_reduce[tp] in forward, input" in result.stdout


def test_the_same_recording_twice_has_no_change(run):
    result = run("a.json", "a.json", "--fail-on", "any")
    assert result.exit_code == 0
    assert "No change." in result.stdout


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("any", 1),
        ("worse", 1),
        ("collectives", 1),
        ("bytes", 1),
        ("bytes:worse", 1),
        ("collectives:added", 1),
        ("collectives:gone", 0),
        ("memory,graph-breaks", 0),
        ("memory, placements", 1),
        ("placements:worse", 0),
        ("placements:changed", 1),
        ("any:gone", 0),
    ],
)
def test_fail_on_decides_the_exit_code(run, what, code):
    result = run("a.json", "b.json.gz", "--fail-on", what)
    assert result.exit_code == code
    assert bool(result.stderr) == bool(code)


def test_what_failed_is_printed_on_standard_error(run):
    result = run("a.json", "b.json.gz", "--fail-on", "collectives:added", "--fail-on", "run,memory")
    assert result.exit_code == 1
    assert (
        result.stderr
        == "shardscope: --fail-on matched: collectives:added (4 changes), run (1 change)\n"
    )


def test_a_decrease_is_a_change_but_not_worse(run):
    assert run("two.json", "one.json", "--fail-on", "worse").exit_code == 0
    assert run("two.json", "one.json", "--fail-on", "collectives").exit_code == 1


@pytest.mark.parametrize(("share", "code"), [("100%", 0), ("1", 0), ("99%", 1), ("0.5", 1)])
def test_bytes_may_change_within_the_tolerance(run, share, code):
    result = run("one.json", "two.json", "--tolerance", share, "--fail-on", "bytes")
    assert result.exit_code == code


def test_areas_and_modules_can_be_selected_and_fail_on_ignores_the_others(run):
    result = run("a.json", "b.json.gz", "--area", "run,bytes", "--area", "findings")
    assert "Collectives" not in result.stdout
    assert "Run" in result.stdout
    result = run("a.json", "b.json.gz", "--module", "layers.**.wq", "--fail-on", "collectives")
    assert result.exit_code == 0
    assert "attention.wo" not in result.stdout
    assert "attention.wq" in result.stdout


def test_json_output_is_plain_json(run):
    result = run("a.json", "b.json.gz", "--format", "json", "--area", "collectives")
    document = json.loads(result.stdout)
    (change,) = document["changes"]
    assert (change["path"], change["status"]) == ("layers.{0…3}.attention.wo", "added")
    assert [area["area"] for area in document["areas"]] == ["collectives"]


def test_markdown_is_for_pull_requests(run):
    result = run("a.json", "b.json.gz", "--format", "markdown")
    assert result.stdout.startswith("### What changed: `a.json` → `b.json.gz`\n")
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["--fail-on", "byts"],
            "Unknown --fail-on value 'byts'. Did you mean 'bytes'? Choose from any, worse,",
        ),
        (["--fail-on", "bytes:bad"], "Unknown kind of change 'bad' in --fail-on 'bytes:bad'."),
        (["--fail-on", ""], "Unknown --fail-on value ''."),
        (["--area", "worse"], "Unknown --area value 'worse'. Choose from findings,"),
        (
            ["--tolerance", "5 MiB"],
            "--tolerance must be a percentage or fraction, such as 5% or 0.05; got '5 MiB'.",
        ),
        (
            ["--tolerance", "-1"],
            "--tolerance must be a percentage or fraction, such as 5% or 0.05; got '-1'.",
        ),
        (
            ["--tolerance", "nan"],
            "--tolerance must be a percentage or fraction, such as 5% or 0.05; got 'nan'.",
        ),
        (
            ["--module", "layer.*"],
            "--module 'layer.*' matches no module of either recording. Did you mean 'layers.",
        ),
    ],
)
def test_wrong_names_end_in_a_sentence(run, args, sentence):
    result = run("a.json", "b.json.gz", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"shardscope: {sentence}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_files_that_cannot_be_read_end_in_a_sentence(run, tmp_path):
    result = run("a.json", "none.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "shardscope: there is no file 'none.json'. Check the path.\n"
    (tmp_path / "bad.json").write_text("{}")
    result = run("bad.json", "a.json")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_export_writes_markdown_with_what_changed(run, tmp_path):
    def export(*args):
        return CliRunner().invoke(main, ["export", "b.json.gz", *args])

    assert export("--to", "markdown").stdout == "saved b.md\n"
    assert "What changed" not in (tmp_path / "b.md").read_text()
    result = export("--to", "markdown", "--against", "a.json", "-o", "-")
    assert "### What changed: `a.json` → `b.json.gz`" in result.stdout
    result = export("--to", "csv", "--against", "a.json")
    assert result.exit_code == 2
    assert "--against is for --to markdown; --to csv has one recording." in result.stderr
