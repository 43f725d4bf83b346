"""`shardscope report`: what it writes, where, and what it says of what it cannot read."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from page_reader import read_page
from sample_recordings import make_llama, make_ranks, make_recording
from shardscope.cli import main
from shardscope.record import load, save
from shardscope.report.html.html import render_html


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, args)])


def test_the_page_is_written_next_to_the_recording(here: Path) -> None:
    save(make_llama(num_layers=2), here / "run.json.gz")
    result = run("run.json.gz")
    assert (result.exit_code, result.output) == (0, "saved run.html\n")
    html = (here / "run.html").read_text(encoding="utf-8")
    assert html == render_html(load(here / "run.json.gz"), files=["run.json.gz"])


def test_several_files_are_merged_and_the_ranks_compared(here: Path) -> None:
    for rank in range(2):
        whole = make_ranks(2, [{}] * (3 - rank))
        calls = tuple(call for call in whole.collectives if call.rank == rank)
        save(make_recording(calls, world_size=2, ranks=(rank,)), here / f"rank{rank}.json")
    assert run("rank0.json", "rank1.json", "-o", "both.html").exit_code == 0
    page = read_page((here / "both.html").read_text(encoding="utf-8"))
    assert page.run.ranks == "all 2 ranks"
    assert [finding.severity for finding in page.findings] == ["error"]


def test_an_existing_file_is_not_overwritten_without_force(here: Path) -> None:
    save(make_llama(num_layers=1), here / "run.json")
    (here / "run.html").write_text("mine")
    result = run("run.json")
    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert (here / "run.html").read_text() == "mine"
    assert run("run.json", "--force").exit_code == 0
    assert (here / "run.html").read_text() != "mine"


@pytest.mark.parametrize("target", ["run.json", "./old.json", "link.json"])
def test_a_recording_that_is_read_is_never_written_over(here: Path, target: str) -> None:
    for name in ("run.json", "old.json"):
        save(make_llama(num_layers=1), here / name)
    (here / "link.json").symlink_to("run.json")
    result = run("run.json", "--against", "old.json", "-o", target, "--force")
    assert result.exit_code == 2
    assert f"'{target}' is one of the recordings to read and would be overwritten" in result.stderr
    load(here / target)


def test_a_comparison_names_its_files(here: Path) -> None:
    save(make_llama(num_layers=1), here / "old.json")
    save(make_llama(num_layers=2), here / "new.json")
    assert run("new.json", "--against", "old.json").exit_code == 0
    comparison = read_page((here / "new.html").read_text(encoding="utf-8")).comparison
    assert comparison is not None
    assert (comparison.before, comparison.after) == ("old.json", "new.json")


def test_standard_output_gets_the_document(here: Path) -> None:
    save(make_llama(num_layers=1), here / "run.json")
    result = run("run.json", "-o", "-")
    assert result.exit_code == 0
    assert result.stdout_bytes == render_html(load(here / "run.json"), files=["run.json"]).encode()


@pytest.mark.parametrize("against", [False, True], ids=["the recording", "the other"])
def test_what_cannot_be_read_is_one_sentence(here: Path, against: bool) -> None:
    save(make_llama(num_layers=1), here / "run.json")
    (here / "bad.json").write_text("{")
    arguments = ("run.json", "--against", "bad.json") if against else ("bad.json",)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("shardscope: 'bad.json' is ")
    assert result.stderr.count("\n") == 1
    assert not list(here.glob("*.html"))


@pytest.mark.parametrize("verb", [["report"], ["export", "--to", "csv"]], ids=lambda verb: verb[0])
@pytest.mark.parametrize(("name", "fact"), [(".", "'.' is a folder"), ("", "there is no file ''")])
def test_a_folder_or_a_missing_file_is_not_a_recording(
    here: Path, verb: list[str], name: str, fact: str
) -> None:
    result = CliRunner().invoke(main, [*verb, name])
    assert result.exit_code == 2
    assert fact in result.stderr


def test_an_output_that_cannot_be_written_is_an_error_before_any_work(here: Path) -> None:
    result = run("missing.json", "-o", "nowhere/run.html")
    assert result.exit_code == 2
    assert "there is no folder 'nowhere'" in result.stderr


def test_open_shows_the_file_in_a_browser(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make_llama(num_layers=1), here / "run.json")
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)) or len(opened) < 2)
    assert run("run.json", "--open").stderr == ""
    assert opened == [(here / "run.html").as_uri()]
    result = run("run.json", "--open", "--force")
    assert result.exit_code == 0
    assert result.stderr == "shardscope: no browser could be started; open run.html by hand.\n"
