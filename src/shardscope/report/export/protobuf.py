"""Encodes Protocol Buffers messages, as far as the export formats need them.

Fields are always written, even with their default value: in a `oneof` that selects the field, and
elsewhere it does no harm. Nothing is decoded here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_MORE = 0x80  # set in every byte of a varint except the last


def encode_varint(value: int) -> bytes:
    """Encode an integer from 0 to 2**64 - 1, seven bits at a time, lowest first."""
    encoded = bytearray()
    while value >= _MORE:
        encoded.append(value & (_MORE - 1) | _MORE)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def make_varint(number: int, value: int) -> bytes:
    """Encode a field of type integer, bool or enum; the value is not negative."""
    return _tag(number, _VARINT) + encode_varint(value)


def make_packed(number: int, values: Iterable[int]) -> bytes:
    """Encode a packed repeated field of integers."""
    return make_bytes(number, b"".join(map(encode_varint, values)))


def make_bytes(number: int, data: bytes) -> bytes:
    """Encode a field of type bytes or message."""
    return _tag(number, _BYTES) + encode_varint(len(data)) + data


def make_text(number: int, text: str) -> bytes:
    """Encode a string field; characters that UTF-8 cannot encode are escaped."""
    return make_bytes(number, text.encode("utf-8", "backslashreplace"))


def make_double(number: int, value: float) -> bytes:
    """Encode a field of type double."""
    return _tag(number, _DOUBLE) + struct.pack("<d", value)


def make_float(number: int, value: float) -> bytes:
    """Encode a field of type float."""
    return _tag(number, _FLOAT) + struct.pack("<f", value)


def _tag(number: int, layout: int) -> bytes:
    return encode_varint(number << 3 | layout)
