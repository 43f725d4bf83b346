"""Commands for the next step name the user's own file, target and mesh, and are accepted."""

from __future__ import annotations

import shlex

import click
import pytest

from sample_recordings import make_collective, make_recording, make_run
from shardscope.cli import main
from shardscope.record import Axis, FullyShard, Recording
from shardscope.report.model.traffic_totals import fold_ranks
from shardscope.report.text.next_commands import (
    VIEW_INSTRUMENTS,
    make_record_command,
    suggest_commands,
)
from shardscope.report.text.verdict import judge, list_checks

AXES = (Axis(name="dp", size=128), Axis(name="tp", size=8))
OURS = "shardscope trace 'my train.py' --mesh dp=128,tp=8 --data -o x.json"
PROGRAM = "shardscope run --nnodes 2 --steps 3 --nproc-per-node 8 -- pretrain.py --tp 4"


def recorded(command: str, **changes: object) -> Recording:
    run = make_run(command=command, axes=AXES, **changes)
    gather = FullyShard(action="unshard", num_parameters=1)
    calls = (make_collective(cause=gather, owner="layers.0"),)
    return make_recording(run=run, collectives=calls)


@pytest.mark.parametrize(
    ("command", "instrument", "wanted"),
    [
        (OURS, "audit", "shardscope audit 'my train.py' --mesh dp=128,tp=8"),
        (OURS, "parity", "shardscope parity 'my train.py' --mesh dp=2,tp=2"),
        (
            OURS,
            "memory",
            "shardscope memory 'my train.py' --mesh dp=128,tp=8 --gpu-memory 80GiB",
        ),
        (OURS, "diagnose", "shardscope diagnose 'my train.py'"),
        (
            PROGRAM,
            "audit",
            "shardscope audit --nnodes 2 --nproc-per-node 8 -- pretrain.py --tp 4",
        ),
        (
            "shardscope trace --json train.py --mesh dp=2",
            "audit",
            "shardscope audit train.py --mesh dp=128,tp=8",
        ),
        ("python train.py", "trace", "shardscope trace TARGET --mesh dp=128,tp=8"),
        ("shardscope trace 'unclosed", "trace", "shardscope trace TARGET --mesh dp=128,tp=8"),
    ],
)
def test_a_command_reuses_target_mesh_and_program(
    command: str, instrument: str, wanted: str
) -> None:
    assert make_record_command(instrument, recorded(command)) == wanted


def test_the_next_commands_show_the_cause_then_check_what_was_not_checked_then_compare() -> None:
    recording = recorded(OURS, instruments=("trace",))
    verdict = judge(recording, fold_ranks(recording))
    commands = [item.command for item in suggest_commands(verdict, recording, ["a b.json.gz"])]
    assert commands == [
        "shardscope show 'a b.json.gz' --module layers.0 --by cause",
        "shardscope parity 'my train.py' --mesh dp=2,tp=2",
        "shardscope diff 'a b.json.gz' AFTER.json.gz",
    ]
    compared = suggest_commands(verdict, recording, ["b.json"], against="a.json")
    assert compared[-1].command == "shardscope diff a.json b.json --fail-on worse"
    unnamed = suggest_commands(verdict, recording)
    assert unnamed[0].command == "shardscope show FILE --module layers.0 --by cause"


@pytest.mark.parametrize("command", [OURS, PROGRAM, "python train.py"])
def test_commands_have_only_options_that_their_verbs_accept(command: str) -> None:
    recording = recorded(command)
    instruments = {check.instrument for check in list_checks(recording)}
    for instrument in {*instruments, *VIEW_INSTRUMENTS.values()}:
        words = shlex.split(make_record_command(instrument, recording))
        verb = main.get_command(click.Context(main), words[1])
        assert verb is not None
        own = words[2 : words.index("--")] if "--" in words else words[2:]
        options = {option for parameter in verb.params for option in parameter.opts}
        assert {word for word in own if word.startswith("-")} <= options
