"""Which ops shard: each level with its ops, the worst first."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from shardscope.record import (
    Coverage,
    Move,
    OpCoverage,
    Recording,
    Sharding,
    Verdict,
    compress_ranks,
    format_ranks,
)
from shardscope.report.heading import name_mesh
from shardscope.report.page.coverage import LevelCoverage, OpRow, ShardingRow
from shardscope.report.page.index import Index
from shardscope.report.units import format_bytes

__all__ = ["make_coverage"]

_WORST_FIRST = (
    Verdict.WRONG,
    Verdict.MISSING,
    Verdict.REPLICATED,
    Verdict.REDISTRIBUTED,
    Verdict.DECOMPOSED,
    Verdict.SHARDED,
    Verdict.LOCAL,
)


def make_coverage(recording: Recording, index: Index) -> tuple[LevelCoverage, ...]:
    """Ranks that found the same share one."""
    ranks: dict[Coverage, list[int]] = {}
    for one in recording.coverage:
        ranks.setdefault(replace(one, rank=0), []).append(one.rank)
    has_many = len({one.rank for one in recording.coverage}) > 1
    return tuple(
        _make_level(one, index, ranks=found if has_many else []) for one, found in ranks.items()
    )


def _make_level(coverage: Coverage, index: Index, *, ranks: list[int]) -> LevelCoverage:
    counts = Counter(one.verdict for one in coverage.ops)
    named = f", ranks {format_ranks(compress_ranks(sorted(set(ranks))))}" if ranks else ""
    return LevelCoverage(
        level=f"{coverage.level}{named}",
        mesh=name_mesh(coverage.axes),
        has_plan=coverage.has_plan,
        verdicts=tuple(map(str, _WORST_FIRST)),
        counts=tuple(counts[verdict] for verdict in _WORST_FIRST),
        ops=tuple(_make_op(one, index) for one in sorted(coverage.ops, key=_sort_key)),
    )


def _sort_key(one: OpCoverage) -> tuple[int, int, int, str]:
    num_calls = one.num_forward + one.num_backward
    return _WORST_FIRST.index(one.verdict), -(one.flops or 0), -num_calls, one.op


def _make_op(one: OpCoverage, index: Index) -> OpRow:
    return OpRow(
        op=one.op,
        schema=one.schema,
        verdict=one.verdict,
        num_forward=one.num_forward,
        num_backward=one.num_backward,
        flops=one.flops,
        moved_bytes=sum(move.num_bytes for move in one.moves),
        detail=one.detail,
        remedy=one.remedy,
        moves=tuple(map(_describe_move, one.moves)),
        shardings=tuple(map(_make_sharding, one.shardings)),
        modules=tuple(dict.fromkeys(map(index.module, one.modules))),
        sources=tuple(map(index.source, one.sources)),
    )


def _describe_move(move: Move) -> str:
    before, after = ", ".join(move.before), ", ".join(move.after)
    return f"{move.argument}: {before} → {after} ({format_bytes(move.num_bytes)})"


def _make_sharding(one: Sharding) -> ShardingRow:
    return ShardingRow(
        inputs=", ".join(one.inputs),
        verdict=one.verdict,
        outputs=", ".join(filter(None, one.outputs)),
        num_bytes=one.num_bytes,
        detail=one.detail,
    )
