"""A recording as Chakra execution traces, one per rank: a `GlobalMetadata`, then `Node` messages.

Each message is preceded by its length, as the feeders of Chakra and ASTRA-sim expect. A recording
has the participants, sizes and order of collectives, but no durations, computation or tensors;
those fields stay empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from shardscope.record import (
    Collective,
    CollectiveKind,
    Recording,
    Source,
    escape_controls,
    expand_ranks,
    format_ranks,
)
from shardscope.record.encoding import encode_json
from shardscope.report.export.csv import describe_cause
from shardscope.report.export.protobuf import (
    encode_varint,
    make_bytes,
    make_packed,
    make_text,
    make_varint,
)
from shardscope.report.model.clocks import has_clock

_SCHEMA = "0.0.4"
_NODE_TYPES = {CollectiveKind.SEND: 5, CollectiveKind.RECV: 6}
_COLLECTIVE = 7
_COLLECTIVE_TYPES = {
    CollectiveKind.ALL_REDUCE: 0,
    CollectiveKind.REDUCE: 1,
    CollectiveKind.ALL_GATHER: 2,
    CollectiveKind.GATHER: 3,
    CollectiveKind.SCATTER: 4,
    CollectiveKind.BROADCAST: 5,
    CollectiveKind.ALL_TO_ALL: 6,
    CollectiveKind.REDUCE_SCATTER: 7,
    CollectiveKind.BARRIER: 9,
}
# Field numbers of an attribute's value, by its type.
_INT32, _INT64, _BOOL, _STRING = 7, 9, 27, 29


def list_chakra_ranks(recording: Recording) -> list[int]:
    """List the recorded ranks, including those that issued no collectives."""
    speakers = {call.rank for call in recording.collectives}
    return sorted(speakers.union(expand_ranks(recording.run.ranks)))


def render_chakra(recording: Recording) -> Iterator[tuple[int, bytes]]:
    """Yield each recorded rank with its trace."""
    groups = _number_groups(recording)
    is_timed = has_clock(recording)
    calls: dict[int, list[Collective]] = defaultdict(list)
    for call in recording.collectives:
        calls[call.rank].append(call)
    for rank in list_chakra_ranks(recording):
        yield rank, b"".join(_render_rank(recording, rank, calls[rank], groups, is_timed=is_timed))


def render_chakra_groups(recording: Recording) -> bytes:
    """Render groups and their ranks for ASTRA-sim's `--comm-group-configuration`."""
    numbers = _number_groups(recording)
    ranks = {
        str(numbers[group.name]): expand_ranks(group.ranks)
        for group in recording.groups
        if numbers[group.name]
    }
    return encode_json(ranks) + b"\n"


def _number_groups(recording: Recording) -> dict[str, int]:
    """Number the groups, the same in all traces; feeders expect 0 for a group of all ranks."""
    worlds = {
        group.name for group in recording.groups if group.num_ranks == recording.run.world_size
    }
    names = [group.name for group in recording.groups]
    names += [call.group for call in recording.collectives]  # a damaged recording may lack a group
    smaller_groups = dict.fromkeys(name for name in names if name not in worlds)
    return dict.fromkeys(worlds, 0) | {
        name: number for number, name in enumerate(smaller_groups, start=1)
    }


def _render_rank(
    recording: Recording,
    rank: int,
    calls: list[Collective],
    groups: dict[str, int],
    *,
    is_timed: bool,
) -> Iterator[bytes]:
    yield _delimit(_make_metadata(recording, rank))
    last: dict[Hashable, int] = {}
    for number, call in enumerate(sorted(calls, key=lambda call: call.order), start=1):
        lane = _lane(call)
        group = groups[call.group]
        yield _delimit(_make_node(call, number, last.get(lane), group, is_timed=is_timed))
        last[lane] = number


def _lane(call: Collective) -> Hashable:
    """Key of calls that run in sequence: those of a group, or messages from one rank to another.

    Between groups only the order of issue is known; they may overlap.
    """
    is_message = call.kind in _NODE_TYPES
    return (call.group, call.kind, call.peer) if is_message else call.group


def _make_metadata(recording: Recording, rank: int) -> bytes:
    run = recording.run
    facts = {
        "producer": f"shardscope {run.shardscope_version}",
        "torch_version": run.torch_version,
        "ranks": format_ranks(run.ranks),
        "world": "simulated" if run.is_simulated else "real",
    }
    numbers = {"rank": rank, "world_size": run.world_size}
    attributes = [_text(name, text) for name, text in facts.items()]
    attributes += [_number(name, value) for name, value in numbers.items()]
    return make_text(1, _SCHEMA) + b"".join(make_bytes(2, attribute) for attribute in attributes)


def _make_node(
    call: Collective, number: int, after: int | None, group: int, *, is_timed: bool
) -> bytes:
    start_ns = call.start_ns if is_timed else None
    fields = [
        make_varint(1, number),
        make_text(2, escape_controls(f"{call.kind} {call.owner}" if call.owner else call.kind)),
        make_varint(3, _NODE_TYPES.get(call.kind, _COLLECTIVE)),
        b"" if after is None else make_packed(5, [after]),
        b"" if start_ns is None else make_varint(6, start_ns // 1000),
    ]
    attributes = (*_describe_traffic(call, group), *_describe_origin(call))
    return b"".join(fields) + b"".join(make_bytes(10, attribute) for attribute in attributes)


def _describe_traffic(call: Collective, group: int) -> Iterator[bytes]:
    """Yield the attributes that feeders read."""
    yield _flag("is_cpu_op", value=False)
    yield _number("comm_size", call.input_bytes)
    yield _text("pg_name", str(group))
    if call.kind not in _NODE_TYPES:
        yield _number("comm_type", _COLLECTIVE_TYPES[call.kind])
        return
    yield _short("comm_tag", 0)  # tags are not recorded
    if call.peer is not None:
        is_send = call.kind is CollectiveKind.SEND
        yield _short("comm_src", call.rank if is_send else call.peer)
        yield _short("comm_dst", call.peer if is_send else call.rank)


def _describe_origin(call: Collective) -> Iterator[bytes]:
    """Yield the attributes for people: module, cause and source."""
    texts = {
        "group": call.group,
        "axis": call.axis,
        "phase": str(call.phase),
        "module": call.owner,
        "op": call.op,
        "dtype": call.dtype,
        "cause": describe_cause(call),
        "source": None if call.source is None else _format_location(call.source),
    }
    yield from (_text(name, text) for name, text in texts.items() if text is not None)
    yield _number("output_bytes", call.output_bytes)
    yield _number("wire_bytes", call.wire_bytes)


def _format_location(source: Source) -> str:
    return f"{source.file}:{source.line}"


def _text(name: str, value: str) -> bytes:
    return make_text(1, name) + make_text(_STRING, escape_controls(value))


def _number(name: str, value: int) -> bytes:
    return make_text(1, name) + make_varint(_INT64, value)


def _short(name: str, value: int) -> bytes:
    return make_text(1, name) + make_varint(_INT32, value)


def _flag(name: str, *, value: bool) -> bytes:
    return make_text(1, name) + make_varint(_BOOL, int(value))


def _delimit(message: bytes) -> bytes:
    return encode_varint(len(message)) + message
