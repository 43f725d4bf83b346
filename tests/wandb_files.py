"""Reads what W&B writes offline: a log of protobuf records in blocks, as LevelDB's."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER = 7  # bytes of the file's magic number, and of the header of each piece
_BLOCK = 32 * 1024
_FULL, _LAST = 1, 4


def read_records(path: Path) -> Iterator[Any]:
    """Every record of a `.wandb` file, as W&B's own protobuf class."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, pieces = path.read_bytes(), _HEADER, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:  # the rest of a block is padding
            position += _BLOCK - position % _BLOCK
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + _HEADER])
        pieces += data[position + _HEADER : position + _HEADER + size]
        position += _HEADER + size
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(pieces)
            pieces = b""
            yield record


def find_offline_run(folder: Path) -> Path:
    """The file of the only run that was written below a folder."""
    (path,) = (path for path in folder.glob("wandb/offline-run-*/*.wandb"))
    return path


def read_history(records: list[Any]) -> list[dict[str, Any]]:
    """The rows that a run has logged, by name."""
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
