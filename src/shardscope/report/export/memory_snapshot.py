"""Renders the allocations of a rank as a memory snapshot, which torch's memory_viz displays.

The file has the fields of what `torch.cuda.memory._dump_snapshot` writes: the segments of the
allocator with their blocks at the end of the step, and the step's allocations and releases.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from shardscope.record import AllocationTable, MemoryKind, Phase, Recording
from shardscope.record.text import escape_controls

_PROTOCOL = 4  # the newest that the viewer in the browser reads
_BASE = 0x7F00_0000_0000  # the model's addresses begin at 0, which no device returns
_SMALL_SEGMENT = 2 << 20

Entry = dict[str, Any]


class _Allocation(NamedTuple):
    """An allocation, with all modules that own a part of it."""

    start: int
    end: int
    address: int
    num_bytes: int
    frames: list[Entry]


def list_snapshot_ranks(recording: Recording) -> list[int]:
    """The ranks whose allocations were recorded."""
    return [profile.rank for profile in recording.memory if profile.allocations is not None]


def render_memory_snapshots(recording: Recording) -> Iterator[tuple[int, bytes]]:
    """Yield each rank whose allocations were recorded, with its pickled snapshot."""
    for profile in recording.memory:
        if profile.allocations is not None:
            snapshot = make_memory_snapshot(profile.allocations)
            yield profile.rank, pickle.dumps(snapshot, protocol=_PROTOCOL)


def make_memory_snapshot(table: AllocationTable) -> Entry:
    """Make the snapshot: segments and blocks when the step ends, and the events of the step.

    What was there when the step began has no event that allocates it, as in a snapshot of torch's.
    The innermost frame is the source line; those around it are the module, the phase that
    allocated it and the kind. Requested sizes were not recorded: they are those of blocks.
    """
    allocations = list(_join_parts(table))
    return {
        "segments": list(_list_segments(table, allocations)),
        "device_traces": [list(_list_events(table, allocations))],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _join_parts(table: AllocationTable) -> Iterator[_Allocation]:
    """Allocations in the order of their starts; parts have the same start and follow each other."""
    known_frames: dict[tuple[int, ...], list[Entry]] = {}
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for row, start in enumerate(table.start):
        rows[start].append(row)
    for start, parts in rows.items():
        first, modules = parts[0], tuple(dict.fromkeys(table.module[row] for row in parts))
        key = (table.source[first], table.phase[first], table.kind[first], *modules)
        if key not in known_frames:
            known_frames[key] = _make_frames(table, first, modules)
        yield _Allocation(
            start=start,
            end=table.end[first],
            address=_BASE + table.address[first],
            num_bytes=sum(table.num_bytes[row] for row in parts),
            frames=known_frames[key],
        )


# Plain texts: the viewer in the browser cannot read pickled classes.
_KINDS, _PHASES = [kind.value for kind in MemoryKind], [phase.value for phase in Phase]
_MAX_MODULES = 3


def _make_frames(table: AllocationTable, row: int, modules: tuple[int, ...]) -> list[Entry]:
    names = [table.modules[module] or "the model" for module in modules if module >= 0]
    if len(names) > _MAX_MODULES:
        names[_MAX_MODULES:] = [f"{len(names) - _MAX_MODULES} more"]
    source = table.sources[table.source[row]] if table.source[row] >= 0 else None
    frames = []
    if source is not None:
        frames.append(_frame(source.file, source.line, source.function))
    return [
        *frames,
        _frame("module", 0, ", ".join(names) or "no module"),
        _frame("phase", 0, _PHASES[table.phase[row]]),
        _frame("kind", 0, _KINDS[table.kind[row]]),
    ]


def _frame(filename: str, line: int, name: str) -> Entry:
    return {"filename": escape_controls(filename), "line": line, "name": escape_controls(name)}


def _list_events(table: AllocationTable, allocations: list[_Allocation]) -> Iterator[Entry]:
    events: list[tuple[int, list[Entry]]] = []
    for order, address, num_bytes in zip(
        table.segments.order, table.segments.address, table.segments.num_bytes, strict=True
    ):
        if order >= table.first_order:
            events.append((order, [_event("segment_alloc", _BASE + address, num_bytes, [])]))
    for start, end, address, num_bytes, frames in allocations:
        if start >= table.first_order:
            events.append((start, [_event("alloc", address, num_bytes, frames)]))
        if end <= table.last_order:
            actions = ("free_requested", "free_completed")
            release = [_event(action, address, num_bytes, frames) for action in actions]
            events.append((end, release))
    for _, entries in sorted(events, key=itemgetter(0)):  # stable: a segment before its block
        yield from entries


def _event(action: str, address: int, num_bytes: int, frames: list[Entry]) -> Entry:
    return {"action": action, "addr": address, "size": num_bytes, "stream": 0, "frames": frames}


def _list_segments(table: AllocationTable, allocations: list[_Allocation]) -> Iterator[Entry]:
    at_end = [allocation for allocation in allocations if allocation.end > table.last_order]
    blocks = iter(sorted(at_end, key=lambda allocation: allocation.address))
    block = next(blocks, None)
    segments = zip(table.segments.address, table.segments.num_bytes, strict=True)
    for address, size in sorted(segments):
        start = _BASE + address
        inside = []
        while block is not None and block.address < start + size:
            inside.append(block)
            block = next(blocks, None)
        in_use = sum(allocation.num_bytes for allocation in inside)
        yield {
            "device": 0,
            "address": start,
            "total_size": size,
            "allocated_size": in_use,
            "active_size": in_use,
            "requested_size": in_use,
            "stream": 0,
            "segment_type": "small" if size == _SMALL_SEGMENT else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": list(_list_blocks(start, size, inside)),
        }


def _list_blocks(start: int, size: int, inside: list[_Allocation]) -> Iterator[Entry]:
    """The blocks of a segment without gaps between them: those in use, and free ones."""
    address = start
    for allocation in inside:
        if allocation.address > address:
            yield _block("inactive", address, allocation.address - address, [])
        yield _block(
            "active_allocated", allocation.address, allocation.num_bytes, allocation.frames
        )
        address = allocation.address + allocation.num_bytes
    if address < start + size:
        yield _block("inactive", address, start + size - address, [])


def _block(state: str, address: int, size: int, frames: list[Entry]) -> Entry:
    requested = size if state == "active_allocated" else 0
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }
