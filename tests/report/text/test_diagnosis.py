"""A diagnosis as text: the verdict first, the line to blame, and what to run."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.record import Condition, Diagnosis, Phase, Recording, Source, Stage, SuspectOp
from shardscope.report.text.summary import render_text

RELU = SuspectOp(
    op="torch.relu",
    module="layers.0.ffn",
    source=Source(file="train.py", line=12, function="forward", text="x = torch.relu(x)"),
)


def diagnosis(condition: Condition = Condition.WRONG_RESULT, **more: Any) -> Diagnosis:
    facts = {
        "rank": 0,
        "target": "train",
        "backend": "inductor",
        "condition": condition,
        "fact": "output 0 is off by 1.0e-03 of its size",
        "num_graphs": 1,
        "num_queries": 9,
    }
    return Diagnosis(**facts | more)


def located(**more: Any) -> Diagnosis:
    facts = {
        "graph": 0,
        "stage": Stage.BACKEND,
        "phase": Phase.FORWARD,
        "suspects": (RELU,),
        "is_minimal": True,
        "repro": "out/repro.py",
        "is_verified": True,
        "passing": "the same in double precision",
    }
    return diagnosis(**facts | more)


def recording(*diagnoses: Diagnosis) -> Recording:
    return samples.make_recording(
        run=samples.make_run(instruments=("diagnose",)), diagnoses=diagnoses
    )


def shown(record: Diagnosis, width: int = 110) -> str:
    text = render_text(recording(record), width=width)
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def list_details(text: str) -> list[str]:
    """The lines of the section on the diagnosis."""
    _, title, section = text.partition("Diagnosis of")
    return (title + section).splitlines()


def test_what_is_fine_says_so_and_little_else() -> None:
    record = diagnosis(Condition.FINE, fact="compiled and eager results agree")
    assert list_details(shown(record)) == [
        "Diagnosis of train compiled by inductor",
        "verdict fine: compiled and eager results agree",
        "tried 9 compilations",
    ]


def test_everything_that_was_found_has_a_line() -> None:
    text = shown(located(part="aten.relu.default", notes=("Something else.",)))
    assert list_details(text) == [
        "Diagnosis of train compiled by inductor",
        "verdict wrong result: output 0 is off by 1.0e-03 of its size",
        "stage backend: aten.relu.default",
        "where its only graph, forward",
        "op torch.relu in layers.0.ffn train.py:12 forward x = torch.relu(x)",
        "repro out/repro.py (a fresh process fails in the same way)",
        "passes the same in double precision",
        "tried 9 compilations",
        "note Something else.",
    ]


@pytest.mark.parametrize("condition", Condition)
def test_every_condition_has_words(condition: Condition) -> None:
    words = {Condition.NAN: "NaN or infinity", Condition.RNG: "different random numbers"}
    expected = words.get(condition, condition.replace("_", " "))
    assert f"verdict {expected}: output 0 is off" in shown(diagnosis(condition))


def test_a_graph_among_many_is_identified_by_its_number() -> None:
    assert "where graph 1 of 0 – 2, backward" in shown(
        located(graph=1, num_graphs=3, phase=Phase.BACKWARD)
    )


def test_a_part_that_names_its_stage_stands_for_it() -> None:
    record = located(stage=Stage.DECOMPOSITION, part="decomposition of aten.relu")
    assert "\nstage decomposition of aten.relu\n" in shown(record)


def test_many_suspects_are_truncated_and_an_unfinished_search_is_reported() -> None:
    text = shown(located(suspects=(RELU,) * 30, is_minimal=False))
    assert text.count("torch.relu in") == 8
    assert "… and 22 more" in text
    assert "the search was not finished" in text
    assert "not finished" not in shown(located(suspects=(RELU,) * 30))


def test_an_error_is_shown_once() -> None:
    error = "ValueError: no kernel\n  at somewhere\n" + "more\n" * 1000
    record = located(condition=Condition.COMPILE_ERROR, error=error, fact="compiling it fails")
    assert "\nerror ValueError: no kernel\n" in shown(record)
    assert "more" not in shown(record)
    described = replace(record, fact="compiling it fails: ValueError: no kernel")
    assert "\nerror " not in shown(described)


def test_units_in_the_last_place_are_shown_while_they_are_meaningful() -> None:
    full = samples.make_diagnosis(Condition.WRONG_RESULT, "y")
    assert full.deviation is not None
    assert "off by up to 3,204 units in the last place of y" in shown(full)
    record = replace(full, deviation=replace(full.deviation, max_ulp=1.0))
    assert "off by up to 1 unit in the last place of y" in shown(record)
    for amount in (7e44, 0.0):  # of a NaN, the numbers beside it are no news
        imprecise = replace(full, deviation=replace(full.deviation, max_ulp=amount))
        assert "last place" not in shown(imprecise)


def test_a_script_that_was_not_verified_says_so() -> None:
    assert "repro out/repro.py (not verified)" in shown(located(is_verified=False))


@pytest.mark.parametrize("name", samples.HOSTILE_NAMES)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_hostile_names_and_endless_ones_fit_every_terminal(name: str, width: int) -> None:
    record = samples.make_diagnosis(Condition.COMPILE_ERROR, name, num_suspects=300)
    text = render_text(recording(record), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text) < 20_000
    assert not set(text) & set("\x00\x07\x1b\r\u202e")
    assert "tried" in text
