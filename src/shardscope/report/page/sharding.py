"""What each rank holds, for the browser: parameters, and how each lies on its mesh."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Drawing", "LayoutRow", "Parameters", "Piece", "ShardingTable"]


class Piece(Struct, frozen=True, kw_only=True):
    """A part of a tensor, as a rectangle in shares (0 to 1) of its last two cut dims."""

    left: float
    top: float
    width: float
    height: float
    ranks: str  # that hold it
    indices: str  # `[0:512, :]`
    color: int  # the same for pieces that one rank of the first group holds


class Drawing(Struct, frozen=True, kw_only=True):
    """The layout of tensors of one shape and placement; `pieces` is empty if there are too many."""

    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[str, ...]
    words: str  # `rows cut in 8 along tp, a copy on each of 128 dp`
    horizontal: str = ""  # what the picture's sides are: `dim 1: 4096`
    vertical: str = ""
    pieces: tuple[Piece, ...] = ()
    note: str = ""


class Parameters(Struct, frozen=True, kw_only=True):
    """Parameters and buffers in columns."""

    module: tuple[int, ...] = ()
    name: tuple[str, ...] = ()  # full
    shape: tuple[str, ...] = ()  # `4096 × 1024`
    local_shape: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    drawing: tuple[int, ...] = ()
    placement: tuple[str, ...] = ()  # `dp: Shard(0), tp: Replicate`
    global_bytes: tuple[int | None, ...] = ()  # None is not recorded
    local_bytes: tuple[int | None, ...] = ()
    is_trainable: tuple[bool, ...] = ()
    is_buffer: tuple[bool, ...] = ()
    rule: tuple[str, ...] = ()
    fsdp_group: tuple[str, ...] = ()
    alias_group: tuple[str, ...] = ()
    live_name: tuple[str, ...] = ()
    checkpoint_key: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # rules of findings on it, joined by commas


class LayoutRow(Struct, frozen=True, kw_only=True):
    """A tensor whose layout was asked for by itself."""

    name: str
    drawing: int


class ShardingTable(Struct, frozen=True, kw_only=True):
    """All parameters, and a drawing for each of their layouts."""

    parameters: Parameters
    drawings: tuple[Drawing, ...]
    global_bytes: int | None = None  # None is not recorded
    local_bytes: int | None = None
    replicated_bytes: int | None = None  # of what a rank holds, what others hold as well
    layouts: tuple[LayoutRow, ...] = ()
