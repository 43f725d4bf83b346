"""Protocol buffers on the wire: as much of them as the formats of others need.

Fields are written as they are given, those with a default value too: in a `oneof` that tells which
one is meant, and elsewhere it does no harm. Nothing is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

__all__ = [
    "encode_varint",
    "make_bytes",
    "make_double",
    "make_float",
    "make_packed",
    "make_text",
    "make_varint",
]

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # how a field's value is laid out
_MORE = 0x80  # set in each byte of a number but the last


def encode_varint(value: int) -> bytes:
    """A number from 0 to 2**64 - 1, seven bits at a time, the lowest first."""
    encoded = bytearray()
    while value >= _MORE:
        encoded.append(value & (_MORE - 1) | _MORE)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def make_varint(number: int, value: int) -> bytes:
    """A field that is a whole number, a boolean or one of an enum; not below zero."""
    return _tag(number, _VARINT) + encode_varint(value)


def make_packed(number: int, values: Iterable[int]) -> bytes:
    """A repeated field of whole numbers."""
    return make_bytes(number, b"".join(map(encode_varint, values)))


def make_bytes(number: int, data: bytes) -> bytes:
    """A field that is bytes, or another message."""
    return _tag(number, _BYTES) + encode_varint(len(data)) + data


def make_text(number: int, text: str) -> bytes:
    """A field that is text; what UTF-8 does not have is written as an escape."""
    return make_bytes(number, text.encode("utf-8", "backslashreplace"))


def make_double(number: int, value: float) -> bytes:
    """A field that is a number of 64 bits with a fraction."""
    return _tag(number, _DOUBLE) + struct.pack("<d", value)


def make_float(number: int, value: float) -> bytes:
    """The same of 32 bits."""
    return _tag(number, _FLOAT) + struct.pack("<f", value)


def _tag(number: int, layout: int) -> bytes:
    return encode_varint(number << 3 | layout)
