"""Writes the recording of a large run as Parquet: 1,024 ranks and a million collectives.

    PYTHONPATH=src python tests/huge_run.py huge.parquet

A pipeline of 4 stages with FSDP over 32 and tensor parallelism over 8, 128 layers, all ranks timed.
The columns of a rank are made once for each stage and repeated for its other ranks, because a
million records would take minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

import sample_recordings as samples
from shardscope.record import (
    Axis,
    Cause,
    Collective,
    CollectiveKind,
    FullyShard,
    Group,
    Mark,
    MarkKind,
    Module,
    Phase,
    RankSpan,
    Recording,
    Redistribute,
    Source,
    write_file,
)
from shardscope.record.parquet import encode_columns, make_columns

PP, DP, TP = 4, 32, 8
NUM_RANKS = PP * DP * TP
NUM_CALLS = 1_000_000
NUM_LAYERS = 128
_FILE = "src/models/transformer/block.py"


def write_huge(path: str | Path, *, num_calls: int = NUM_CALLS) -> Recording:
    """Write the file; the recording without its collectives."""
    rest = Recording(
        run=samples.make_run(
            world_size=NUM_RANKS,
            ranks=tuple(range(NUM_RANKS)),
            axes=tuple(
                Axis(name=name, size=size) for name, size in (("pp", PP), ("dp", DP), ("tp", TP))
            ),
            command="torchrun --nnodes 128 --nproc-per-node 8 train.py",
            instruments=("trace",),
        ),
        groups=tuple(_make_groups()),
        modules=tuple(_make_modules()),
    )
    each, num_longer = divmod(num_calls, NUM_RANKS)
    templates = [_make_template(rest, stage, each + 1) for stage in range(PP)]
    tables = [
        _place(templates[rank // (DP * TP)].slice(0, each + (rank < num_longer)), rank)
        for rank in range(NUM_RANKS)
    ]
    write_file(encode_columns(pa.concat_tables(tables).combine_chunks(), rest), path, force=True)
    return rest


def _make_template(rest: Recording, stage: int, num_calls: int) -> pa.Table:
    """The columns of a rank of a stage; `group` is only the axis."""
    calls = tuple(_make_calls(stage, num_calls))
    return make_columns(Recording(run=rest.run, collectives=calls))


def _place(template: pa.Table, rank: int) -> pa.Table:
    """The template as the columns of a rank: its own number, groups and clock."""
    stage, place = divmod(rank, DP * TP)
    data, tensor = divmod(place, TP)
    names = {"dp": f"dp[{stage},{tensor}]", "tp": f"tp[{stage},{data}]"}
    groups = [names[axis] for axis in template["axis"].to_pylist()]
    starts = [start + rank * 1_003 for start in template["start_ns"].to_pylist()]
    changed = {
        "rank": pa.array([rank] * template.num_rows, pa.int64()),
        "group": pa.array(groups, pa.string()),
        "start_ns": pa.array(starts, pa.int64()),
    }
    for name, column in changed.items():
        template = template.set_column(template.column_names.index(name), name, column)
    return template


def _make_groups() -> Iterator[Group]:
    for stage in range(PP):
        first = stage * DP * TP
        for data in range(DP):
            spans = (RankSpan(first + data * TP, TP),)
            yield _make_group(f"tp[{stage},{data}]", "tp", spans, TP)
        for tensor in range(TP):
            spans = (RankSpan(first + tensor, DP, TP),)
            yield _make_group(f"dp[{stage},{tensor}]", "dp", spans, DP)


def _make_group(name: str, axis: str, ranks: tuple[RankSpan, ...], num_ranks: int) -> Group:
    return Group(
        name=name, torch_name=name, ranks=ranks, num_ranks=num_ranks, axis=axis, backend="nccl"
    )


def _make_modules() -> Iterator[Module]:
    everybody = (RankSpan(0, NUM_RANKS),)
    yield Module(name="", type="Transformer", ranks=everybody)
    yield Module(name="layers", type="ModuleList", ranks=everybody)
    for layer in range(NUM_LAYERS):
        ranks = (RankSpan(layer * PP // NUM_LAYERS * DP * TP, DP * TP),)
        for suffix, kind in samples.LLAMA_BLOCK:
            marks = () if suffix else (Mark(kind=MarkKind.FULLY_SHARD, axes=("dp",)),)
            yield Module(name=f"layers.{layer}{suffix}", type=kind, ranks=ranks, marks=marks)


def _make_calls(stage: int, num_calls: int) -> Iterator[Collective]:
    layers = [layer for layer in range(NUM_LAYERS) if layer * PP // NUM_LAYERS == stage]
    parts = (
        ("dp", CollectiveKind.ALL_GATHER, "", _gather(), 7, 1),
        ("tp", CollectiveKind.ALL_GATHER, ".attention", _move("aten.mm.default"), 41, 4),
        ("tp", CollectiveKind.REDUCE_SCATTER, ".attention.wo", _move("RowwiseParallel"), 52, 4),
        ("tp", CollectiveKind.ALL_REDUCE, ".feed_forward.w2", _move("RowwiseParallel"), 77, 2),
    )
    for order in range(num_calls):
        axis, kind, suffix, cause, line, factor = parts[order % len(parts)]
        is_forward = order < num_calls // 2
        position = order // len(parts) % len(layers)
        layer = layers[position if is_forward else -1 - position]
        yield samples.make_collective(
            rank=0,
            order=order,
            group=axis,
            group_order=order // len(parts),
            kind=kind,
            num_ranks=DP if axis == "dp" else TP,
            axis=axis,
            dtype="bfloat16" if axis == "tp" else "float32",
            input_bytes=factor * 8_388_608,
            output_bytes=factor * 33_554_432,
            wire_bytes=factor * 7_340_032,
            phase=Phase.FORWARD if is_forward else Phase.BACKWARD,
            owner=f"layers.{layer}{suffix}",
            trigger=f"layers.{layer}",
            cause=cause,
            source=Source(
                file=_FILE, line=line + stage, function="forward", text="x = self.attention(x)"
            ),
            start_ns=1_234_567 * (1 + order),
        )


def _gather() -> Cause:
    return FullyShard(action="unshard", num_parameters=9)


def _move(asked_by: str) -> Cause:
    return Redistribute(
        before=("Shard(1)",),
        after=("Replicate",),
        asked_by=asked_by,
        is_implicit="aten" in asked_by,
    )


if __name__ == "__main__":
    write_huge(sys.argv[1])
