"""Files that look like recordings and are not: mutations of real ones, and what reads them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType

import sample_recordings as samples
from shardscope.comm.findings import review
from shardscope.compile.explain.compare import review_explanations
from shardscope.contract.record import record_contract
from shardscope.record import (
    CollectiveKind,
    Recording,
    SpanBegin,
    Stop,
    encode,
    load,
    merge_files,
)
from shardscope.record.stream_lines import StreamHeader
from shardscope.report.compare.changes_markdown import encode_changes, render_changes_markdown
from shardscope.report.compare.changes_text import render_changes
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.export.chakra import render_chakra, render_chakra_groups
from shardscope.report.export.csv import TABLES, render_table
from shardscope.report.export.markdown import render_markdown
from shardscope.report.export.memory_snapshot import render_memory_snapshots
from shardscope.report.export.perfetto import render_perfetto_chunks
from shardscope.report.export.tensorboard import render_tensorboard
from shardscope.report.html.html import render_html
from shardscope.report.text.summary import render_plain, render_summary
from shardscope.report.text.views import render_views
from shardscope.report.tui.browser_state import BrowserState

__all__ = ["READERS", "make_file", "make_seeds"]

_NUMBERS = (0, 1, 2, 7, 255, 10_000, 2**20 - 1, 2**31, 2**53, 2**63 - 1)
_ODD_NUMBERS = (-1, 2**63, 10**40, 0.5, 1e308)
_TEXTS = (
    "",
    ".",
    "a." * 3_000,
    "x" * 20_000,
    "\x1b[2J\u202e::error::x",
    "::error file=x::y",
    "##[error]x",
    "</script>",
    "=1+1",
    "\ud800",
    "Shard(99999999)",
    "Shard(-1)",
    "[" * 500,
    "layers.0",
    "world",
)
_SPANS = ([[0, 2**20, 1]], [[0, 16_000, 1]], [[2**20 - 1, 2**20, 2**20]], [[0]] * 2_000, [])


def make_seeds() -> list[bytes]:
    """Recordings of every instrument, and streams, as the bytes of files."""
    recordings = [
        samples.make_varied(),
        samples.make_llama(num_layers=2, dp=2, ranks=tuple(range(8))),
        samples.make_phases(),
        samples.make_holdings(),
        samples.make_parallel(),
        samples.make_explained(),
        samples.make_diagnosed(),
        _make_hung(),
    ]
    streams = [_as_stream(recordings[0]), _as_stream(recordings[2])]
    return [_trim(data) for data in (*map(encode, recordings), *streams)]


def _make_hung() -> Recording:
    """Ranks that were killed while they waited for each other."""
    calls = [
        samples.make_collective(rank=rank, order=order, group_order=order, **facts)
        for rank in range(3)
        for order, facts in enumerate(
            ({}, {"kind": CollectiveKind.RECV, "peer": (rank + 1) % 3, "start_ns": 5})
        )
    ]
    begin = SpanBegin(rank=0, name="load", start_ns=9)
    stops = (
        Stop(rank=0, open_spans=(begin,), is_gapless=True),
        Stop(rank=1, is_gapless=True),
        Stop(rank=2, error="ValueError: x"),
    )
    return samples.make_recording(tuple(calls), world_size=4, stops=stops)


def _trim(data: bytes) -> bytes:
    """A file of a few kilobytes that has everything, for work is measured by what a byte costs."""
    lines = [json.dumps(_trim_value(json.loads(line))).encode() for line in data.splitlines()[:40]]
    return b"\n".join(lines) + b"\n"


def _trim_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _trim_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_trim_value(item) for item in value[:3]]
    return value[:40] if isinstance(value, str) else value


def _as_stream(recording: Recording) -> bytes:
    lines: list[Any] = [StreamHeader(run=recording.run)]
    for key in ("group", "module", "collective", "finding", "gap", "span"):
        lines += [{key: record} for record in getattr(recording, f"{key}s")]
    num_records = len(lines) - 1
    lines += [{"begin": {"rank": 0, "name": "step", "start_ns": 1}}]
    lines += [{"end": {"num_records": num_records}}]
    return b"\n".join(map(msgspec.json.encode, lines)) + b"\n"


def make_file(rng: random.Random, seeds: list[bytes]) -> bytes:
    """One mutated file."""
    data = rng.choice(seeds)
    if rng.random() < 0.75:
        data = _mutate_values(rng, data)
    if rng.random() < 0.15:
        data = _mutate_bytes(rng, data)
    if rng.random() < 0.1:
        data = gzip.compress(data)
        if rng.random() < 0.5:
            data = _mutate_bytes(rng, data)
    return data


def _mutate_values(rng: random.Random, data: bytes) -> bytes:
    """Change what the file says, and leave it JSON."""
    lines = data.splitlines()
    index = rng.randrange(len(lines))
    document = json.loads(lines[index])
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        _mutate_once(rng, document)
    lines[index] = json.dumps(document).encode()
    return b"\n".join(lines) + b"\n"


def _mutate_once(rng: random.Random, document: Any) -> None:
    path = []
    node = document
    while isinstance(node, dict | list) and node:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        path.append((node, rng.choice(keys)))
        node = node[path[-1][1]]
        if rng.random() < 0.15:
            break
    if not path:
        return
    parent, key = path[-1]
    value = parent[key]
    choice = rng.random()
    if choice < 0.1 and isinstance(parent, dict):
        del parent[key]
    elif choice < 0.2 and isinstance(parent, list):
        parent.extend([value] * rng.choice((1, 10, 300, 2_000)))
    elif choice < 0.3:
        other, other_key = rng.choice(path)
        parent[key] = json.loads(json.dumps(other[other_key]))  # nested in itself
    elif key == "ranks":
        parent[key] = rng.choice(_SPANS)
    elif isinstance(value, str):
        parent[key] = rng.choice(_TEXTS)
    elif isinstance(value, int | float):
        parent[key] = rng.choice(_NUMBERS if rng.random() < 0.9 else _ODD_NUMBERS)
    else:
        parent[key] = rng.choice((None, [], [], {}, rng.choice(_NUMBERS), rng.choice(_TEXTS)))


def _mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 10))):
        at = rng.randrange(len(changed)) if changed else 0
        choice = rng.randrange(6)
        if choice == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif choice == 1:
            del changed[at:]
        elif choice == 2:
            del changed[at : at + rng.randrange(1, 200)]
        elif choice == 3:
            changed[at:at] = changed[at : at + rng.randrange(1, 2_000)]
        elif choice == 4:
            changed[at:at] = rng.choice((b"[", b"{", b'"', b"\n", b"\x00", b"9" * 30)) * 50
        else:
            changed[at:at] = rng.choice((b"\xff\xfe", "\u202e".encode(), b"\x1b[31m"))
    return bytes(changed)


def _print(thing: RenderableType) -> str:
    return render_plain(thing, width=80)


def _join(pieces: Iterator[bytes] | bytes) -> bytes:
    return pieces if isinstance(pieces, bytes) else b"".join(pieces)


def _compare(recording: Recording) -> None:
    changes = compare(recording, samples.make_varied(), titles=("a", "b"), is_folded=True)
    _print(render_changes(changes))
    render_changes_markdown(changes)
    encode_changes(changes)


def _walk(recording: Recording) -> None:
    walk = BrowserState(recording)
    walk.fold()
    walk.search("layers")
    walk.list_calls()


READERS: dict[str, Callable[[Recording], object]] = {
    "show": lambda recording: _print(render_summary(recording, is_folded=False)),
    "views": lambda recording: _print(
        render_views(
            recording,
            ["overview", "modules", "communication", "sharding", "coverage", "memory", "compiler"],
            by="module",
            is_folded=True,
            full_recording=recording,
        )
    ),
    "report": render_html,
    "markdown": render_markdown,
    "perfetto": lambda recording: _join(render_perfetto_chunks(recording)),
    "tensorboard": lambda recording: _join(render_tensorboard(recording, step=0)),
    "chakra": lambda recording: (
        [_join(trace) for _, trace in render_chakra(recording)],
        _join(render_chakra_groups(recording)),
    ),
    "memory-snapshot": lambda recording: list(render_memory_snapshots(recording)),
    **{
        f"{table} as csv": lambda recording, table=table: _join(render_table(recording, name=table))
        for table in TABLES
    },
    "diff": _compare,
    "contract": lambda recording: record_contract(recording),
    "tui": _walk,
    "json": encode,
}
"""Everything that is done with a recording, given one with its findings."""


def read(path: Path, other: Path) -> dict[str, Callable[[], object]]:
    """What is to be done with a file, step by step; the first raises if it is not a recording."""
    found: list[Recording] = []

    def read_once() -> None:
        found.append(review_explanations(review(load(path))))

    steps: dict[str, Callable[[], object]] = {"load": read_once}
    steps |= {name: lambda reader=reader: reader(found[0]) for name, reader in READERS.items()}
    steps["merge"] = lambda: review(merge_files([path, other]))
    return steps
