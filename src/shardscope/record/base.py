"""The base class of all records, and types that several records share: source lines, phases, mesh
axes and kinds of collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from shardscope.record.ranks import Natural

_MAX_REPR = 200  # characters
_MAX_TEXT = 40
_MAX_ITEMS = 4


class Record(Struct, frozen=True, gc=False):
    """A frozen record. Its `repr` shows what was set and abbreviates long values.

    `msgspec.structs.asdict` returns everything.
    """

    def __repr__(self) -> str:
        parts, remaining = [], _MAX_REPR - len(type(self).__name__) - len("(, …)")
        for part in _list_parts(self):
            remaining -= len(part) + len(", ")
            if remaining < 0:
                parts.append("…")
                break
            parts.append(part)
        return f"{type(self).__name__}({', '.join(parts)})"


def _list_parts(record: Struct) -> Iterator[str]:
    """The fields that differ from their defaults, as keyword arguments."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is NODEFAULT or value != field.default:
            yield f"{field.name}={_abbreviate(value)}"


def _abbreviate(value: object) -> str:
    if isinstance(value, str):
        return repr(str(value) if len(value) <= _MAX_TEXT else f"{value[: _MAX_TEXT - 1]}…")
    if isinstance(value, Struct):
        return f"{type(value).__name__}(…)"
    if isinstance(value, tuple):
        return _abbreviate_tuple(value)
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def _abbreviate_tuple(items: tuple[object, ...]) -> str:
    if isinstance(next(iter(items), None), Struct):
        return f"({len(items):,} × {type(items[0]).__name__})"
    comma = "," if len(items) == 1 else ""
    text = f"({', '.join(map(_abbreviate, items[:_MAX_ITEMS]))}{comma})"
    is_complete = len(items) <= _MAX_ITEMS and len(text) <= 2 * _MAX_TEXT
    return text if is_complete else f"({len(items):,} items)"


class Phase(StrEnum):
    """What the training step was doing."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"


class Axis(Record, frozen=True, kw_only=True, gc=False):
    """One axis of a device mesh."""

    name: str
    size: Natural


class Source(Record, frozen=True, kw_only=True, gc=False):
    """A line of the user's program."""

    file: str
    line: Natural
    function: str = ""
    text: str = ""


def name_line(source: Source | None) -> str:
    """`train.py:12`; empty if the line is not known."""
    return "" if source is None else f"{source.file}:{source.line}"


class CollectiveKind(StrEnum):
    """What a collective does, whatever torch calls the op that did it."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"


def wire_bytes(kind: CollectiveKind, input_bytes: int, output_bytes: int, num_ranks: int) -> int:
    """Bytes each rank sends if the group runs a ring, averaged over its ranks.

    The factors are those by which bus bandwidth is commonly quoted: 2(n-1)/n of the payload for an
    all-reduce, (n-1)/n of the full tensor for all-gather, reduce-scatter, scatter and all-to-all,
    all of it for a broadcast or a reduce. A receive and the root of a gather send nothing: their
    bytes are counted where they are sent.
    """
    fraction = (num_ranks - 1) / num_ranks
    if num_ranks == 1 or kind in (CollectiveKind.RECV, CollectiveKind.BARRIER):
        return 0
    if kind is CollectiveKind.GATHER and output_bytes:
        return 0
    if kind is CollectiveKind.ALL_REDUCE:
        return round(2 * fraction * input_bytes)
    if kind is CollectiveKind.ALL_GATHER:
        return round(fraction * output_bytes)
    if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL, CollectiveKind.SCATTER):
        return round(fraction * input_bytes)
    return input_bytes
