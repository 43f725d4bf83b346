"""The table of a parity check: wrong tensors first, identical layers once."""

from __future__ import annotations

import msgspec
import pytest

from sample_recordings import make_recording, make_run
from shardscope.record import (
    Agreement,
    Axis,
    Divergence,
    Finding,
    Parity,
    Phase,
    RankSpan,
    Recording,
    Severity,
    Suspect,
    TensorKind,
    TensorVerdict,
)
from shardscope.report.text.summary import render_text


def verdict(name: str, agreement: Agreement = Agreement.CLOSE, **more) -> TensorVerdict:
    return TensorVerdict(
        **{
            "name": name,
            "kind": TensorKind.GRADIENT,
            "agreement": agreement,
            "shape": (4,),
            "dtype": "float32",
            "error": 1e-7,
            "noise": 2e-7,
            **more,
        }
    )


def recording(*tensors: TensorVerdict, **more) -> Recording:
    parity = Parity(axes=(Axis(name="tp", size=4),), tensors=tensors, **more)
    return make_recording(run=make_run(instruments=("parity",)), collectives=(), parity=(parity,))


def shown(record: Recording, width: int = 120, **more) -> str:
    return render_text(record, width=width, **more).partition("Parity")[2]


def test_identical_layers_share_a_row_with_the_worst_of_them():
    layers = [verdict(f"layers.{i}.up.weight", error=i * 1e-8) for i in range(12)]
    text = shown(recording(*layers, verdict("head.weight")))
    assert "layers.*.up.weight ×12" in text
    assert "1.1e-07" in text
    assert "All 13 tensors agree (outputs, gradients and changed buffers)." in text
    assert "layers.3.up.weight" in shown(recording(*layers), is_folded=False)


def test_what_differs_comes_first_with_its_cause():
    wrong = verdict(
        "layers.7.down.weight",
        Agreement.DIFFERS,
        error=1.0,
        ratio=4.0,
        suspect=Suspect.DOUBLE_REDUCTION,
        detail="it is 4 times too large",
        ranks=(RankSpan(0, 4),),
    )
    text = shown(recording(verdict("a"), wrong))
    rows = text.splitlines()
    assert "1 of 2 tensors differ" in text
    row = next(line for line in rows if "layers.7.down.weight" in line)
    assert "double reduction" in row
    assert "0-3" in row
    assert rows.index(row) < next(i for i, line in enumerate(rows) if line.startswith("a "))


def test_what_follows_from_a_divergence_needs_no_cause_of_its_own():
    wrong = verdict("a", Agreement.DIFFERS, suspect=Suspect.UNKNOWN)
    divergence = Divergence(
        module="b", phase=Phase.FORWARD, suspect=Suspect.MISSING_REDUCTION, detail="so"
    )
    assert "unknown" in shown(recording(wrong))
    assert "unknown" not in shown(recording(wrong, divergences=(divergence,)))


def test_the_single_output_and_errors_without_a_scale_have_words():
    text = shown(recording(verdict("", error=1e13), verdict("b", error=None, noise=None)))
    assert "the output" in text
    assert "noise " in text


def test_random_or_rounding_differences_are_reported_to_agree():
    text = shown(recording(verdict("a", Agreement.RANDOM), verdict("b", Agreement.ROUNDED)))
    assert "All 2 tensors agree" in text
    assert "2 of them up to random numbers or rounding" in text


def test_nothing_to_compare_is_stated():
    assert "Nothing was compared" in shown(recording())


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("suspect", Suspect)
def test_causes_are_never_truncated(width, suspect):
    name = "layers.11.attention.projection.weight"
    wrong = verdict(name, Agreement.RANKS_DISAGREE, suspect=suspect, ranks=(RankSpan(0, 4),))
    text = shown(recording(wrong), width)
    assert all(word in text for word in suspect.split("_"))
    if width >= 60:
        assert suspect.replace("_", " ") in text
        assert "ranks disagree" in text


def test_an_output_that_is_too_noisy_is_not_reported_to_agree():
    noisy = Finding(
        rule="parity-noisy", severity=Severity.WARNING, subject="a", fact="b", remedy="c"
    )
    text = shown(msgspec.structs.replace(recording(verdict("")), findings=(noisy,)))
    assert "but 1 of them would agree with almost any result." in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    names = [f"a.very.long.name.of.{i}.modules.weight" for i in range(3)]
    verdicts = [verdict(name, agreement) for name in names for agreement in Agreement]
    lines = render_text(recording(*verdicts), width=width).splitlines()
    assert max(map(len, lines)) <= width
