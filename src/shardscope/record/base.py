"""The base class of all records, with a short `repr` that fits a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

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
