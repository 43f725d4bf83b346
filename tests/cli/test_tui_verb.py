"""`shardscope tui`: it opens in a terminal and nowhere else, and needs no torch."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sample_recordings import make_ranks, make_recording
from shardscope.cli import main
from shardscope.record import save
from terminals import run_in_terminal


@pytest.mark.parametrize("file", ["run.json", "no-such.json"])
def test_outside_a_terminal_it_is_one_sentence(here, llama, file):
    save(llama, "run.json")
    result = CliRunner().invoke(main, ["tui", file])
    assert result.exit_code == 2
    assert result.output.startswith(
        "shardscope: tui needs an interactive terminal; stdin is not one."
    )
    assert result.output.count("\n") == 1


def test_several_files_open_as_one_run_and_q_quits(here):
    whole = make_ranks(2, [{}, {}])
    for rank in range(2):
        calls = tuple(call for call in whole.collectives if call.rank == rank)
        save(make_recording(calls, world_size=2, ranks=(rank,)), f"rank{rank}.json")
    code, printed = run_in_terminal("tui", "rank0.json", "rank1.json", answer=("Quit", "q"))
    assert code == 0
    assert "all 2 ranks" in printed
    assert "4 collectives of all modules" in printed


def test_a_file_that_is_not_a_recording_is_refused_in_one_sentence_in_a_terminal_too(here):
    code, printed = run_in_terminal("tui", "no-such.json")
    assert code == 2
    assert "there is no file 'no-such.json'. Check the path." in printed
