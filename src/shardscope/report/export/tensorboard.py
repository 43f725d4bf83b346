"""Exports a recording's metrics as TensorBoard scalars, in an event file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from shardscope.record import Recording
from shardscope.report.export.metrics import list_scalars
from shardscope.report.export.protobuf import (
    make_bytes,
    make_double,
    make_float,
    make_text,
    make_varint,
)

_VERSION = "brain.Event:2"
_CASTAGNOLI = 0x82F63B78  # polynomial of CRC-32C, lowest bit first
_MASK = 0xA282EAD8


def render_tensorboard(recording: Recording, *, step: int = 0) -> Iterator[bytes]:
    """Render an event file; TensorBoard reads files with `tfevents` in their names."""
    yield _frame(make_double(1, 0.0) + make_text(3, _VERSION))
    scalars = list_scalars(recording)
    yield _frame(make_double(1, 0.0) + make_varint(2, step) + make_bytes(5, _summarize(scalars)))


def _summarize(scalars: Mapping[str, float]) -> bytes:
    values = (make_text(1, tag) + make_float(2, value) for tag, value in scalars.items())
    return b"".join(make_bytes(1, value) for value in values)


def _frame(record: bytes) -> bytes:
    """Frame a record: its length and its data, each with a checksum."""
    length = struct.pack("<Q", len(record))
    return length + _checksum(length) + record + _checksum(record)


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    masked = (crc >> 15 | crc << 17) + _MASK  # a CRC of CRCs is weak
    return struct.pack("<I", masked & 0xFFFFFFFF)


def _make_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (_CASTAGNOLI if value & 1 else 0) for value in table]
    return table


_TABLE = _make_table()
