"""A file of schema 1, as it was written once, still reads as it was meant."""

from __future__ import annotations

from pathlib import Path

from shardscope.record import (
    Axis,
    BucketReduce,
    Call,
    Collective,
    CollectiveKind,
    Compiled,
    Finding,
    FullyShard,
    Gap,
    Group,
    Module,
    Parameter,
    Phase,
    RankSpan,
    Recording,
    Redistribute,
    RunInfo,
    Severity,
    Source,
    load,
)

_GOLDEN = Path(__file__).parents[1] / "golden" / "recording_v1.json"


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


def make_golden() -> Recording:
    """What the golden file holds."""
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
            _collective(5, CollectiveKind.BARRIER, Phase.OUTSIDE, None, owner=odd, start_ns=5000),
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


def test_golden_file_reads_as_it_was_meant():
    assert load(_GOLDEN) == make_golden()
