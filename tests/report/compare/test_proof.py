"""Whether versions agree, and what a parallel program is made of."""

from __future__ import annotations

from msgspec.structs import replace

from compared_recordings import list_changes, make_fallback, make_placed, make_program
from sample_recordings import make_recording
from shardscope.record import (
    Agreement,
    Axis,
    CollectiveKind,
    Divergence,
    Inserted,
    Parity,
    Phase,
    RankMemory,
    RankSpan,
    Suspect,
    TensorKind,
    TensorVerdict,
)
from shardscope.report.compare.changes import Area


def test_parity_compares_verdicts_and_divergences():
    def verdict(name: str, agreement: Agreement) -> TensorVerdict:
        return TensorVerdict(name=name, kind=TensorKind.GRADIENT, agreement=agreement)

    axes = (Axis(name="tp", size=4),)
    parts = Divergence(
        module="a", phase=Phase.BACKWARD, suspect=Suspect.MISSING_REDUCTION, detail="an addend"
    )
    before = Parity(
        axes=axes,
        tensors=(verdict("a.weight", Agreement.EQUAL), verdict("b.weight", Agreement.DIFFERS)),
    )
    after = Parity(
        axes=axes,
        tensors=(verdict("a.weight", Agreement.DIFFERS), verdict("b.weight", Agreement.CLOSE)),
        divergences=(parts,),
    )
    changes = list_changes(
        make_recording(parity=(before,)), make_recording(parity=(after,)), Area.PARITY
    )
    assert changes == [
        "changed worse | a: gradient weight: agrees → differs",
        "changed better | b: gradient weight: differs → agrees",
        "added worse | a: parts in backward: – → missing reduction",
    ]
    noise = replace(before, tensors=(verdict("a.weight", Agreement.CLOSE), before.tensors[1]))
    assert not list_changes(
        make_recording(parity=(before,)), make_recording(parity=(noise,)), Area.PARITY
    )


def test_parallel_programs_compare_collectives_fallbacks_placements_and_memory():
    inserted = Inserted(
        kind=CollectiveKind.ALL_REDUCE,
        axis="tp",
        num_ranks=4,
        size_bytes=64,
        phase=Phase.FORWARD,
        node="n",
        module="a",
        cause="the plan",
    )
    placed = make_placed("a.weight", shape=(8, 8), local_shape=(2, 8), local_bytes=64)
    memory = RankMemory(
        ranks=(RankSpan(0, 4),),
        parameter_bytes=1,
        buffer_bytes=0,
        input_bytes=0,
        gradient_bytes=0,
        intermediate_bytes=0,
        peak_bytes=1024,
    )
    before = make_program(inserted=(inserted,), placed=(placed,), rank_memory=(memory,))
    replicated = replace(placed, placements=("R",), local_shape=(8, 8))
    after = make_program(
        inserted=(inserted, inserted),
        fallbacks=(make_fallback("layers.0"), make_fallback("layers.1")),
        placed=(replicated,),
        rank_memory=(replace(memory, peak_bytes=2048),),
        unverified="the loss is random",
    )
    recordings = make_recording(parallel=(before,)), make_recording(parallel=(after,))
    assert list_changes(*recordings, Area.PARALLEL) == [
        "changed worse | peak of tensors: 1.00 KiB → 2.00 KiB",
        "changed worse | a: all_reduce[tp] in forward: 1 → 2",
        "changed worse | a: all_reduce[tp] in forward, input: 64 B → 128 B",
        "added worse | layers.{0,1} ×2: fallback of aten.sort.default along tp (replicate): – → 1",
        "changed other | a: parameter weight: S(0); 2×8 float32 → R; 8×8 float32",
    ]
    assert list_changes(*recordings, Area.PARITY) == [
        "changed worse | verification: done → the loss is random"
    ]
