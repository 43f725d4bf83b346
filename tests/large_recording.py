"""A recording as large as a page must open quickly, and one whose every text is an attack."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import msgspec
from msgspec.structs import replace

import sample_recordings as samples
from shardscope.record import (
    Axis,
    BreakSite,
    Collective,
    CollectiveKind,
    CompiledGraph,
    Condition,
    Coverage,
    Explanation,
    Finding,
    FullyShard,
    GraphEnd,
    GraphOp,
    Group,
    Level,
    Mark,
    MarkKind,
    MemoryKind,
    MemoryProfile,
    MemorySample,
    MemoryUse,
    Module,
    OpCoverage,
    OpKind,
    OpVerdict,
    Parameter,
    Phase,
    RankSpan,
    Recording,
    Redistribute,
    Severity,
    Source,
    StageTime,
)

__all__ = ["ATTACKS", "Attacker", "make_hostile", "make_large"]

PP, DP, TP = 4, 4, 4
NUM_RANKS = PP * DP * TP
NUM_CALLS = 20_000
NUM_MODULES = 5_000
NUM_SAMPLES = 6_000  # of memory, on each rank
_NUM_LAYERS = (NUM_MODULES - 5) // len(samples.LLAMA_BLOCK)
_FILE = "/home/somebody/projects/a-rather-long-name/src/training/models/transformer/block.py"
_SIZES = (4096, 4096)


def make_large() -> Recording:
    """64 ranks of a pipeline with FSDP and tensor parallelism, all instruments at once."""
    ranks = RankSpan(0, NUM_RANKS)
    axes = (Axis(name="pp", size=PP), Axis(name="dp", size=DP), Axis(name="tp", size=TP))
    return Recording(
        run=samples.make_run(
            world_size=NUM_RANKS,
            ranks=tuple(ranks),
            axes=axes,
            command="torchrun --nproc-per-node 8 train.py --layers 416",
            instruments=("trace", "audit", "coverage", "memory", "explain", "diagnose"),
        ),
        groups=tuple(_make_groups()),
        modules=tuple(_make_modules()),
        collectives=tuple(_make_calls()),
        findings=tuple(_make_findings()),
        spans=tuple(
            samples.make_span(name, at * 10**9, 9 * 10**8, rank=rank)
            for rank in ranks
            for at, name in enumerate(("forward", "backward", "optimizer"))
        ),
        coverage=(_make_coverage(axes),),
        memory=tuple(_make_memory(rank) for rank in ranks),
        explanations=tuple(_make_explanation(rank) for rank in ranks),
        diagnoses=(
            replace(
                samples.make_diagnosis(Condition.WRONG_RESULT, "model.forward"),
                script="import torch\n" * 400,
            ),
        ),
    )


def _make_groups() -> Iterator[Group]:
    for stage in range(PP):
        first = stage * DP * TP
        for place in range(DP):
            spans = (RankSpan(first + place * TP, TP),)
            yield Group(
                name=f"tp[{stage},{place}]",
                torch_name=f"tp-{stage}-{place}",
                ranks=spans,
                num_ranks=TP,
                axis="tp",
                backend="nccl",
            )
        for place in range(TP):
            spans = (RankSpan(first + place, DP, TP),)
            yield Group(
                name=f"dp[{stage},{place}]",
                torch_name=f"dp-{stage}-{place}",
                ranks=spans,
                num_ranks=DP,
                axis="dp",
                backend="nccl",
            )


def _stage_of(layer: int) -> int:
    return layer * PP // _NUM_LAYERS


def _make_modules() -> Iterator[Module]:
    everybody = (RankSpan(0, NUM_RANKS),)
    for name, kind in (("", "Transformer"), ("layers", "ModuleList")):
        yield Module(name=name, type=kind, ranks=everybody)
    for layer in range(_NUM_LAYERS):
        ranks = (RankSpan(_stage_of(layer) * DP * TP, DP * TP),)
        for suffix, kind in samples.LLAMA_BLOCK:
            name = f"layers.{layer}{suffix}"
            yield Module(
                name=name,
                type=kind,
                ranks=ranks,
                parameters=tuple(_make_parameters(name, kind)),
                marks=(Mark(kind=MarkKind.FULLY_SHARD, axes=("dp",)),) if not suffix else (),
            )
    rest = NUM_MODULES - 2 - _NUM_LAYERS * len(samples.LLAMA_BLOCK)
    for index in range(rest):
        yield Module(name=f"head{index}", type="Linear", ranks=everybody)


def _make_parameters(module: str, kind: str) -> Iterator[Parameter]:
    if kind not in ("Linear", "RMSNorm"):
        return
    shape = _SIZES if kind == "Linear" else _SIZES[:1]
    local = (shape[0] // DP, *(size // TP for size in shape[1:]))
    yield Parameter(
        name="weight",
        shape=shape,
        local_shape=local,
        dtype="bfloat16",
        placements=("Shard(0)", "Shard(1)" if kind == "Linear" else "Replicate"),
        axes=("dp", "tp"),
        live_name=f"{module}.weight",
        checkpoint_key=f"{module}.weight",
        fsdp_group=".".join(module.split(".")[:2]),
        rule="layers.*.attention.*",
        global_bytes=2 * 4096 * (4096 if kind == "Linear" else 1),
        local_bytes=2 * 4096 * (4096 if kind == "Linear" else 1) // (DP * TP),
    )


def _make_calls() -> Iterator[Collective]:
    each, more = divmod(NUM_CALLS, NUM_RANKS)
    for rank in range(NUM_RANKS):
        yield from islice(_make_step(rank), each + (rank < more))


def _make_step(rank: int) -> Iterator[Collective]:
    stage, place = divmod(rank, DP * TP)
    data, tensor = divmod(place, TP)
    unshard = FullyShard(action="unshard", num_parameters=9)
    layers = [layer for layer in range(_NUM_LAYERS) if _stage_of(layer) == stage]
    parts = cycle(
        [
            ("dp", CollectiveKind.ALL_GATHER, "", unshard, 7),
            ("tp", CollectiveKind.ALL_GATHER, ".attention", _redistribute("aten.mm.default"), 41),
            ("tp", CollectiveKind.REDUCE_SCATTER, ".attention.wo", _redistribute("Rowwise"), 52),
            ("tp", CollectiveKind.ALL_REDUCE, ".feed_forward.w2", _redistribute("aten.add"), 77),
        ]
    )
    for order in range(10**6):
        axis, kind, suffix, cause, line = next(parts)
        owner = f"layers.{layers[order // 4 % len(layers)]}{suffix}"
        yield samples.make_collective(
            rank=rank,
            order=order,
            group=f"dp[{stage},{tensor}]" if axis == "dp" else f"tp[{stage},{data}]",
            group_order=order,
            kind=kind,
            num_ranks=DP if axis == "dp" else TP,
            axis=axis,
            dtype="bfloat16",
            input_bytes=33_554_432,
            output_bytes=33_554_432 * 4,
            wire_bytes=25_165_824,
            phase=Phase.FORWARD if order % 300 < 150 else Phase.BACKWARD,
            owner=owner,
            trigger=owner,
            cause=cause,
            source=Source(
                file=_FILE, line=line + order % 30, function="forward", text="x = self.attention(x)"
            ),
            start_ns=1_234_567_891 * (1 + order) // 100 + rank * 1_003,
        )


def _redistribute(asked_by: str) -> Redistribute:
    return Redistribute(
        before=("Shard(1)",),
        after=("Replicate",),
        asked_by=asked_by,
        is_implicit="aten" in asked_by,
    )


def _make_findings() -> Iterator[Finding]:
    for layer in range(_NUM_LAYERS):
        yield Finding(
            rule="implicit-gather",
            severity=Severity.WARNING,
            subject=f"layers.{layer}.attention",
            fact=f"layers.{layer}.attention was gathered unasked",
            remedy="Give it inputs whose placements it can use.",
        )


def _make_coverage(axes: tuple[Axis, ...]) -> Coverage:
    verdicts = cycle(OpVerdict)
    return Coverage(
        rank=0,
        level=Level.EXPORTED,
        axes=axes,
        has_plan=True,
        ops=tuple(
            OpCoverage(
                op=f"aten.op_{index}.default",
                schema=f"op_{index}(Tensor self, Tensor other) -> Tensor",
                verdict=next(verdicts),
                num_forward=index,
                flops=index * 10**9,
                modules=tuple(f"layers.{layer}.attention.wq" for layer in range(0, 400, 4)),
                sources=(Source(file=_FILE, line=index),),
            )
            for index in range(200)
        ),
    )


def _make_memory(rank: int) -> MemoryProfile:
    samples_ = tuple(
        MemorySample(
            order=order,
            phase=list(Phase)[min(3, order * 4 // NUM_SAMPLES)],
            module=f"layers.{order % _NUM_LAYERS}.attention",
            num_bytes=tuple(
                10**9 + order * 12_347 * kind + rank * 511 for kind in range(len(MemoryKind))
            ),
        )
        for order in range(NUM_SAMPLES)
    )
    return MemoryProfile(
        rank=rank,
        peak_bytes=sum(samples_[-1].num_bytes),
        peak_order=NUM_SAMPLES - 1,
        peak_phase=Phase.BACKWARD,
        peak_module="layers.3.attention",
        at_peak=tuple(
            MemoryUse(kind=kind, module=f"layers.{layer}.attention", num_bytes=10**6 + layer)
            for kind in MemoryKind
            for layer in range(100)
        ),
        samples=samples_,
        device_bytes=80 * 1024**3,
        needed_bytes=70 * 1024**3,
    )


def _make_explanation(rank: int) -> Explanation:
    site = BreakSite(
        source=Source(file=_FILE, line=31, function="forward", text="print(x.shape)"),
        num_events=3,
        reason="call of print",
        hints=("Leave it out.",),
    )
    ops = tuple(
        GraphOp(
            kind=OpKind.FUNCTION,
            op="aten.mm.default",
            result="bfloat16[8, 4096]",
            module=f"layers.{index % _NUM_LAYERS}.attention.wq",
            source=Source(file=_FILE, line=index % 90),
        )
        for index in range(3_000)
    )
    graphs = tuple(
        CompiledGraph(
            index=index,
            compile_id=f"{index}/0",
            function="forward",
            num_inputs=9,
            num_outputs=1,
            end=GraphEnd.BREAK if index < 3 else GraphEnd.RETURN,
            fingerprint="ab" * 16,
            ops=ops,
            break_site=0 if index < 3 else None,
        )
        for index in range(4)
    )
    return Explanation(
        rank=rank,
        target="Transformer",
        fingerprint="cd" * 16,
        graphs=graphs,
        break_sites=(site,),
        stages=(StageTime(stage="inductor", num_calls=4, total_ns=10**9 + rank),),
    )


ATTACKS = (
    "<script>window.attacked = 1</script>",
    "</script><script>window.attacked = 1</script>",
    "<!-- <script>",
    "]]><img src=x onerror='window.attacked = 1'>",
    "\"'`\\ &lt;b&gt; &amp; \\u003c \\",
    "{{constructor.constructor('window.attacked = 1')()}}",
    "javascript:window.attacked=1",
    "line\u2028separator\u2029paragraph",
    "right \u202eto left\u202c and \u2066isolated\u2069",
    "nul \x00 bell \x07 escape \x1b[31m delete \x7f",
    "lone \ud800 surrogate \udfff",
    "zero\u200bwidth\ufeff joined\u200d",
    "日本語 🚀 e\u0301",
    "long " * 2_000,
    "unbroken" * 1_250,
    "__proto__",
    "constructor",
    "",
    " ",
    "a..b.",
)


def make_hostile() -> Recording:
    """Every kind of record at once, each text of each of them one of the attacks in turn."""
    parts = [
        samples.make_varied(),
        samples.make_phases(),
        samples.make_holdings(),
        samples.make_parallel(),
        samples.make_explained(),
        samples.make_diagnosed(),
    ]
    fields = {
        name: tuple(record for part in parts for record in getattr(part, name))
        for name in parts[0].__struct_fields__
        if isinstance(getattr(parts[0], name), tuple)
    }
    attack = Attacker(ATTACKS)
    return Recording(
        run=replace(parts[-2].run, command=ATTACKS[1], instruments=ATTACKS),
        **{name: tuple(map(attack.change, records)) for name, records in fields.items()},
    )


class Attacker:
    """Replaces texts: the same one by the same attack, so that names still find what they name."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._attacks: dict[str, str] = {}

    def change(self, record: Any) -> Any:
        """The record with other texts; enums, numbers and ranks stay."""
        if type(record) is str:
            known = self._attacks
            return known.setdefault(record, self._texts[len(known) % len(self._texts)])
        if isinstance(record, RankSpan):
            return record
        if isinstance(record, msgspec.Struct):
            changed = {
                name: self.change(getattr(record, name)) for name in record.__struct_fields__
            }
            return replace(record, **changed)
        if isinstance(record, tuple):
            return tuple(map(self.change, record))
        return record
