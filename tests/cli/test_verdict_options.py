"""`show` and `report` with a contract or the size of a node: what the verdict makes of them."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from page_reader import read_page
from sample_recordings import make_collective, make_recording, make_run
from shardscope.cli import main
from shardscope.record import Group, RankSpan, save

_CONTRACT = """[contract]
graph_breaks = 0
comm = [{kind = "all_reduce", count = 1}, {kind = "all_gather", count = 0}]
"""


def _run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), env={"COLUMNS": "200"})


def _save_two_reductions(here: Path) -> None:
    calls = (make_collective(order=0), make_collective(order=1))
    run = make_run(instruments=("trace",))
    save(make_recording(collectives=calls, run=run), here / "run.json")
    (here / "shardscope.toml").write_text(_CONTRACT)


def test_an_exceeded_limit_is_the_verdict_and_a_finding(here: Path) -> None:
    _save_two_reductions(here)
    result = _run("show", "run.json", "--contract", "shardscope.toml", "--strict")
    assert result.exit_code == 1
    fact = "shardscope.toml:3 expects exactly 1; found: 2 on rank 0"
    assert f"\nExceeds its contract: all_reduce: {fact}. Not checked:" in result.output
    assert f"error contract-exceeded  all_reduce\n  {fact}" in result.output
    assert "contract" not in _run("show", "run.json").output


def test_a_limit_on_what_was_not_recorded_is_not_judged(here: Path) -> None:
    _save_two_reductions(here)
    (here / "shardscope.toml").write_text("[contract]\ngraph_breaks = 0\n")
    result = _run("show", "run.json", "--contract", "shardscope.toml", "--strict")
    assert result.exit_code == 0
    assert "\nNot judged: Unknown cause" in result.output
    assert "info contract-not-measured  graph breaks" in result.output
    assert "shardscope.toml:2 expects none; not measured: no recording has it" in result.output


def test_the_page_and_the_json_result_have_it_too(here: Path) -> None:
    _save_two_reductions(here)
    result = _run("report", "run.json", "--contract", "shardscope.toml", "--json")
    document = json.loads(result.stdout)
    assert document["verdict"] == "problems"
    assert document["findings"][0]["rule"] == "contract-exceeded"
    concern = read_page((here / "run.html").read_text()).verdict.concerns[0]
    assert (concern.label, concern.judgement) == ("Exceeds its contract", "fails")


def test_a_contract_that_is_not_there_is_a_sentence(here: Path) -> None:
    _save_two_reductions(here)
    result = _run("show", "run.json", "--contract", "limits.toml")
    assert result.exit_code == 2
    assert "There is no contract 'limits.toml'." in result.stderr


def test_the_user_can_say_how_many_gpus_a_node_has(here: Path) -> None:
    group = Group(name="tp", torch_name="1", ranks=(RankSpan(0, 8),), num_ranks=8, axis="tp")
    calls = (make_collective(group="tp", axis="tp"),)
    run = make_run(world_size=8, instruments=("trace",))
    save(make_recording(collectives=calls, groups=(group,), run=run), here / "run.json")
    assert "leaves the node" not in _run("show", "run.json").output
    output = _run("show", "run.json", "--nproc-per-node", "4").output
    assert "with 4 GPUs in a node this leaves the node in every layer. Not checked" in output
    assert _run("show", "run.json", "--nproc-per-node", "0").exit_code == 2
