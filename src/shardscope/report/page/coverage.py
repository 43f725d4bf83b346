"""Which ops shard, for the browser."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["LevelCoverage", "OpRow", "ShardingRow"]


class ShardingRow(Struct, frozen=True, kw_only=True):
    """One way to lay out an op's inputs."""

    inputs: str
    verdict: str
    outputs: str = ""
    num_bytes: int | None = None  # None is not known
    detail: str = ""


class OpRow(Struct, frozen=True, kw_only=True):
    """One op; the worst come first."""

    op: str
    schema: str
    verdict: str
    num_forward: int = 0
    num_backward: int = 0
    flops: int | None = None  # None where there is no formula for it
    moved_bytes: int = 0
    detail: str = ""
    remedy: str = ""
    moves: tuple[str, ...] = ()
    shardings: tuple[ShardingRow, ...] = ()
    modules: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()


class LevelCoverage(Struct, frozen=True, kw_only=True):
    """All ops at one level; `counts` has a number for each of `verdicts`."""

    level: str
    mesh: str
    has_plan: bool
    verdicts: tuple[str, ...]
    counts: tuple[int, ...]
    ops: tuple[OpRow, ...]
