"""Dumps of Flight Recorder: of each version of torch, in pickles and JSON, and of real gloo."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardscope import explain_hang
from shardscope.hang.evidence import CallState, RankEvidence, view_integers
from shardscope.hang.readers.flight_recorder import read_json, read_pickle
from shardscope.record import expand_ranks

FRAMES = [
    {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c10d.py", "line": 9},
    {"name": "step", "filename": "/job/train.py", "line": 12},
]


def make_entry(number: int, **changes: Any) -> dict[str, Any]:
    """An entry with what all versions from torch 2.5 on have."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_790_000_000_000_000_000 + number * 1_000,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **changes,
    }


def make_dump(entries: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {
            "0": {
                "last_enqueued_collective": len(entries),
                "last_started_collective": -1,
                "last_completed_collective": len(entries),
            }
        },
        "entries": entries,
        **changes,
    }


def read(dump: dict[str, Any]) -> RankEvidence:
    evidence, gaps = read_pickle(pickle.dumps(dump, 2), "dump")
    assert gaps == []
    return evidence


# What versions of torch write, as far as they differ.
VERSIONS = {
    "torch 2.5": ({"version": "2.4"}, {"frames": FRAMES}),
    "torch 2.11": ({"version": "2.10", "comm_lib_version": "2.28.9"}, {"frames": FRAMES}),
    "torch 2.13": (
        {"version": "2.10", "comm_lib_version": "2.28.9", "rank": 1},
        {"frames": FRAMES, "thread_id": "140", "thread_name": "pt_autograd_0"},
    ),
    "torch 2.15": (
        {"version": "2.12", "host": "node-7", "nccl_version": "2.30"},
        {"frames": FRAMES, "thread_id": "140", "duration_ms": 0.5, "new_field": {"a": [1]}},
    ),
    "lists of ranks": (
        {"pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": [0, 1]}}},
        {"frames": FRAMES},
    ),
    "without stacks": ({}, {}),
    "without statuses": ({"pg_status": {}}, {"frames": FRAMES}),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_dumps_of_all_versions_are_read(name: str) -> None:
    of_dump, of_entry = VERSIONS[name]
    dump = make_dump([make_entry(number, **of_entry) for number in range(5)], **of_dump)
    as_json, gaps = read_json(json.dumps(dump).encode(), "dump.json")
    assert gaps == []
    for evidence in (read(dump), as_json):
        (columns,) = evidence.columns
        (fact,) = evidence.groups
        assert fact.ranks == (0, 1)
        assert list(view_integers(columns.positions)) == [0, 1, 2, 3, 4]
        assert set(columns.states) == {CallState.DONE}
        (signature,) = evidence.signatures
        assert (signature.kind, signature.dtype, signature.input_bytes) == (
            "all_reduce",
            "float32",
            16,
        )
    sources = {site.source.line for site in read(dump).sites if site.source is not None}
    assert sources == ({12} if "frames" in of_entry else set())


def test_a_wrapped_buffer_and_calls_without_entries_are_counted() -> None:
    entries = [make_entry(number) for number in range(100, 103)]
    dump = make_dump(entries)
    dump["pg_status"]["0"]["last_enqueued_collective"] = 110
    evidence = read(dump)
    assert evidence.is_wrapped
    assert evidence.columns[0].num_issued == 110


def test_calls_that_torch_issued_together_are_one_position() -> None:
    entries = [
        make_entry(0),
        make_entry(1, collective_seq_id=2, profiling_name="nccl:_reduce_oop"),
        make_entry(2, collective_seq_id=2, profiling_name="nccl:_reduce_oop"),
        make_entry(3, collective_seq_id=2, profiling_name="nccl:reduce_scatter_coalesced"),
        make_entry(4, collective_seq_id=3),
    ]
    (columns,) = read(make_dump(entries)).columns
    assert list(view_integers(columns.positions)) == [0, 1, 2]


def test_entries_that_cannot_be_read_are_a_gap_and_the_others_are_kept() -> None:
    entries = [make_entry(0), {"record_id": "x"}, make_entry(2)]
    evidence, (gap,) = read_pickle(pickle.dumps(make_dump(entries), 2), "dump")
    assert len(evidence.columns[0]) == 2
    assert gap.fact == "1 of its 3 entries cannot be read"
    assert gap.is_loss


def test_the_rank_is_read_from_names_with_hosts_that_have_numbers(tmp_path: Path) -> None:
    for host, rank in (("gpu7-node12", 0), ("gpu7-node3", 1)):
        dump = make_dump([make_entry(number) for number in range(3 + rank)])
        (tmp_path / f"{host}_nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    (hang,) = explain_hang(tmp_path).hangs
    assert expand_ranks(hang.ranks) == (0, 1)
