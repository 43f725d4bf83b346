"""Files of each schema, as they were written once, still read as they were meant."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from shardscope.record import (
    AllocationTable,
    Axis,
    BucketReduce,
    Call,
    Check,
    CheckOutcome,
    Collective,
    CollectiveKind,
    Compiled,
    Coverage,
    DroppedCollectives,
    Explanation,
    Finding,
    FullyShard,
    Gap,
    Group,
    Level,
    Mark,
    MarkKind,
    MemoryKind,
    MemoryProfile,
    MemoryUse,
    Module,
    OpCoverage,
    OpVerdict,
    Parameter,
    Phase,
    RankProcess,
    RankSpan,
    Recording,
    Redistribute,
    Role,
    RunComparison,
    RunDeviation,
    RunInfo,
    SegmentTable,
    Severity,
    Sharding,
    Source,
    SpanBegin,
    SpmdCall,
    StageTime,
    Stop,
    ValueKind,
    ValueSample,
    Variation,
    encode,
    load,
)
from shardscope.record.hang_records import (
    CauseKind,
    Certainty,
    GroupProgress,
    GroupSkew,
    HangAnalysis,
    HangCall,
    HangCause,
    HangDivergence,
    HangSide,
    HangSource,
    HangWait,
    RankState,
    SlowRank,
)

_FOLDER = Path(__file__).parents[1] / "golden"


def _collective(order, kind, phase, cause, **changes):
    facts = {
        "rank": 0,
        "order": order,
        "group": "tp[0-3]",
        "group_order": order,
        "kind": kind,
        "op": f"c10d.{kind}_",
        "num_ranks": 4,
        "axis": "tp",
        "dtype": "bfloat16",
        "num_tensors": 1,
        "input_bytes": 1024,
        "output_bytes": 4096,
        "wire_bytes": 3072,
        "phase": phase,
        "owner": "layers.0",
        "trigger": "layers.0.wq",
        "cause": cause,
    }
    return Collective(**(facts | changes))


def make_first() -> Recording:
    """What the file of schema 1 holds: a simulation's clock and zeros for sizes are left out."""
    source = Source(file="train.py", line=12, function="forward", text="h = self.wq(x)")
    odd = "[red]\n\x1b[31m</script>=1+1 \u202e 🚀"
    gather = Redistribute(
        before=("Shard(dim=1)",),
        after=("Replicate()",),
        asked_by="aten.mm.default",
        is_implicit=True,
    )
    return Recording(
        run=RunInfo(
            torch_version="2.13.0",
            shardscope_version="0.1.0",
            world_size=8,
            ranks=(RankSpan(0), RankSpan(3, 2, 4)),
            axes=(Axis(name="dp", size=2), Axis(name="tp", size=4)),
            is_simulated=True,
            command="python train.py",
        ),
        groups=(
            Group(
                name="tp[0-3]",
                torch_name="1",
                ranks=(RankSpan(0, 4),),
                num_ranks=4,
                axis="tp",
                backend="gloo",
            ),
        ),
        modules=(
            Module(name="", type="Net", ranks=(RankSpan(0, 8),)),
            Module(
                name="layers.0",
                type="Block",
                ranks=(RankSpan(0, 8),),
                parameters=(
                    Parameter(
                        name="weight",
                        shape=(64, 64),
                        local_shape=(64, 16),
                        dtype="float32",
                        placements=("Shard(dim=1)",),
                        axes=("tp",),
                        is_trainable=False,
                    ),
                ),
                aliases=("tied", odd),
            ),
        ),
        collectives=(
            _collective(0, CollectiveKind.ALL_GATHER, Phase.FORWARD, gather, source=source),
            _collective(
                1,
                CollectiveKind.ALL_GATHER,
                Phase.RECOMPUTE,
                FullyShard(action="unshard", num_parameters=9),
            ),
            _collective(
                2,
                CollectiveKind.ALL_REDUCE,
                Phase.BACKWARD,
                BucketReduce(bucket=0, parameters=("layers.0.weight",)),
                reduce_op="sum",
                thread="autograd",
            ),
            _collective(
                3,
                CollectiveKind.BROADCAST,
                Phase.OUTSIDE,
                Call(api="torch.distributed.broadcast"),
                owner=None,
                trigger=None,
                axis=None,
                peer=3,
            ),
            _collective(4, CollectiveKind.ALL_TO_ALL, Phase.OPTIMIZER, Compiled(graph="0/1")),
            _collective(5, CollectiveKind.BARRIER, Phase.OUTSIDE, None, owner=odd),
        ),
        findings=(
            Finding(
                rule="implicit-gather",
                severity=Severity.WARNING,
                subject="layers.0",
                fact="gathered unasked",
                remedy="Keep it sharded.",
                rank=0,
                source=source,
            ),
        ),
        gaps=(Gap(place=odd, fact="an op of an unknown kind", rank=3),),
    )


def make_hang() -> HangAnalysis:
    """A hang with a record of each kind."""
    ranks = (RankSpan(0, 2),)
    line = Source(file="train.py", line=12, function="step")
    call = HangCall(
        kind=CollectiveKind.ALL_REDUCE,
        op="nccl:all_reduce",
        dtype="float32",
        num_bytes=64,
        reduce_op="sum",
        peer=1,
        is_located=True,
        module="layers.0",
        phase=Phase.FORWARD,
        source=line,
        state="issued",
    )
    return HangAnalysis(
        is_hang=True,
        world_size=8,
        ranks=ranks,
        missing_ranks=(RankSpan(7),),
        sources=(
            HangSource(
                pattern="run-*.jsonl",
                format="stream",
                num_files=2,
                ranks=ranks,
                num_calls=5,
                detail="simulated",
            ),
        ),
        causes=(
            HangCause(
                kind=CauseKind.SLOW,
                certainty=Certainty.LIKELY,
                ranks=(RankSpan(1),),
                fact="rank 1 is behind",
                remedy="Look at it.",
                evidence=("its stack",),
                group="dp[0-1]",
                position=3,
                source=line,
            ),
        ),
        divergences=(
            HangDivergence(
                group="dp[0-1]",
                position=2,
                differing=("size",),
                sides=(HangSide(ranks=ranks, call=call), HangSide(ranks=ranks, call=None)),
            ),
        ),
        waits=(
            HangWait(
                group="dp[0-1]",
                position=3,
                waiters=(RankSpan(0),),
                missing=(RankSpan(1),),
                call=call,
                is_certain=True,
            ),
        ),
        cycle=(0, 1),
        progress=(
            GroupProgress(
                group="dp[0-1]",
                group_size=2,
                ranks=ranks,
                num_issued=4,
                num_done=3,
                behind=1,
                last=call,
                now="in step",
            ),
        ),
        num_level_groups=2,
        states=(RankState(ranks=ranks, activity="in step", detail="killed", frames=(line,)),),
        slow_ranks=(
            SlowRank(
                rank=1,
                num_collectives=9,
                num_last=8,
                excess_ns=70,
                mean_late_ns=7,
                group="dp[0-1]",
                source=line,
            ),
        ),
        skews=(
            GroupSkew(
                group="dp[0-1]",
                num_collectives=9,
                skew_ns=5,
                transfer_ns=2,
                last_rank=1,
                num_last=8,
            ),
        ),
        unknowns=("no file says it",),
    )


def make_check() -> Check:
    """A check with a variation of each outcome."""
    return Check(
        world_size=8,
        roles=(Role(rank=0, ranks=(RankSpan(0, 4),)), Role(rank=7, ranks=(RankSpan(4, 4),))),
        num_steps=5,
        is_complete=False,
        has_data=True,
        is_varied=True,
        variations=tuple(
            Variation(
                condition=f"the batch of rank {rank} is empty",
                ranks=(RankSpan(rank),),
                outcome=outcome,
                source=Source(file="train.py", line=12, function="step"),
                detail="ValueError: empty" if outcome is CheckOutcome.RAISED else "",
            )
            for rank, outcome in enumerate(CheckOutcome)
        ),
    )


def make_second() -> Recording:
    """What the file of schema 2 holds: figures, zeros among them, and what was not recorded."""
    first = make_first()
    root, layer = first.modules
    sized = replace(
        layer.parameters[0], name="bias", global_bytes=1024, local_bytes=0, is_annotated=True
    )
    marks = (
        Mark(
            kind=MarkKind.FULLY_SHARD,
            axes=("dp",),
            num_parameters=0,
            options=("gradient_divide_factor=1.0",),
        ),
        Mark(kind=MarkKind.COMPILED),
    )
    typed = SpmdCall(
        function="redistribute", axis="tp", before="P", after="S(0)", backward_of="all_gather"
    )
    calls = (
        replace(first.collectives[0], start_ns=0, returned_ns=7, cause=typed),
        *first.collectives[1:],
    )
    ops = (
        OpCoverage(op="aten.mm.default", schema="mm", verdict=OpVerdict.SHARDED, flops=0),
        OpCoverage(
            op="aten.sin.default",
            schema="sin",
            verdict=OpVerdict.LOCAL,
            shardings=(
                Sharding(inputs=(), verdict=OpVerdict.LOCAL),
                Sharding(inputs=("self: Shard(0)",), verdict=OpVerdict.SHARDED, num_bytes=0),
            ),
        ),
    )
    profiles = (
        MemoryProfile(rank=0, peak_bytes=4096, peak_order=3, peak_phase=Phase.BACKWARD),
        MemoryProfile(
            rank=3,
            peak_bytes=4096,
            peak_order=3,
            peak_phase=Phase.BACKWARD,
            at_peak=(MemoryUse(kind=MemoryKind.GRADIENTS, module="layers.0", num_bytes=4096),),
            first_peak_bytes=2048,
            reserved_bytes=0,
            needed_bytes=8192,
            device_bytes=0,
            allocations=AllocationTable(
                first_order=2,
                last_order=4,
                start=(-1, 0, 2, 2),
                end=(5, 5, 4, 4),
                num_bytes=(2048, 512, 1024, 512),
                address=(0, 2048, 4096, 4096),
                kind=(0, 2, 1, 1),
                phase=(4, 3, 1, 1),
                module=(0, -1, 0, 1),
                source=(-1, -1, 0, 0),
                modules=("layers.0", ""),
                sources=(
                    Source(file="train.py", line=12, function="step", text="loss.backward()"),
                ),
                segments=SegmentTable(address=(0,), num_bytes=(2 << 20,), order=(0,)),
                num_left_out=1,
                max_left_out_bytes=512,
            ),
        ),
    )
    stages = (
        StageTime(stage="tracing", num_calls=1, total_ns=0),
        StageTime(stage="aot", num_calls=2, total_ns=None),
    )
    axes = first.run.axes
    return replace(
        first,
        run=replace(
            first.run,
            is_simulated=False,
            instruments=("trace", "audit"),
            num_forwards=2,
            device_type="cuda",
            skipped_checks=("step",),
        ),
        modules=(root, replace(layer, parameters=(*layer.parameters, sized), marks=marks)),
        collectives=calls,
        coverage=(Coverage(rank=0, level=Level.EXPORTED, axes=axes, has_plan=True, ops=ops),),
        memory=profiles,
        explanations=(Explanation(rank=0, target="step", fingerprint="f", stages=stages),),
        stops=(
            Stop(
                rank=1,
                error="RuntimeError: out of memory",
                open_spans=(SpanBegin(rank=1, name="forward", start_ns=5),),
                is_gapless=True,
            ),
        ),
        values=(
            ValueSample(
                rank=0,
                step=1,
                order=0,
                kind=ValueKind.GRADIENT,
                name="layers.0.weight",
                dtype="bfloat16",
                shape=(64, 64),
                local_shape=(64, 16),
                axes=("dp", "tp"),
                coordinate=(0, 1),
                placements=("Replicate", "Shard(1)"),
                mesh_rank=0,
                sum=-0.5,
                sum_squares=0.25,
                max_abs=0.125,
                hash="00ff00ff00ff00ff",
            ),
            ValueSample(
                rank=0,
                step=1,
                order=1,
                kind=ValueKind.OUTPUT,
                name="",
                path="1",
                call=2,
                dtype="float32",
                shape=(4,),
                local_shape=(4,),
                max_abs=None,
                num_nonfinite=3,
                hash="0000000000000001",
            ),
        ),
        processes=(
            RankProcess(rank=0, host="node-0", pid=17, started_unix_ns=1_700_000_000_000_000_000),
        ),
        checks=(make_check(),),
        hangs=(make_hang(),),
        dropped=(
            DroppedCollectives(
                rank=0,
                group="tp[0-3]",
                kind=CollectiveKind.SEND,
                num_collectives=1_000,
                input_bytes=64_000,
                wire_bytes=64_000,
                peer=1,
            ),
        ),
        comparisons=(
            RunComparison(
                run_a="a.json",
                run_b="b-*.json",
                world_size_a=1,
                world_size_b=8,
                steps=(1, 2),
                num_compared=12,
                num_equal=3,
                num_deviating=1,
                deviations=(
                    RunDeviation(
                        step=2,
                        kind=ValueKind.BUFFER,
                        name="layers.0.scale",
                        dtype="float32",
                        num_elements=64,
                        norm_a=8.0,
                        norm_b=8.0,
                        sum_a=1.0,
                        sum_b=None,
                        deviation=0.0,
                        limit=1e-06,
                        ratio=2.0,
                        detail="off",
                        ranks=(RankSpan(3),),
                        disagreeing_run="B",
                        suspect="layers.0",
                    ),
                ),
                agreed=("step 1: all 12 tensors",),
            ),
        ),
    )


def test_golden_file_of_schema_1_reads_as_it_was_meant():
    assert load(_FOLDER / "recording_v1.json") == make_first()


def test_golden_file_of_schema_2_reads_and_is_written_as_it_was():
    path = _FOLDER / "recording_v2.json"
    assert load(path) == make_second()
    assert encode(make_second()) == path.read_bytes()


def without_later_records(recording: Recording) -> Recording:
    """The recording as it was before values were sampled and processes recorded."""
    calls = tuple(replace(call, returned_ns=None) for call in recording.collectives)
    later = {
        "values": (),
        "comparisons": (),
        "processes": (),
        "checks": (),
        "hangs": (),
        "dropped": (),
    }
    return replace(recording, collectives=calls, **later)


def test_a_file_of_schema_2_from_before_allocations_were_recorded_still_reads():
    second = without_later_records(make_second())
    earlier = tuple(replace(profile, allocations=None) for profile in second.memory)
    path = _FOLDER / "recording_v2_without_allocations.json"
    assert load(path) == replace(second, memory=earlier)


def test_a_file_of_schema_2_from_before_values_were_sampled_still_reads():
    path = _FOLDER / "recording_v2_without_values.json"
    assert load(path) == without_later_records(make_second())


def test_a_file_of_schema_2_from_before_processes_were_recorded_still_reads():
    second = make_second()
    earlier = replace(
        without_later_records(second), values=second.values, comparisons=second.comparisons
    )
    assert load(_FOLDER / "recording_v2_without_processes.json") == earlier


def test_a_file_of_schema_2_from_before_hangs_were_recorded_still_reads():
    path = _FOLDER / "recording_v2_without_hangs.json"
    assert load(path) == replace(make_second(), hangs=(), checks=(), dropped=())


def test_a_file_of_schema_2_from_before_checks_were_recorded_still_reads():
    path = _FOLDER / "recording_v2_without_checks.json"
    assert load(path) == replace(make_second(), checks=(), dropped=())


def test_a_stream_of_schema_2_still_reads():
    recording = load(_FOLDER / "stream_v2.jsonl")
    assert [call.order for call in recording.collectives] == [0, 1, 2]
    assert [call.start_ns for call in recording.collectives] == [0, 10, 20]
    assert {call.returned_ns for call in recording.collectives} == {None}
    assert recording.collectives[2].cause == Call(api="torch.distributed.all_reduce")
    assert [group.name for group in recording.groups] == ["dp[0-1]"]
    assert [module.name for module in recording.modules] == ["layer"]
    assert (recording.processes, recording.dropped) == ((), ())
    assert [stop.error for stop in recording.stops] == ["ValueError: the batch is empty"]
    assert recording.gaps[0].fact == "was not understood"
