"""`shardscope show --view`: what is asked for, of one module, coloured on a terminal alone."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from sample_recordings import make_holdings, make_llama, make_recording
from shardscope.cli import main
from shardscope.record import Finding, Severity, save
from shardscope.report.model.traffic_totals import fold_ranks
from shardscope.report.text.verdict import judge
from terminals import run_in_terminal

_TITLES = {
    "overview": "Figures",
    "modules": "Most expensive modules",
    "communication": "From rank to rank",
    "sharding": "Placements",
    "coverage": "Op coverage",
    "memory": "Memory over the step",
    "correctness": "Parity",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.mark.parametrize("view", _TITLES)
def test_a_view_shows_its_subject_and_no_other(run, tmp_path, view):
    made = make_llama(num_layers=2) if view in ("modules", "communication") else make_holdings()
    save(made, tmp_path / "run.json")
    result = run("show", "run.json", "--view", view)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("shardscope · ")
    assert _TITLES[view] in result.output
    others = (title for name, title in _TITLES.items() if name != view)
    assert not any(f"\n{title}" in result.output for title in others)


def test_the_old_name_of_a_view_still_works(run, tmp_path):
    save(make_holdings(), tmp_path / "run.json")
    assert "proof" not in run("show", "--help").output
    named = [run("show", "run.json", "--view", name) for name in ("correctness", "proof")]
    assert named[0].output == named[1].output


def test_views_can_be_repeated_and_all_is_all_of_them(run, tmp_path):
    save(make_holdings(), tmp_path / "run.json")
    two = run("show", "run.json", "--view", "memory", "--view", "coverage").output
    assert two.index("Op coverage") < two.index("Memory over the step")
    whole = run("show", "run.json", "--view", "all").output
    assert all(f"\n{_TITLES[view]}" in whole for view in ("overview", "coverage", "correctness"))
    assert "shardscope explain" in whole


def test_without_a_view_the_summary_is_printed(run, tmp_path, llama):
    save(llama, tmp_path / "run.json")
    output = run("show", "run.json").output
    assert "\nAs expected: Redistribution Shard(dim=1) → " in output
    assert "Causes  one source line each" in output
    assert "From rank to rank" not in output


def test_module_selects_a_module_and_its_children_in_summary_and_views(run, tmp_path, llama):
    save(llama, tmp_path / "run.json")
    output = run("show", "run.json", "--module", "layers.3.attention").output
    assert "4 collectives per rank" in output
    assert "feed_forward" not in output
    sentence = judge(llama, fold_ranks(llama)).sentence  # of all modules
    assert sentence in " ".join(output.split())
    output = run("show", "run.json", "--module", "layers.*.attention", "--view", "modules").output
    assert "0 … 31 ×32" in output
    assert "tok_embeddings" not in output


def test_a_module_that_is_not_there_is_one_sentence(run, tmp_path, llama):
    save(llama, tmp_path / "run.json")
    result = run("show", "run.json", "--module", "layer.3")
    assert result.exit_code == 2
    assert "no module that matches 'layer.3'. It has tok_embeddings, layers," in result.output
    save(make_recording(), tmp_path / "empty.json")
    result = run("show", "empty.json", "--module", "x")
    assert result.exit_code == 2
    assert result.output.endswith("It has no modules at all.\n")


def test_strict_checks_the_full_recording_whatever_is_shown(run, tmp_path):
    finding = Finding(rule="r", severity=Severity.ERROR, subject="s", fact="f", remedy="Do this.")
    save(make_llama(num_layers=1, ranks=(0,)), tmp_path / "fine.json")
    assert run("show", "fine.json", "--view", "proof", "--strict").exit_code == 0
    save(make_recording(findings=(finding,)), tmp_path / "run.json")
    assert run("show", "run.json", "--view", "memory").exit_code == 0
    assert run("show", "run.json", "--view", "memory", "--strict").exit_code == 1


_COLOR = re.compile(r"\x1b\[[\d;]*?(3\d|9\d|38;5;\d+)[\d;]*m")


def _show(file, **variables):
    code, printed = run_in_terminal("show", str(file), "--view", "memory", **variables)
    assert code == 0
    return printed


def test_colours_are_for_terminals_and_not_with_no_color(run, tmp_path):
    file = save(make_holdings(), tmp_path / "run.json")
    coloured = _show(file)
    assert _COLOR.search(coloured)
    assert "█" in coloured
    plain = _show(file, NO_COLOR="1")
    assert not _COLOR.search(plain)
    assert "PPPP" in plain
    assert "\x1b" not in run("show", "run.json", "--view", "memory").output
