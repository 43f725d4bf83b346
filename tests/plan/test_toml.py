"""Plans as TOML files, there and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardscope.errors import OutputError, PlanError
from shardscope.parallel import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Partial,
    Plan,
    Replicate,
    Replicated,
    Rowwise,
    Sequence,
    Shard,
)

PLANS = [
    Plan({}),
    Plan({"": Colwise()}),
    Plan({"layers.*.wq": Colwise(), "layers.0": Replicated(), "n": Sequence(), "m": Sequence(0)}),
    Plan({"a": Colwise(input=Shard(1), output=Replicate(), fused=(4, 2, 2), heads=(4, 2, 2))}),
    Plan({"a": Rowwise(output=Partial("max"), fused=3, heads=12)}),
    Plan({"a": Shard(0), "b": Shard(-1, outer=3), "c": Shard(1, segments=(4, 2))}),
    Plan({"a": [Shard(0), Replicate()], "b": {"tp": Colwise(), "dp-1": Shard(0)}}),
    Plan({"a": ModuleInput(None, Replicate(), mask=Shard(0)), "b": ModuleOutput(None, Shard(0))}),
    Plan({"a": [ModuleInput(x=Replicate()), ModuleOutput(Replicate())]}),
    Plan({"a": {"tp": [Shard(0), ModuleOutput(Replicate())], "dp": Replicated()}}),
    Plan({'odd "name" \\ \n \x01 \x7f ü 層': Colwise(), "a b": Colwise()}),
    Plan(
        {"a": Colwise()},
        inputs={"batch.ids": {"dp": Shard(0)}, 1: Shard(1), "y": [Shard(0), Replicate()]},
        outputs={0: {"dp": Shard(0)}, "logits": Partial()},
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: repr(plan)[:60])
def test_a_plan_that_was_written_is_read_as_it_was(plan: Plan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.toml")
    assert Plan.read(tmp_path / "plan.toml") == plan


def test_a_file_looks_as_one_would_write_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    Plan(
        {
            "layers.*.wq": Colwise(),
            "layers.*.wo": Rowwise(output=Shard(1)),
            "tok.weight": {"tp": Shard(0)},
        },
        inputs={"tokens": {"dp": Shard(0)}},
        outputs={0: {"dp": Shard(0)}},
    ).write(path)
    assert path.read_text() == (
        "[plan]\n"
        '"layers.*.wq" = "colwise"\n'
        '"layers.*.wo" = { style = "rowwise", output = "shard(1)" }\n'
        '"tok.weight" = { tp = "shard(0)" }\n'
        "\n[inputs]\n"
        'tokens = { dp = "shard(0)" }\n'
        "\n[outputs]\n"
        '0 = { dp = "shard(0)" }\n'
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[plan]\n"a" = colwise\n', r"plan.toml' is not TOML: Invalid value \(at line 2, column"),
        ('[plan]\n"a" = "colwise"\n"a" = "rowwise"', "is not TOML: Cannot overwrite a value"),
        (
            '"a" = "colwise"',
            ("has 'a' at its top level, which plans do not have. Write entries under"),
        ),
        ('plan = "colwise"', r"has plan = 'colwise'. Make it a table: \[plan\]"),
        ("[plan]\nlayers.0.wq = 'colwise'", "plan.toml': .*'layers' gives a table.*in quotes"),
        ("[plan]\na = 'colwize'", "plan.toml': The plan's entry 'a' gives 'colwize'"),
        ("[plan]\na = 2026-01-01", "gives date, which is neither a style nor a placement"),
        ("[inputs]\nx = 1.5", "input 'x''s placement is 1.5, which is not a placement"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_at_its_place(
    text: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=sentence):
        Plan.read(path)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "cannot be read: No such file or directory. Check the path"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe"), r"is not text in UTF-8 \(byte 0\)"),
        (lambda path: path.symlink_to("/dev/zero"), "it has more than 16777216 bytes"),
        (lambda path: path.write_text("a=" + "[" * 9999), "is nested too deeply"),
        (lambda path: path.write_text("a=" + "9" * 9999), "cannot be read: Exceeds the limit"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(make: Any, sentence: str, tmp_path: Path) -> None:
    make(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match=sentence):
        Plan.read(tmp_path / "plan.toml")


def test_a_pipe_without_a_peer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.record.files._MAX_WAIT_MS", 1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(PlanError, match="it is a named pipe that nothing writes to"):
        Plan.read(pipe)
    with pytest.raises(OutputError, match="it is a named pipe that nothing reads"):
        Plan({"a": Colwise()}).write(pipe)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot be written to .*: No such file or directory"):
        Plan({"a": Colwise()}).write(tmp_path / "nowhere" / "plan.toml")
