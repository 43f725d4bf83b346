"""Pairs of recordings whose differences are known, for all tests of comparisons."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from sample_recordings import make_collective, make_llama, make_recording, make_run
from shardscope.record import (
    Axis,
    BreakSite,
    CollectiveKind,
    CompiledGraph,
    Coverage,
    Explanation,
    FallbackKind,
    Finding,
    GraphEnd,
    Level,
    MemoryKind,
    MemoryProfile,
    MemoryUse,
    Module,
    OpCoverage,
    OpVerdict,
    Parallelization,
    Parameter,
    Phase,
    Placed,
    PlacedKind,
    RankSpan,
    Recording,
    Redistribute,
    Severity,
    Source,
)
from shardscope.record import Fallback as FallbackRecord
from shardscope.report.compare.changes import Area, Changes
from shardscope.report.compare.compare_recordings import compare

UNASKED = Redistribute(
    before=("Partial(sum)",), after=("Replicate()",), asked_by="aten.add.Tensor", is_implicit=True
)
MIB = 1 << 20


def lines(changes: Changes, area: Area | None = None) -> list[str]:
    """Each change as one line, with its status and whether it is worse."""
    marks = {True: "worse", False: "better", None: "other"}
    return [
        f"{row.status} {marks[row.is_worse]} | {row}"
        for row in changes.rows
        if area in (None, row.area)
    ]


def list_changes(before: Recording, after: Recording, area: Area, **options: Any) -> list[str]:
    """List the changes of one area as text."""
    return lines(compare(before, after, **options), area)


def add_reductions(llama: Recording) -> Recording:
    """The Llama with one more all-reduce in each layer's forward, which is implicit."""
    extra = [
        replace(call, kind=CollectiveKind.ALL_REDUCE, cause=UNASKED, order=10_000 + index)
        for index, call in enumerate(llama.collectives)
        if (call.owner or "").endswith("attention.wo") and call.phase is Phase.FORWARD
    ]
    return replace(llama, collectives=(*llama.collectives, *extra))


def unshard_queries(llama: Recording) -> Recording:
    """The Llama with `wq` no longer split over tp."""

    def change(module: Module) -> Module:
        whole = [
            replace(one, placements=("Shard(dim=0)", "Replicate()"), local_shape=(32, 4096))
            for one in module.parameters
        ]
        return replace(module, parameters=tuple(whole))

    modules = [change(one) if one.name.endswith("wq") else one for one in llama.modules]
    return replace(llama, modules=tuple(modules))


def make_pair() -> tuple[Recording, Recording]:
    """A Llama before and after: more collectives, fewer sharded parameters, another torch."""
    before = make_llama(num_layers=4, dp=4, tp=2)
    run = replace(before.run, torch_version="2.14.0")
    finding = Finding(
        rule="mixed-meshes",
        severity=Severity.WARNING,
        subject="layers.0.attention.wq",
        fact="It lies on another mesh.",
        remedy="Put it on this one.",
    )
    after = replace(unshard_queries(add_reductions(before)), run=run, findings=(finding,))
    return before, after


def make_module(name: str, *parameters: Parameter, **changes: Any) -> Module:
    """A module of rank 0."""
    facts: dict[str, Any] = {"type": "Linear", "ranks": (RankSpan(0),), "parameters": parameters}
    return Module(name=name, **(facts | changes))


def make_parameter(name: str = "weight", **changes: Any) -> Parameter:
    """A weight that is sharded over tp, as an audit describes it."""
    facts: dict[str, Any] = {
        "shape": (8, 8),
        "local_shape": (4, 8),
        "dtype": "float32",
        "placements": ("Shard(0)",),
        "axes": ("tp",),
        "live_name": name,
    }
    return Parameter(name=name, **(facts | changes))


def make_memory(*uses: tuple[MemoryKind, str | None, int], rank: int = 0, **sizes: int) -> Any:
    """A profile that holds these at its peak."""
    held = tuple(MemoryUse(kind=kind, module=name, num_bytes=size) for kind, name, size in uses)
    peak = sum(use.num_bytes for use in held)
    facts: dict[str, Any] = {"peak_bytes": peak, "peak_order": 1, "peak_phase": Phase.BACKWARD}
    return MemoryProfile(rank=rank, at_peak=held, **(facts | sizes))


def make_explanation(*sites: tuple[int, str, int], num_graphs: int = 1, **changes: Any) -> Any:
    """One with break sites: line, code, how many traces stopped there."""
    facts: dict[str, Any] = {
        "rank": 0,
        "target": "train.Model",
        "fingerprint": "ab",
        "graphs": tuple(
            CompiledGraph(
                index=index,
                compile_id="0/0",
                function="forward",
                num_inputs=1,
                num_outputs=1,
                end=GraphEnd.RETURN,
                fingerprint="cd",
            )
            for index in range(num_graphs)
        ),
        "break_sites": tuple(
            BreakSite(
                source=Source(file="/home/me/train.py", line=line, function="forward", text=text),
                num_events=count,
                reason="call of a builtin",
            )
            for line, text, count in sites
        ),
    }
    return Explanation(**(facts | changes))


def make_coverage(verdicts: dict[str, OpVerdict], level: Level = Level.EXPORTED) -> Coverage:
    """What became of each op."""
    ops = tuple(
        OpCoverage(op=op, schema="", verdict=verdict, modules=("layers.0.up", "layers.1.up"))
        for op, verdict in verdicts.items()
    )
    axes = (Axis(name="tp", size=4),)
    return Coverage(rank=0, level=level, axes=axes, has_plan=False, ops=ops)


def make_program(**changes: Any) -> Parallelization:
    """A parallel program, sharded over tp."""
    facts: dict[str, Any] = {"program": "Model", "is_training": True, "num_ops": 9}
    return Parallelization(axes=(Axis(name="tp", size=4),), **(facts | changes))


def make_placed(name: str, **changes: Any) -> Placed:
    """A parameter that tp cuts in four."""
    facts: dict[str, Any] = {"shape": (8, 4), "local_shape": (2, 4), "local_bytes": 32}
    facts |= {"kind": PlacedKind.PARAMETER, "dtype": "float32", "placements": ("S(0)",)}
    return Placed(name=name, **(facts | changes))


def make_fallback(module: str) -> FallbackRecord:
    """An op that every rank runs on the full tensor."""
    return FallbackRecord(
        axis="tp",
        kind=FallbackKind.REPLICATE,
        op="aten.sort.default",
        node="sort",
        module=module,
        placements=("S(0)",),
        size_bytes=64,
        remedy="Sort before.",
    )


def make_calls(counts: dict[str, int], *, rank: int = 0, **changes: Any) -> Any:
    """So many all-reduces along tp of each module, in forward."""
    owners = [owner for owner, count in counts.items() for _ in range(count)]
    return tuple(
        make_collective(rank=rank, order=order, owner=owner, axis="tp", **changes)
        for order, owner in enumerate(owners)
    )


def make_traced(counts: dict[str, int], **changes: Any) -> Recording:
    """A recording of rank 0 with so many all-reduces of each module."""
    return make_recording(make_calls(counts), **changes)


def make_world(*counts: dict[str, int], world_size: int = 8) -> Recording:
    """A recording with so many all-reduces of each module on each rank."""
    calls = [call for rank, mine in enumerate(counts) for call in make_calls(mine, rank=rank)]
    ranks = tuple(range(len(counts)))
    run = make_run(world_size=world_size, ranks=ranks)
    return make_recording(tuple(calls), world_size=world_size, ranks=ranks, run=run)
