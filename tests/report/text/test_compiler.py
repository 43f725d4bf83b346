"""Explanations as text: short, the same at each run, and with what matters."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.record import Recording
from shardscope.report.text.compiler import render_explanations, render_guards, render_stage_times
from shardscope.report.text.summary import render_text
from warm_python import run_python

PROGRAM = """\
import torch
from shardscope import explain
from shardscope.report.text.summary import render_text

def helper(x):
    print(end="")
    return x * 2

def step(x):
    for _ in range(33):
        x = torch.relu(x + 1).sin()
    x = x * x.sum().item()
    for _ in range(2):
        x = helper(x)
    return x

print(render_text(explain(step, torch.ones(4)), width=100))
"""


def test_the_text_of_a_hundred_ops_is_short_and_the_same_in_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(file)])
    second = run_python(file).stdout.encode()
    capsys.readouterr()
    runpy.run_path(str(file))
    first = capsys.readouterr().out.encode()
    assert first == second
    assert 500 < len(first) <= 5_000
    text = first.decode()
    assert "0x" not in text
    assert "2 graphs with 101 ops; 2 break sites, 2 breaks" in text
    for words in ("GB0124", "program.py:12", "program.py:6", "the rest of step", "torch.relu ×33"):
        assert words in text


def test_many_sites_and_graphs_are_truncated() -> None:
    (explanation, _) = samples.make_explained().explanations
    many = replace(
        explanation, graphs=explanation.graphs * 100, break_sites=explanation.break_sites * 100
    )
    recording = samples.make_recording(explanations=(many,))
    assert render_text(recording).count("more: see shardscope export") >= 2


def test_ranks_that_explain_the_same_share_a_section() -> None:
    (explanation, _) = samples.make_explained().explanations
    explanations = (explanation, replace(explanation, rank=3, stages=()))
    text = render_text(samples.make_recording(explanations=explanations))
    assert text.count("torch.compile summary") == 1
    assert "rank 0-3/3" in text


def test_guards_and_times_are_shown_apart() -> None:
    recording = samples.make_explained()
    assert len(list(render_guards(recording))) > 2
    assert len(list(render_stage_times(recording))) == 4


def test_a_recording_without_explanations_has_no_section() -> None:
    recording: Recording = samples.make_recording()
    assert list(render_explanations(recording)) == []
    assert list(render_guards(recording)) == []
