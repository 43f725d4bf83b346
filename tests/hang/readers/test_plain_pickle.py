"""Dumps are pickles that anyone may have written: plain data is read, and nothing runs."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import pytest

from shardscope.errors import RecordingError
from shardscope.hang.readers.plain_pickle import repair_truncated, unpickle

PLAIN = {
    "entries": [{"a": 1, "b": -5, "c": 2**40, "d": 1.5, "e": None, "f": True, "g": (1, 2, 3, 4)}],
    "text": "é" * 300,
    "empty": [[], {}, ()],
}


class Call:
    """Would call a function when it is unpickled."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, self.arguments


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read(protocol: int) -> None:
    assert unpickle(pickle.dumps(PLAIN, protocol)) == PLAIN


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_called(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "called"
    data = pickle.dumps({"entries": [Call(f"touch {marker}")]}, protocol)
    with pytest.raises(RecordingError):
        unpickle(data)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (pickle.dumps(OrderedDict(a=1), 2), "it would run code (opcode GLOBAL)"),
        (pickle.dumps(timedelta(1), 4), "it would run code (opcode STACK_GLOBAL)"),
        (pickle.dumps({1, 2}, 4), "(opcode 0x8f)"),
        (b"\x80\x02(cos\nsystem\nX\x04\x00\x00\x00trueo.", "it would run code (opcode GLOBAL)"),
        (b"(S'true'\nios\nsystem\n.", "(opcode 0x53)"),
        (b"\x80\x02\x82\x01.", "it would run code (opcode EXT1)"),
        (b"\x80\x02Pid\n.", "it would run code (opcode PERSID)"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "a table far longer than the file"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f\x01.", "(opcode 0x8b)"),
        (b"\x80\x02I" + b"9" * 10_000 + b"\n.", "(opcode 0x49)"),
        (b"\x80\x02X\xff\xff\xff\x7fa.", "it is truncated"),
        (b"\x80\x02]" + b"]" * 2_000_000 + b".", "over a million lists"),
        (b"\x80\x02", "it is truncated"),
        (b"\x80\x02a.", "it is damaged"),
        (b"\x80\x02h\x07.", "it is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_pickles_are_refused_with_a_fact(data: bytes, fact: str) -> None:
    with pytest.raises(RecordingError) as raised:
        unpickle(data)
    assert fact in str(raised.value)
    assert len(str(raised.value)) < 200


def test_lists_that_contain_each_other_many_times_are_not_unrolled() -> None:
    data = b"\x80\x02]q\x00(" + b"K\x01" * 10 + b"e"
    for depth in range(1, 60):
        data += b"]q" + bytes([depth]) + b"(" + (b"h" + bytes([depth - 1])) * 10 + b"e"
    tracemalloc.start()
    unpickle(data + b".")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_deep_nesting_is_read_or_refused() -> None:
    depth = 200_000
    data = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    unpickle(data)


def test_a_truncated_list_of_entries_keeps_its_complete_entries() -> None:
    entries = [{"record_id": number, "name": "x" * 20} for number in range(50)]
    data = pickle.dumps({"version": "2.10", "entries": entries}, 2)
    repaired = repair_truncated(data[: len(data) * 2 // 3])
    assert repaired is not None
    kept = unpickle(repaired)["entries"]
    assert 25 < len(kept) < 40
    assert kept == entries[: len(kept)]
