"""How a parallel program is shown."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sample_recordings import make_parallel, make_recording, make_run
from shardscope.record import (
    Agreement,
    Axis,
    CollectiveKind,
    Fallback,
    FallbackKind,
    Inserted,
    Parallelization,
    Phase,
    Placed,
    PlacedKind,
    RankMemory,
    RankSpan,
    Recording,
    Source,
    TensorKind,
    TensorVerdict,
)
from shardscope.record.layer_names import fold_layers_in_text, join_layers_in_texts
from shardscope.report.text.summary import render_text

AXES = (Axis(name="dp", size=2), Axis(name="tp", size=4))


def make_inserted(layer: int, **changes: Any) -> Inserted:
    facts: dict[str, Any] = {
        "kind": CollectiveKind.ALL_REDUCE,
        "axis": "tp",
        "num_ranks": 4,
        "size_bytes": 4096,
        "phase": Phase.FORWARD,
        "node": f"all_reduce_{layer}",
        "module": f"layers.{layer}.attn.wo",
        "cause": f"the plan's output of layers.{layer}.attn.wo",
        "source": Source(file="model.py", line=12, text="return self.wo(y)"),
    }
    return Inserted(**(facts | changes))


def make_placed(layer: int, **changes: Any) -> Placed:
    facts: dict[str, Any] = {
        "name": f"layers.{layer}.attn.wo.weight",
        "kind": PlacedKind.PARAMETER,
        "shape": (64, 64),
        "local_shape": (64, 16),
        "dtype": "float32",
        "placements": ("R", "S(1)"),
        "local_bytes": 4096,
        "rules": ("layers.*.attn.wo",),
    }
    return Placed(**(facts | changes))


def make(**changes: Any) -> Recording:
    facts: dict[str, Any] = {
        "program": "Llama",
        "axes": AXES,
        "is_training": False,
        "num_ops": 1_234,
        "inserted": tuple(make_inserted(layer) for layer in range(80)),
        "placed": tuple(make_placed(layer) for layer in range(80)),
        "unverified": "nobody asked",
    }
    run = make_run(ranks=tuple(range(8)), axes=AXES, instruments=("parallelize",))
    return make_recording(run=run, parallel=(Parallelization(**(facts | changes)),))


def test_a_header_says_which_program_on_which_mesh() -> None:
    text = render_text(make())
    assert "dp=2 × tp=4 · all 8 ranks" in text
    assert "Parallel program  Llama on dp=2 × tp=4, forward only, 1,234 ops" in text
    assert "80 collectives per rank (80 all_reduce), 320 KiB input; 0 fallbacks" in text


@pytest.mark.parametrize("width", [80, 140])
def test_identical_layers_share_a_row(width: int) -> None:
    text = render_text(make(), width=width)
    assert text.count("all_reduce[tp]") == 1
    assert "the plan's output of layers.0-79.attn.wo" in " ".join(text.split())
    assert text.count("model.py:12") == 1
    assert "layers.0-79.attn.wo.weight ×80" in text
    assert "64×64 → 64×16" in text
    assert "dp:R tp:S(1)" in text


def test_what_differs_between_layers_keeps_its_row() -> None:
    inserted = (make_inserted(0), make_inserted(1), make_inserted(2, size_bytes=8192))
    text = render_text(make(inserted=inserted, placed=()))
    assert "layers.0-1.attn.wo" in text
    assert "layers.2.attn.wo" in text


def test_unfolded_every_collective_and_tensor_is_shown() -> None:
    text = render_text(make(), is_folded=False)
    assert text.count("all_reduce[tp]") == 80
    assert text.count(".attn.wo.weight") == 80


def test_fallbacks_come_with_their_remedy() -> None:
    fallbacks = tuple(
        Fallback(
            axis="tp",
            kind=FallbackKind.REPLICATE,
            op="aten.sort.default",
            node="sort",
            module=f"layers.{layer}.router",
            placements=("S(1)",),
            size_bytes=1024,
            remedy="Cut along another dim.",
            source=Source(file="model.py", line=7),
        )
        for layer in range(3)
    )
    text = render_text(make(fallbacks=fallbacks))
    assert "3 fallbacks" in text
    assert "replicate aten.sort.default  layers.0-2.router ×3" in text
    assert "given S(1) along tp; moves 3.00 KiB" in text
    assert "→ Cut along another dim." in text
    assert "model.py:7" in text


def test_ranks_that_differ_have_rows_of_their_own() -> None:
    memory = tuple(
        RankMemory(
            ranks=(RankSpan(first, 4, 2),),
            parameter_bytes=2**20 * (first + 1),
            buffer_bytes=0,
            input_bytes=1024,
            gradient_bytes=2**20,
            intermediate_bytes=2**21,
            peak_bytes=2**22,
            peak_module="layers.3.attn",
        )
        for first in (0, 1)
    )
    text = render_text(make(rank_memory=memory), width=120)
    (header,) = [line for line in text.splitlines() if line.startswith("ranks ")]
    columns = "parameters", "buffers", "inputs", "gradients", "intermediates", "peak", "peak", "in"
    assert header.split() == ["ranks", *columns]
    rows = [line.split()[:4] for line in text.splitlines() if line.startswith(("0-6/2", "1-7/2"))]
    assert rows == [["0-6/2", "1.00", "MiB", "·"], ["1-7/2", "2.00", "MiB", "·"]]


def test_why_there_is_no_proof_is_stated() -> None:
    assert "Not verified: nobody asked." in render_text(make())


def verdict(name: str, agreement: Agreement) -> TensorVerdict:
    return TensorVerdict(
        name=name, kind=TensorKind.GRADIENT, agreement=agreement, error=1.0, noise=1e-7
    )


def test_a_proof_is_a_line_and_what_differs_is_named() -> None:
    fine = [verdict(f"w{index}", Agreement.CLOSE) for index in range(5)]
    assert "All 5 tensors agree (5 gradients)." in render_text(make(verdicts=tuple(fine)))
    wrong = (*fine, verdict("layers.0.wq.weight", Agreement.DIFFERS))
    text = render_text(make(verdicts=wrong))
    assert "1 of 6 tensors differ (6 gradients)." in text
    assert "gradient layers.0.wq.weight  differs  off by 1.0e+00, noise 1.0e-07" in text


def test_a_recording_without_a_program_says_nothing_of_it() -> None:
    assert "Parallel program" not in render_text(make_recording())


def test_hostile_names_do_not_widen_the_tables() -> None:
    for width in (40, 80):
        lines = render_text(make_parallel(), width=width).splitlines()
        assert max(len(line) for line in lines) <= width


def test_many_programs_are_all_shown() -> None:
    recording = make()
    twice = replace(recording, parallel=recording.parallel * 2)
    assert render_text(twice).count("Parallel program") == 2


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("layers.3.attn.wo", "layers.*.attn.wo"),
        ("0.weight", "*.weight"),
        ("blocks.1.experts.2", "blocks.*.experts.*"),
        ("aten.sum needs it cut along dim 1", "aten.sum needs it cut along dim 1"),
        (
            "gradient of layers.1.w, which layers.1 uses",
            "gradient of layers.*.w, which layers.* uses",
        ),
        ("linear_3", "linear_3"),
        ("v1.2", "v1.*"),
    ],
)
def test_numbers_of_layers_fold_and_no_others(text: str, folded: str) -> None:
    assert fold_layers_in_text(text) == folded


def test_runs_of_numbers_are_named_by_their_ends() -> None:
    assert join_layers_in_texts(["a.0.b", "a.1.b", "a.2.b"]) == "a.0-2.b"
    assert join_layers_in_texts(["a.0.b.1", "a.2.b.1"]) == "a.*.b.1"
    assert join_layers_in_texts(["a.7"]) == "a.7"
