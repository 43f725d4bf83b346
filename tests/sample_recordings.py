"""Recordings that look like real ones, built by hand; conftest.py offers them as fixtures."""

from __future__ import annotations

from itertools import count
from typing import Any

from shardscope.record import (
    Agreement,
    AllocationTable,
    Axis,
    BreakSite,
    BucketReduce,
    Call,
    Cause,
    Collective,
    CollectiveKind,
    Compiled,
    CompiledGraph,
    Condition,
    Coverage,
    Deviation,
    Diagnosis,
    Divergence,
    Explanation,
    Fallback,
    FallbackKind,
    Finding,
    FrameGuards,
    FullyShard,
    Gap,
    GraphCollective,
    GraphEnd,
    GraphOp,
    Group,
    Inserted,
    Level,
    Mark,
    MarkKind,
    MemoryKind,
    MemoryProfile,
    MemorySample,
    MemoryUse,
    Module,
    Move,
    OpCoverage,
    OpKind,
    OpVerdict,
    Parallelization,
    Parameter,
    Parity,
    Phase,
    Placed,
    PlacedKind,
    RankMemory,
    RankSpan,
    Recompile,
    Recording,
    Redistribute,
    RunInfo,
    SegmentTable,
    Severity,
    Sharding,
    SkippedFrame,
    Slice,
    Source,
    Span,
    Stage,
    StageTime,
    Suspect,
    SuspectOp,
    TensorKind,
    TensorLayout,
    TensorVerdict,
    compress_ranks,
)

HOSTILE_NAMES = (
    "[red]markup[/red]",
    "[/]",
    "new\nline\r\n",
    "\x1b[31mescape\x1b]0;title\x07",
    "nul\x00 bell\x07",
    "bidi \u202etxt.exe",
    "日本語 🚀 ünï",
    "=HYPERLINK(1)",
    "</script><script>alert(1)</script>",
    "x" * 5000,
    ".." * 3,
    "a." * 300,
    " ",
)


def make_run(*, world_size: int = 8, ranks: tuple[int, ...] = (0,), **changes: Any) -> RunInfo:
    """A run of `ranks` out of `world_size`."""
    facts: dict[str, Any] = {
        "torch_version": "2.13.0",
        "shardscope_version": "0.1.0",
        "world_size": world_size,
        "ranks": compress_ranks(ranks),
    }
    return RunInfo(**(facts | changes))


def make_collective(**changes: Any) -> Collective:
    """An all-reduce of 4 KiB on rank 0, but for the changes."""
    facts: dict[str, Any] = {
        "rank": 0,
        "order": 0,
        "group": "world",
        "group_order": 0,
        "kind": CollectiveKind.ALL_REDUCE,
        "op": "c10d.allreduce_",
        "num_ranks": 8,
        "axis": None,
        "dtype": "float32",
        "num_tensors": 1,
        "input_bytes": 4096,
        "output_bytes": 4096,
        "wire_bytes": 7168,
        "phase": Phase.FORWARD,
        "owner": "",
        "trigger": "",
    }
    return Collective(**(facts | changes))


def make_recording(
    calls: tuple[Collective, ...] = (),
    *,
    world_size: int = 8,
    ranks: tuple[int, ...] | None = None,
    **changes: Any,
) -> Recording:
    """A recording of the calls; `ranks` default to those that made them, `groups` to the world."""
    if ranks is None:
        ranks = tuple(sorted({call.rank for call in calls})) or (0,)
    world = Group(
        name="world", torch_name="0", ranks=(RankSpan(0, world_size),), num_ranks=world_size
    )
    facts: dict[str, Any] = {
        "run": make_run(world_size=world_size, ranks=ranks),
        "groups": (world,),
        "collectives": calls,
    }
    return Recording(**(facts | changes))


def make_ranks(num_ranks: int, calls: list[dict[str, Any]], **changes: Any) -> Recording:
    """Each rank issues the same calls in the world group."""
    made = tuple(
        make_collective(rank=rank, order=order, group_order=order, num_ranks=num_ranks, **call)
        for rank in range(num_ranks)
        for order, call in enumerate(calls)
    )
    return make_recording(made, world_size=num_ranks, **changes)


def every_cause() -> tuple[Cause | None, ...]:
    """One of each."""
    return (
        Redistribute(
            before=("Shard(dim=1)",),
            after=("Replicate()",),
            asked_by="aten.mm.default",
            is_implicit=True,
        ),
        FullyShard(action="unshard", num_parameters=9),
        BucketReduce(bucket=0, parameters=("layers.0.weight", "layers.0.bias")),
        BucketReduce(bucket=None, parameters=()),
        Call(api="torch.distributed.all_reduce"),
        Compiled(graph="0/0"),
        None,
    )


def make_varied() -> Recording:
    """Every kind, phase and cause, findings and gaps, with hostile names throughout."""
    causes = every_cause()
    calls = [
        make_collective(
            order=order,
            group_order=order,
            kind=kind,
            phase=list(Phase)[order % len(Phase)],
            owner=None if order == 3 else f"layers.{order}.{HOSTILE_NAMES[order]}",
            trigger=HOSTILE_NAMES[order],
            axis=None if order % 2 else HOSTILE_NAMES[order],
            cause=causes[order % len(causes)],
            source=Source(file=HOSTILE_NAMES[order], line=order, text=HOSTILE_NAMES[-order]),
            peer=1 if kind in (CollectiveKind.SEND, CollectiveKind.BROADCAST) else None,
            reduce_op="sum" if "reduce" in kind else None,
            thread="autograd",
            start_ns=order * 1_000,
        )
        for order, kind in enumerate(CollectiveKind)
    ]
    return make_recording(
        tuple(calls),
        modules=tuple(
            Module(name=name, type=name, ranks=(RankSpan(0),), aliases=(name,))
            for name in ("", *HOSTILE_NAMES)
        ),
        findings=tuple(
            Finding(rule=name, severity=severity, subject=name, fact=name, remedy=name, rank=0)
            for name in HOSTILE_NAMES
            for severity in Severity
        ),
        gaps=tuple(Gap(place=name, fact=name, rank=0) for name in HOSTILE_NAMES),
        run=make_run(command=HOSTILE_NAMES[3], axes=(Axis(name=HOSTILE_NAMES[0], size=8),)),
    )


def make_steps(
    num_steps: int = 2, *, ranks: tuple[int, ...] = (0, 1), timed: bool = False, **changes: Any
) -> Recording:
    """Training steps of two forward passes each, which end with a collective of the optimizer.

    Each rank issues one collective before the first step. With `timed`, spans tell steps apart, and
    the optimizer issues nothing.
    """
    passes = (Phase.FORWARD, Phase.BACKWARD) * 2
    step = passes if timed else (*passes, Phase.OPTIMIZER)
    phases = (Phase.OUTSIDE, *step * num_steps)
    calls = tuple(
        make_collective(
            rank=rank, order=order, phase=phase, start_ns=100 * order, wire_bytes=1 << order
        )
        for rank in ranks
        for order, phase in enumerate(phases)
    )
    spans = tuple(
        make_span("step", 100 * (1 + len(step) * at), 100 * len(step), rank=rank)
        for rank in ranks
        for at in range(num_steps)
    )
    run = make_run(ranks=ranks, is_simulated=False, num_forwards=None)
    return make_recording(calls, run=run, spans=spans if timed else (), **changes)


def make_span(
    name: str = "step", start_ns: int = 0, duration_ns: int = 1_000, **changes: Any
) -> Span:
    """One that lies in none on rank 0, but for the changes."""
    facts: dict[str, Any] = {"rank": 0, "self_ns": duration_ns}
    return Span(name=name, start_ns=start_ns, duration_ns=duration_ns, **(facts | changes))


def make_phases(ranks: tuple[int, ...] = (0, 1)) -> Recording:
    """Phases within phases, on two threads and two clocks, with hostile names; no collectives."""
    spans = [
        make_span(name, 1_000 * start, 1_000, rank=rank, depth=1, **place)
        for rank in ranks
        for place in ({}, {"thread": "loader"}, {"device": "cuda:0"})
        for start, name in enumerate(HOSTILE_NAMES)
    ]
    whole = 1_000 * len(HOSTILE_NAMES)
    spans += [make_span("step", 0, whole, self_ns=0, rank=rank) for rank in ranks]
    return make_recording(ranks=ranks, spans=tuple(spans))


def make_holdings() -> Recording:
    """What an audit, coverage and memory write down, with hostile names throughout."""
    names = HOSTILE_NAMES
    source = Source(file=names[3], line=1, text=names[0])
    modules = tuple(
        Module(
            name=f"layers.{index}.{name}",
            type=name,
            ranks=(RankSpan(0),),
            parameters=(_hostile_parameter(name),),
            aliases=(name,),
            marks=tuple(Mark(kind=kind, detail=name, axes=(name,)) for kind in MarkKind),
        )
        for index, name in enumerate(names)
    )
    ops = tuple(
        OpCoverage(
            op=name,
            schema=name,
            verdict=verdict,
            num_forward=1,
            detail=name,
            remedy=name,
            moves=(Move(argument=name, before=(name,), after=(name,), num_bytes=1),),
            shardings=(Sharding(inputs=(name,), verdict=verdict, outputs=(name,), detail=name),),
            modules=(name,),
            sources=(source,),
        )
        for name, verdict in zip(names, 3 * tuple(OpVerdict), strict=False)
    )
    axes = (Axis(name=names[0], size=8),)
    return make_recording(
        run=make_run(instruments=("audit", "coverage", "memory", "parity")),
        modules=modules,
        coverage=tuple(
            Coverage(rank=0, level=level, axes=axes, has_plan=level is Level.EXPORTED, ops=ops)
            for level in Level
        ),
        memory=(_hostile_memory(),),
        layouts=tuple(
            TensorLayout(
                name=name,
                shape=(8, 2),
                axes=axes,
                placements=(name,),
                slices=(Slice(ranks=(RankSpan(0, 8),), stretches=(((0, 8),), ((0, 2),))),),
            )
            for name in names
        ),
        parity=(_hostile_parity(axes),),
    )


def _hostile_parity(axes: tuple[Axis, ...]) -> Parity:
    names, source = HOSTILE_NAMES, Source(file=HOSTILE_NAMES[3], line=1, text=HOSTILE_NAMES[0])
    return Parity(
        axes=axes,
        tensors=tuple(
            TensorVerdict(
                name=name,
                kind=kind,
                agreement=agreement,
                shape=(2, 3),
                dtype=name,
                error=0.5,
                noise=1e-7,
                max_error=2.0,
                worst_index=(1, 2),
                ratio=2.0,
                ranks=(RankSpan(0, 8),),
                suspect=Suspect.DOUBLE_REDUCTION,
                detail=name,
            )
            for name, agreement in zip(names, 2 * tuple(Agreement), strict=False)
            for kind in TensorKind
        ),
        divergences=tuple(
            Divergence(
                module=name,
                phase=Phase.BACKWARD,
                suspect=Suspect.WRONG_SLICE,
                detail=name,
                type=name,
                op=name,
                source=source,
                remedy=name,
            )
            for name in names
        ),
    )


def make_parallel() -> Recording:
    """What parallelize writes down, with hostile names throughout, verified and not."""
    axes = (Axis(name=HOSTILE_NAMES[0], size=2), Axis(name="tp", size=4))
    found = _hostile_parallelization(axes)
    bare = Parallelization(program="", axes=axes, is_training=False, num_ops=0, unverified="no")
    run = make_run(ranks=tuple(range(8)), axes=axes, instruments=("parallelize",))
    return make_recording(run=run, parallel=(found, bare))


def _hostile_parallelization(axes: tuple[Axis, ...]) -> Parallelization:
    names = HOSTILE_NAMES
    source = Source(file=names[3], line=1, text=names[0])
    kinds = 2 * tuple(PlacedKind) + tuple(PlacedKind)
    return Parallelization(
        program=names[0],
        axes=axes,
        is_training=True,
        num_ops=1_000,
        inserted=tuple(
            Inserted(
                kind=kind,
                axis=axes[index % 2].name,
                num_ranks=2,
                size_bytes=10**index,
                phase=Phase.BACKWARD if index % 2 else Phase.FORWARD,
                node=name,
                module=name,
                cause=f"the plan's output of {name}",
                source=source if index % 3 else None,
            )
            for index, (kind, name) in enumerate(zip(CollectiveKind, names, strict=False))
        ),
        fallbacks=tuple(
            Fallback(
                axis=name,
                kind=kind,
                op=name,
                node=name,
                module=name,
                placements=(name, "R"),
                size_bytes=4096,
                remedy=name,
                source=source,
            )
            for name in names
            for kind in FallbackKind
        ),
        placed=tuple(
            Placed(
                name=name,
                kind=kind,
                shape=(8, 2),
                local_shape=(4, 2),
                dtype=name,
                placements=("R", name),
                local_bytes=64,
                rules=(name, name),
                is_open=kind is PlacedKind.INPUT,
            )
            for name, kind in zip(names, kinds, strict=False)
        ),
        rank_memory=tuple(
            RankMemory(
                ranks=(RankSpan(first, 4),),
                parameter_bytes=2**40,
                buffer_bytes=0,
                input_bytes=first,
                gradient_bytes=2**40,
                intermediate_bytes=2**20,
                peak_bytes=2**41,
                peak_node=names[3],
                peak_module=names[0],
            )
            for first in (0, 4)
        ),
        verdicts=tuple(
            TensorVerdict(name=name, kind=kind, agreement=agreement, error=1.0, noise=0.0)
            for name in names
            for kind, agreement in zip(3 * tuple(TensorKind), Agreement, strict=False)
        ),
    )


def _hostile_parameter(name: str) -> Parameter:
    return Parameter(
        name=name,
        shape=(8, 2),
        local_shape=(1, 2),
        dtype=name,
        placements=(name,),
        axes=(name,),
        live_name=name,
        checkpoint_key=name,
        fsdp_group=name,
        alias_group=name,
        rule=name,
        global_bytes=64,
        local_bytes=8,
    )


def _hostile_memory() -> MemoryProfile:
    kinds = list(MemoryKind)
    return MemoryProfile(
        rank=0,
        peak_bytes=100 * len(HOSTILE_NAMES),
        peak_order=5,
        peak_phase=Phase.BACKWARD,
        peak_module=HOSTILE_NAMES[3],
        at_peak=tuple(
            MemoryUse(kind=kinds[index % len(kinds)], module=name, num_bytes=100)
            for index, name in enumerate(HOSTILE_NAMES)
        ),
        samples=tuple(
            MemorySample(
                order=order, phase=phase, module=HOSTILE_NAMES[3], num_bytes=(100,) * len(kinds)
            )
            for order, phase in enumerate(Phase)
        ),
        device_bytes=1000,
        allocations=AllocationTable(
            first_order=1,
            last_order=4,
            start=tuple(index % 6 - 1 for index in range(len(HOSTILE_NAMES))),
            end=(5,) * len(HOSTILE_NAMES),
            num_bytes=(100,) * len(HOSTILE_NAMES),
            address=tuple(range(0, 512 * len(HOSTILE_NAMES), 512)),
            kind=tuple(index % len(kinds) for index in range(len(HOSTILE_NAMES))),
            phase=(1,) * len(HOSTILE_NAMES),
            module=tuple(range(len(HOSTILE_NAMES))),
            source=tuple(range(len(HOSTILE_NAMES))),
            modules=tuple(HOSTILE_NAMES),
            sources=tuple(
                Source(file=name, line=number, function=name, text=name)
                for number, name in enumerate(HOSTILE_NAMES)
            ),
            segments=SegmentTable(address=(0,), num_bytes=(2 << 20,), order=(0,)),
        ),
    )


# The modules of one layer, by what their names add to its own.
LLAMA_BLOCK = (
    ("", "TransformerBlock"),
    (".attention_norm", "RMSNorm"),
    (".attention", "Attention"),
    (".attention.wq", "Linear"),
    (".attention.wk", "Linear"),
    (".attention.wv", "Linear"),
    (".attention.wo", "Linear"),
    (".ffn_norm", "RMSNorm"),
    (".feed_forward", "FeedForward"),
    (".feed_forward.w1", "Linear"),
    (".feed_forward.w2", "Linear"),
    (".feed_forward.w3", "Linear"),
)
_MIB = 1024**2


def make_llama(
    *, num_layers: int = 32, dp: int = 128, tp: int = 8, ranks: tuple[int, ...] = (0,)
) -> Recording:
    """One step of a Llama under FSDP2 + TP, the same on each of `ranks`."""
    layers = [f"layers.{index}" for index in range(num_layers)]
    names = [("", "Llama"), ("tok_embeddings", "Embedding"), ("layers", "ModuleList")]
    names += [(layer + suffix, kind) for layer in layers for suffix, kind in LLAMA_BLOCK]
    names += [("norm", "RMSNorm"), ("output", "Linear")]
    weight = Parameter(
        name="weight",
        shape=(4096, 4096),
        local_shape=(32, 512),
        dtype="float32",
        placements=("Shard(dim=0)", "Shard(dim=1)"),
        axes=("dp", "tp"),
    )
    spans = compress_ranks(ranks)
    return Recording(
        run=make_run(
            world_size=dp * tp,
            ranks=ranks,
            axes=(Axis(name="dp", size=dp), Axis(name="tp", size=tp)),
            is_simulated=True,
            command="shardscope demo",
        ),
        groups=(
            Group(name="dp", torch_name="1", ranks=(RankSpan(0, dp, tp),), num_ranks=dp, axis="dp"),
            Group(name="tp", torch_name="2", ranks=(RankSpan(0, tp),), num_ranks=tp, axis="tp"),
        ),
        modules=tuple(
            Module(
                name=name,
                type=kind,
                ranks=spans,
                parameters=(weight,) if kind in ("Linear", "Embedding", "RMSNorm") else (),
            )
            for name, kind in names
        ),
        collectives=tuple(
            call for rank in ranks for call in _llama_step(rank, layers, dp=dp, tp=tp)
        ),
    )


def _llama_step(rank: int, layers: list[str], *, dp: int, tp: int) -> list[Collective]:
    calls: list[Collective] = []
    group_orders = {"dp": count(), "tp": count()}

    def add(
        axis: str, kind: str, owner: str | None, phase: Phase, mib: float, cause: Cause, line: int
    ) -> None:
        num_ranks = {"dp": dp, "tp": tp}[axis]
        full = int(mib * _MIB)
        sizes = {
            "all_gather": (full // num_ranks, full),
            "reduce_scatter": (full, full // num_ranks),
            "all_reduce": (full, full),
        }[kind]
        wire = full * (num_ranks - 1) // num_ranks * (2 if kind == "all_reduce" else 1)
        calls.append(
            make_collective(
                rank=rank,
                order=len(calls),
                group=axis,
                group_order=next(group_orders[axis]),
                kind=CollectiveKind(kind),
                num_ranks=num_ranks,
                axis=axis,
                dtype="bfloat16",
                input_bytes=sizes[0],
                output_bytes=sizes[1],
                wire_bytes=wire,
                phase=phase,
                owner=owner,
                trigger=owner,
                cause=cause,
                reduce_op=None if kind == "all_gather" else "sum",
                source=Source(
                    file="shardscope/cli/_llama.py",
                    line=line,
                    function="forward",
                    text="return self.w2(F.silu(self.w1(x)) * self.w3(x))",
                ),
                start_ns=len(calls) * 25_000 + rank * 7,
            )
        )

    unshard = FullyShard(action="unshard", num_parameters=9)
    reduce = FullyShard(action="reduce", num_parameters=9)
    sequence, full = ("Shard(dim=1)",), ("Replicate()",)
    gather = Redistribute(
        before=sequence, after=full, asked_by="PrepareModuleInput", is_implicit=False
    )
    scatter = Redistribute(
        before=("Partial(sum)",), after=sequence, asked_by="RowwiseParallel", is_implicit=False
    )
    add("dp", "all_gather", "", Phase.FORWARD, 250, unshard, 210)
    for phase, order in ((Phase.FORWARD, layers), (Phase.BACKWARD, layers[::-1])):
        for layer in order:
            add("dp", "all_gather", layer, phase, 54.5, unshard, 210)
            for part in ("attention", "feed_forward"):
                add("tp", "all_gather", f"{layer}.{part}", phase, 64, gather, 140)
                last = {"attention": "wo", "feed_forward": "w2"}[part]
                add("tp", "reduce_scatter", f"{layer}.{part}.{last}", phase, 64, scatter, 152)
            if phase is Phase.BACKWARD:
                add("dp", "reduce_scatter", layer, phase, 109, reduce, 230)
    add("dp", "reduce_scatter", "", Phase.BACKWARD, 500, reduce, 230)
    clip = Call(api="torch.nn.utils.clip_grad_norm_")
    for axis in ("dp", "tp"):
        add(axis, "all_reduce", None, Phase.OPTIMIZER, 0.0001, clip, 260)
    return calls


def make_explained() -> Recording:
    """Two ranks' explanations, with hostile names in every place that has one."""
    return make_recording(
        run=make_run(ranks=(0, 1), instruments=("explain",)),
        explanations=tuple(_hostile_explanation(rank) for rank in range(2)),
    )


def _hostile_explanation(rank: int) -> Explanation:
    names = HOSTILE_NAMES
    sources = [Source(file=name, line=7, function=name, text=name) for name in names]
    ops = tuple(
        GraphOp(kind=kind, op=name, result=name, module=name, within=name, source=source)
        for name, source in zip(names, sources, strict=True)
        for kind in OpKind
    )
    return Explanation(
        rank=rank,
        target=names[rank],
        fingerprint="ab" * 8,
        graphs=tuple(
            CompiledGraph(
                index=index,
                compile_id="0/0",
                function=name,
                num_inputs=1,
                num_outputs=2,
                end=end,
                fingerprint="cd" * 8,
                ops=ops,
                source=sources[0],
                break_site=0 if end is GraphEnd.BREAK else None,
                is_recompile=index > 0,
            )
            for index, (name, end) in enumerate(zip(names, 9 * tuple(GraphEnd), strict=False))
        ),
        break_sites=tuple(
            BreakSite(
                source=source,
                num_events=3,
                reason=name,
                explanation=name,
                break_id="GB0001",
                hints=(name,),
                fix=name,
            )
            for name, source in zip(names, sources, strict=True)
        ),
        recompiles=tuple(
            Recompile(
                function=name,
                number=1,
                compile_id="0/1",
                guard=name,
                description=name,
                source=sources[0],
            )
            for name in names
        ),
        skipped_frames=tuple(
            SkippedFrame(function=name, reason=name, source=sources[0], break_site=0, is_rest=True)
            for name in names
        ),
        collectives=(GraphCollective(graph=0, op=names[0], result="", group=(RankSpan(0, 2),)),),
        stages=(StageTime(stage=names[0], num_calls=1, total_ns=10),),
        guards=(FrameGuards(compile_id="0/0", function=names[0], guards=tuple(names)),),
        failure=names[0],
    )


def make_diagnosed() -> Recording:
    """A diagnosis of every condition, with hostile names in every place that has one."""
    return make_recording(
        run=make_run(instruments=("diagnose",)),
        diagnoses=tuple(
            make_diagnosis(condition, HOSTILE_NAMES[index % len(HOSTILE_NAMES)])
            for index, condition in enumerate(Condition)
        ),
    )


def make_diagnosis(condition: Condition, name: str, *, num_suspects: int = 2) -> Diagnosis:
    """One that has something in each of its fields."""
    source = Source(file=name, line=7, function=name, text=name)
    return Diagnosis(
        rank=0,
        target=name,
        backend=name,
        condition=condition,
        fact=name,
        num_graphs=3,
        num_queries=21,
        graph=1,
        stage=Stage.DECOMPOSITION,
        part=name,
        phase=Phase.BACKWARD,
        suspects=(SuspectOp(op=name, module=name, source=source),) * num_suspects,
        deviation=Deviation(
            tensor=name,
            relative_rmse=1e-3,
            eager_rmse=1e-8,
            max_ulp=3204.0,
            worst_index=(0, 5),
            expected=1.0,
            got=2.0,
        ),
        error=name,
        repro=name,
        passing=name,
        notes=(name,),
    )
