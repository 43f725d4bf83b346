"""A page's texts made safe to show: what strangers wrote may turn a line around or end it."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record import escape_controls

__all__ = ["make_page_inert"]

_Record = TypeVar("_Record", bound=Struct)


def make_page_inert(record: _Record) -> _Record:
    """The same record, with controls and marks of direction in its texts written as escapes.

    Texts that have several lines keep them, but for the kinds of breaks that only Unicode has.
    """
    changed = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        safe = _make_safe(value)
        if safe is not value:
            changed[name] = safe
    return replace(record, **changed) if changed else record


def _make_safe(value: Any) -> Any:
    if isinstance(value, str):
        return _make_text_safe(value)
    if isinstance(value, Struct):
        return make_page_inert(value)
    # Columns of numbers, most of a page, need no look at each.
    if isinstance(value, tuple) and value and not isinstance(value[0], int | float):
        safe = tuple(map(_make_safe, value))
        return value if all(map(_is, safe, value)) else safe
    return value


def _is(one: object, other: object) -> bool:
    return one is other


def _make_text_safe(text: str) -> str:
    if text.isascii() and text.isprintable():
        return str(text)
    return "\n".join("\t".join(map(escape_controls, line.split("\t"))) for line in text.split("\n"))
