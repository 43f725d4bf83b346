"""Reads NCCL's logs (NCCL_DEBUG=INFO with the subsystem COLL, or TRACE): communicators and calls.

A line names its host, process and thread, so lines of several ranks may be interleaved. The rank in
a communicator is that in the world where the communicator has all ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import final

from msgspec import Struct

from shardscope.hang.evidence import (
    CallSignature,
    ColumnBuilder,
    CommunicatorCount,
    EventKind,
    FileFormat,
    FileReport,
    GroupFact,
    RankEvent,
    RankEvidence,
)
from shardscope.hang.evidence.failures import classify_error
from shardscope.hang.evidence.names import find_kind, find_nccl_dtype, find_nccl_reduction
from shardscope.hang.readers.text_lines import LineRank, split_lines
from shardscope.record.base import CollectiveKind
from shardscope.record.text import excerpt

_MAX_EVENTS = 200  # of a process
_LINE = re.compile(
    r"(?P<host>[\w.\-]{1,255}):(?P<pid>\d{1,9}):(?P<thread>\d{1,9}) (?:\[(?P<device>\d{1,4})\] )?"
    r"(?:[\d.]+ )?(?:(?P<place>\S+:\d+)(?: \(\w+\))? )?"
    r"NCCL (?P<level>INFO|WARN|TRACE|CALL) (?P<text>.*)"
)
_COMMUNICATOR = re.compile(
    r"comm (?P<comm>0x[0-9a-f]{1,16}) rank (?P<member>\d{1,7}) n[Rr]anks (?P<size>\d{1,7})"
    r"(?P<rest>.*)"
)
_COMM_ID = re.compile(r"commId (?P<id>0x[0-9a-f]{1,16})")
_PARENT = re.compile(
    r"parent (?P<parent>0x[0-9a-f]{1,16}) splitCount (?P<count>\d{1,9}) color (?P<color>-?\d{1,10})"
)
_CALL = re.compile(
    r"^(?P<op>\w+): opCount (?P<number>[0-9a-f]{1,16}) sendbuff \S+ recvbuff \S+ count "
    r"(?P<count>\d{1,18}) datatype (?P<dtype>\d{1,3}) op (?P<reduction>\d{1,9}) root "
    r"(?P<root>-?\d{1,9}) comm (?P<comm>0x[0-9a-f]{1,16}) \[nranks=(?P<size>\d{1,7})\]"
)
_DESTROYED = re.compile(
    r"comm (?P<comm>0x[0-9a-f]{1,16}) rank \d+ .*(?P<what>Destroy|Abort) COMPLETE"
)
_VERSION = re.compile(r"NCCL version (?P<version>[\d.]+)")
_TRANSFERS = (CollectiveKind.SEND, CollectiveKind.RECV)
_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE, CollectiveKind.REDUCE_SCATTER)
_ROOTED = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE, *_TRANSFERS)


def is_nccl_log(text: str) -> bool:
    """Whether a text has lines of NCCL's log."""
    return " NCCL INFO " in text or " NCCL TRACE " in text or " NCCL CALL " in text


def read_nccl_log(data: bytes, path: str) -> FileReport:
    """The communicators and calls of each process of a log."""
    lines = split_lines(data)
    line_rank = LineRank(lines)
    processes: dict[tuple[str, int], _Process] = {}
    version = ""
    for number, full_line in enumerate(lines, 1):
        if "NCCL " not in full_line:
            continue
        rank, _, line = line_rank.strip(full_line)
        match = _LINE.search(line)
        if match is None:
            found = _VERSION.search(line)
            version = found["version"] if found is not None else version
            continue
        key = match["host"], int(match["pid"])
        process = processes.setdefault(key, _Process(path, *key))
        process.rank = rank if rank is not None else process.rank
        process.read(match["text"], number, is_warning=match["level"] == "WARN")
    ranks = tuple(process.describe(version) for process in processes.values())
    num_calls = sum(len(columns) for evidence in ranks for columns in evidence.columns)
    detail = "" if num_calls else "lists no calls: NCCL_DEBUG_SUBSYS=INIT,COLL makes it list them"
    return FileReport(path=path, format=FileFormat.NCCL_LOG, ranks=ranks, detail=detail)


class _Communicator(Struct):
    """A communicator of a process, by its address there."""

    name: str
    member: int
    size: int
    group: int
    is_ready: bool = False


@final
class _Process:
    """What one process logged."""

    def __init__(self, path: str, host: str, pid: int) -> None:
        self._path, self._host, self._pid = path, host, pid
        self.rank: int | None = None
        self._communicators: dict[str, _Communicator] = {}
        self._groups: list[GroupFact] = []
        self._builders: list[ColumnBuilder] = []
        self._signatures: list[CallSignature] = []
        self._signature_ids: dict[tuple[str, ...], int] = {}
        self._last: dict[str, tuple[int, int]] = {}
        self._num_calls = 0
        self._events: list[RankEvent] = []
        self._transfers: defaultdict[str, int] = defaultdict(int)

    def read(self, text: str, number: int, *, is_warning: bool) -> None:
        """Take a line in."""
        if is_warning:
            self._read_warning(text, number)
        elif (call := _CALL.match(text)) is not None:
            self._add_call(call)
        elif "rank " in text and (found := _COMMUNICATOR.search(text)) is not None:
            self._add_communicator(found, is_ready="Init COMPLETE" in text)

    def _read_warning(self, text: str, number: int) -> None:
        kind = classify_error(text)
        if kind is not EventKind.EXCEPTION and len(self._events) < _MAX_EVENTS:
            self._events.append(RankEvent(kind, f"NCCL: {excerpt(text)}", "", number))

    def _add_communicator(self, match: re.Match[str], *, is_ready: bool) -> None:
        """A communicator whose creation begins or ends; others have the id in their lines."""
        if "Init " not in match["rest"] and "Init " not in match.string:
            return
        member, size = int(match["member"]), int(match["size"])
        known = self._communicators.get(match["comm"])
        if known is not None and (known.member, known.size) == (member, size):
            known.is_ready = known.is_ready or is_ready
            return
        identity, parent = _COMM_ID.search(match["rest"]), _PARENT.search(match["rest"])
        if identity is not None:
            name = identity["id"]
        elif parent is not None:
            origin = self._communicators.get(parent["parent"])
            base = origin.name if origin is not None else "unknown"
            name = f"{base}:{parent['count']}:{parent['color']}"
        else:
            return
        self._groups.append(
            GroupFact(name, f"communicator {name}", None, backend="nccl", size=size)
        )
        self._builders.append(ColumnBuilder(len(self._groups) - 1))
        group = len(self._groups) - 1
        self._communicators[match["comm"]] = _Communicator(name, member, size, group, is_ready)

    def _add_call(self, match: re.Match[str]) -> None:
        communicator = self._communicators.get(match["comm"])
        if communicator is None:
            return  # the log begins after the communicator was made, so its peers are not known
        kind = find_kind(match["op"])
        key = match.group("op", "count", "dtype", "reduction", "root", "comm")
        signature = self._signature_ids.get(key)
        if signature is None:
            signature = self._signature_ids[key] = len(self._signatures)
            self._signatures.append(_make_signature(match, kind, communicator))
        builder = self._builders[communicator.group]
        self._num_calls += 1
        if kind in _TRANSFERS:
            builder.add_transfer(self._num_calls, signature, 0, 0, (0, 0, 0, 0))
            return
        # Calls that were issued together share NCCL's count, which rises by 1 for all of them.
        number = int(match["number"], 16)
        last, offset = self._last.get(match["comm"], (-1, 0))
        position = max(last + 1, number + offset)
        self._last[match["comm"]] = position, position - number
        if position < 2**40:
            builder.add(position, self._num_calls, signature)

    def describe(self, version: str) -> RankEvidence:
        """The evidence of the process."""
        largest = max(self._communicators.values(), key=lambda comm: comm.size, default=None)
        unready = [comm for comm in self._communicators.values() if not comm.is_ready]
        events = list(self._events)
        for communicator in unready[:3]:
            text = (
                f"communicator {communicator.name} of {communicator.size} ranks was not complete: "
                "NCCL still initialized it"
            )
            events.append(RankEvent(EventKind.TIMEOUT, text))
        return RankEvidence(
            path=self._path,
            format=FileFormat.NCCL_LOG,
            rank=self.rank,
            host=self._host,
            pid=self._pid,
            groups=tuple(
                GroupFact(fact.name, fact.description, fact.ranks, backend="nccl", size=fact.size)
                for fact in self._groups
            ),
            signatures=tuple(self._signatures),
            columns=tuple(builder.build() for builder in self._builders),
            counts=tuple(_count(communicator) for communicator in self._communicators.values()),
            world_size=None if largest is None else largest.size,
            events=tuple(events),
            version=version,
        )


def _count(communicator: _Communicator) -> CommunicatorCount:
    return CommunicatorCount(communicator.name, communicator.size, communicator.member)


def _make_signature(
    match: re.Match[str], kind: CollectiveKind | None, communicator: _Communicator
) -> CallSignature:
    """NCCL counts elements: of the output for a reduce-scatter, of the input for an all-gather."""
    dtype, item_bytes = find_nccl_dtype(int(match["dtype"]))
    count = int(match["count"])
    sent = received = None if item_bytes is None else min(count * item_bytes, 2**62)
    if sent is not None and received is not None:
        if kind is CollectiveKind.ALL_GATHER:
            received = min(sent * communicator.size, 2**62)
        elif kind is CollectiveKind.REDUCE_SCATTER:
            sent = min(received * communicator.size, 2**62)
    return CallSignature(
        kind=kind,
        op=match["op"],
        dtype=dtype,
        input_bytes=sent,
        output_bytes=received,
        reduce_op=find_nccl_reduction(int(match["reduction"])) if kind in _REDUCING else None,
        peer=max(0, int(match["root"])) if kind in _ROOTED else None,
        is_rooted=True,
    )
