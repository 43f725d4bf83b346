"""Reads what `ncclras` prints: text, verbose text and JSON, of NCCL 2.24 and newer.

RAS counts the operations that each rank of a communicator has launched. In text it lists only
ranks that differ; ranks that it does not list are level.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import final

import msgspec
from msgspec import Struct

from shardscope.hang.evidence import (
    CallColumns,
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
from shardscope.hang.evidence.names import find_kind
from shardscope.hang.readers.text_lines import split_lines
from shardscope.record.ranks import MAX_RANKS
from shardscope.record.recording import Gap

_MAX_LISTED = 2**20  # ranks of all communicators
_SECTION = re.compile(
    r"^#(?P<group>\d{1,9})-(?P<number>\d{1,9}) \((?P<hash>[0-9a-f]{1,16})\) (?P<error>[A-Z,]+)"
)
_GROUP_ROW = re.compile(
    r"^\s*(?P<group>\d{1,9})\s+(?P<comms>\d{1,9})\s+(?P<nodes>\d{1,9})\s+(?P<per_node>[\d-]+)\s+"
    r"(?P<size>\d{1,9})\s+(?P<total>\d{1,9})\s+(?P<state>[A-Z]+)\s+(?P<errors>[A-Z,]+)\s*$"
)
_DIFFERENT = re.compile(
    r"^\s+Communicator ranks have different (?:(?P<op>\w+) operation|collective operation|"
    r"(?P<status>status))"
)
_LAUNCHED = re.compile(
    r"^\s+(?P<num>\d{1,9}) ranks have launched up to operation (?P<count>\d{1,18})"
)
_NOTHING = re.compile(r"^\s+(?P<num>\d{1,9}) ranks have not launched any operations")
_STATUS = re.compile(r"^\s+(?P<num>\d{1,9}) ranks have status (?P<state>\w+)")
_RANK = re.compile(
    r"^\s+Rank (?P<member>\d{1,7})(?: has launched up to operation (?P<count>\d{1,18})"
    r"|(?P<nothing> has not launched any operations)| has status (?P<state>\w+)"
    r"| reported (?P<error>.*?))? --"
    r"(?: GPU .* managed by process (?P<pid>\d{1,9}) on node (?P<host>\S+))?"
)
_MISSING = re.compile(r"^\s+The missing ranks?: (?P<ranks>[\d, ]+)")
_PROCESS = re.compile(
    r"^\s+Process (?P<pid>\d{1,9}) on node (?P<host>\S+) managing GPUs? (?P<gpus>.*)"
)
_SUMMARY = re.compile(r"^\s*\d+\s+\d+\s+\d+\s+(?P<processes>\d{1,9})\s+(?P<gpus>\d{1,9})\s*$")
_HASH = re.compile(r"(?:0x)?[0-9a-fA-F]{1,16}")
_VERSION = re.compile(r"NCCL version (?P<version>\S+)")
_PEER_EVENT = re.compile(
    r"\[(?P<time>[\d :-]+)\] (?P<event>PEER_\w+): Process (?P<pid>\d{1,9}) on node (?P<host>\S+)"
)


def is_ras(text: str) -> bool:
    """Whether a text is what `ncclras` prints."""
    return "Job summary\n===" in text or "Communicators..." in text or "RAS Monitor Mode" in text


def read_ras(data: bytes, path: str) -> FileReport:
    """The state of each rank that RAS names, and of each communicator."""
    reader = _TextReader(path)
    for line in split_lines(data):
        reader.read(line)
    return reader.finish()


@final
class _TextReader:
    """Reads RAS's sections line by line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sizes: dict[str, tuple[int, int]] = {}  # by group of the table: size, communicators
        self._states: list[str] = []
        self._section = ""
        self._hash = ""
        self._op = ""
        self._count: int | None = None
        self._state = ""
        self._jobs: list[_Communicator] = []
        self._current: _Communicator | None = None
        self._events: list[tuple[str, int, RankEvent]] = []
        self._version = ""
        self._num_gpus: int | None = None

    def read(self, line: str) -> None:
        """Take a line in."""
        if (match := _SECTION.match(line)) is not None:
            size = self._sizes.get(match["group"], (0, 0))[0]
            self._section = match["error"]
            self._current = self._find(match["hash"], size)
            self._reset()
        elif (match := _GROUP_ROW.match(line)) is not None:
            self._sizes[match["group"]] = int(match["size"]), int(match["comms"])
            self._states.append(f"{match['state']} {match['errors']}")
        elif (match := _RANK.match(line)) is not None:
            self._read_rank(match)
        elif (match := _PROCESS.match(line)) is not None:
            self._add_process(match)
        elif (match := _PEER_EVENT.search(line)) is not None:
            kind = EventKind.DEAD if "DEAD" in match["event"] else EventKind.UNREACHABLE
            event = RankEvent(kind, f"RAS: {match['event']}", match["time"])
            self._events.append((match["host"], int(match["pid"]), event))
        elif line.startswith(("INCOMPLETE", "DEAD", "TIMEOUT")):
            self._section, self._current = line.strip(), None
        elif (match := _SUMMARY.match(line)) is not None:
            self._num_gpus = int(match["gpus"])
        elif (match := _VERSION.search(line)) is not None:
            self._version = match["version"]
        else:
            self._read_difference(line)

    def _reset(self) -> None:
        self._op, self._count, self._state = "", None, ""

    def _find(self, name: str, size: int) -> _Communicator:
        for communicator in self._jobs:
            if communicator.name == name:
                return communicator
        self._jobs.append(_Communicator(name, size))
        return self._jobs[-1]

    def _read_difference(self, line: str) -> None:
        if self._current is None:
            return
        if (match := _DIFFERENT.match(line)) is not None:
            self._reset()
            self._op = "" if match["status"] else match["op"] or "collective"
            if self._op:
                self._current.ops.setdefault(self._op, _OpCounts())
        elif (match := _LAUNCHED.match(line)) is not None and self._op:
            self._set_count(int(match["count"]), int(match["num"]))
        elif (match := _NOTHING.match(line)) is not None and self._op:
            self._set_count(0, int(match["num"]))
        elif (match := _STATUS.match(line)) is not None:
            self._state = match["state"]
        elif (match := _MISSING.match(line)) is not None:
            for number in re.findall(r"\d{1,7}", match["ranks"]):
                self._current.missing.setdefault(int(number), None)

    def _set_count(self, count: int, num_ranks: int) -> None:
        assert self._current is not None
        self._count = count
        self._current.ops[self._op].num_ranks[count] = num_ranks

    def _read_rank(self, match: re.Match[str]) -> None:
        if self._current is None:
            return
        member = int(match["member"])
        process = (match["host"], int(match["pid"])) if match["pid"] else None
        communicator = self._current
        communicator.processes[member] = process or communicator.processes.get(member)
        if self._section.startswith("INCOMPLETE"):
            communicator.missing[member] = process
        elif match["error"]:
            communicator.errors[member] = match["error"]
        elif match["state"] or self._state:
            communicator.states[member] = match["state"] or self._state
        elif self._op:
            count = 0 if match["nothing"] else int(match["count"] or self._count or 0)
            counts = communicator.ops[self._op]
            counts.by_member[member] = count
            if match["count"] or match["nothing"]:
                counts.num_ranks[count] = 1

    def _add_process(self, match: re.Match[str]) -> None:
        is_dead = self._section.startswith("DEAD")
        kind = EventKind.DEAD if is_dead else EventKind.UNREACHABLE
        what = "is considered dead by" if is_dead else "did not answer"
        text = f"process {match['pid']} on {match['host']} {what} NCCL's RAS"
        self._events.append((match["host"], int(match["pid"]), RankEvent(kind, text)))

    def finish(self) -> FileReport:
        """The report of the file."""
        ranks = _describe_ranks(self._path, self._jobs, self._events, self._version, self._num_gpus)
        states = ", ".join(dict.fromkeys(self._states))
        return FileReport(
            path=self._path,
            format=FileFormat.NCCL_RAS,
            ranks=ranks,
            detail=f"communicators are {states}" if states else "",
        )


class _OpCounts(Struct):
    """Of one kind of operation: counts by rank, and how many ranks have each count."""

    by_member: dict[int, int] = {}
    num_ranks: dict[int, int] = {}

    def find_common(self) -> int:
        """The count of ranks that are not listed one by one."""
        listed: defaultdict[int, int] = defaultdict(int)
        for count in self.by_member.values():
            listed[count] += 1
        unlisted = {
            count: num - listed[count]
            for count, num in self.num_ranks.items()
            if num > listed[count]
        }
        return max(
            unlisted, key=lambda count: unlisted[count], default=max(self.num_ranks, default=0)
        )


class _Communicator(Struct):
    """What RAS says of a communicator, by rank in it."""

    name: str
    size: int
    ops: dict[str, _OpCounts] = {}
    missing: dict[int, tuple[str, int] | None] = {}
    states: dict[int, str] = {}
    errors: dict[int, str] = {}
    processes: dict[int, tuple[str, int] | None] = {}


def _describe_ranks(
    path: str,
    communicators: list[_Communicator],
    events: list[tuple[str, int, RankEvent]],
    version: str,
    num_gpus: int | None,
) -> tuple[RankEvidence, ...]:
    """Evidence of each process that RAS names; those of one communicator by their rank in it."""
    evidence: list[RankEvidence] = []
    for communicator in communicators[:1000]:
        size = min(communicator.size, MAX_RANKS)
        if len(evidence) + size > _MAX_LISTED:
            break
        is_world = size == num_gpus
        evidence.extend(
            _describe_member(path, communicator, member, version, is_world=is_world)
            for member in range(size)
        )
    for host, pid, event in events:
        evidence.append(
            RankEvidence(path=path, format=FileFormat.NCCL_RAS, host=host, pid=pid, events=(event,))
        )
    return tuple(evidence)


def _describe_member(
    path: str, communicator: _Communicator, member: int, version: str, *, is_world: bool
) -> RankEvidence:
    counts = tuple(
        (op, op_counts.by_member.get(member, op_counts.find_common()))
        for op, op_counts in communicator.ops.items()
    )
    process = communicator.processes.get(member) or communicator.missing.get(member)
    events = []
    if member in communicator.missing:
        events.append(
            RankEvent(EventKind.UNREACHABLE, "gave NCCL's RAS no data on its communicator")
        )
    if member in communicator.errors:
        text = f"NCCL reports: {communicator.errors[member]}"
        events.append(RankEvent(EventKind.NETWORK, text))
    is_missing = member in communicator.missing
    return RankEvidence(
        path=path,
        format=FileFormat.NCCL_RAS,
        rank=member if is_world else None,
        host=process[0] if process else "",
        pid=process[1] if process else None,
        world_size=communicator.size if is_world else None,
        groups=(_make_group(communicator.name, communicator.size),),
        signatures=_make_signatures(communicator.ops),
        columns=() if is_missing or not counts else (_make_columns(counts),),
        is_complete=not is_missing,
        events=tuple(events),
        version=version,
        counts=(
            CommunicatorCount(
                normalize_hash(communicator.name),
                communicator.size,
                member,
                None if is_missing else counts,
                communicator.states.get(member, ""),
            ),
        ),
    )


def _make_group(name: str, size: int) -> GroupFact:
    identity = normalize_hash(name)
    return GroupFact(identity, f"communicator {identity}", backend="nccl", size=size)


def normalize_hash(text: str) -> str:
    """A communicator's hash as NCCL's logs write it: RAS pads it with zeros in text."""
    return f"0x{int(text.removeprefix('0x') or '0', 16):x}"


def _make_signatures(ops: dict[str, _OpCounts]) -> tuple[CallSignature, ...]:
    return tuple(CallSignature(find_kind(op), op=op) for op in ops) or (CallSignature(None),)


def _make_columns(counts: tuple[tuple[str, int], ...]) -> CallColumns:
    """Columns without calls: only how many were launched."""
    builder = ColumnBuilder(0)
    builder.num_issued = min(sum(count for _, count in counts), 2**62)
    return builder.build()


class _JsonStatus(Struct):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _JsonRank(Struct):
    rank: int
    host: str = ""
    pid: int | None = None
    status: _JsonStatus = msgspec.field(default_factory=_JsonStatus)
    collective_counts: dict[str, int] = {}


class _JsonCommunicator(Struct):
    hash: str
    size: int
    ranks: list[_JsonRank] = []
    missing_ranks: list[_JsonRank] = []


class _JsonJob(Struct):
    communicators: list[_JsonCommunicator]
    nccl_version: str = ""
    timestamp: str = ""


def read_ras_json(data: bytes, path: str) -> FileReport | None:
    """The same of the output of `ncclras -f json`; None if it is something else."""
    try:
        job = msgspec.json.decode(data, type=_JsonJob, strict=False)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    sizes = [communicator.size for communicator in job.communicators]
    largest = max(sizes, default=0)
    evidence: list[RankEvidence] = []
    gaps: list[Gap] = []
    for communicator in job.communicators:
        is_world = communicator.size == largest and sizes.count(largest) == 1
        if not _HASH.fullmatch(communicator.hash):
            continue
        name = normalize_hash(communicator.hash)
        for rank in (*communicator.ranks, *communicator.missing_ranks):
            if 0 <= rank.rank < MAX_RANKS and len(evidence) < _MAX_LISTED:
                is_missing = rank in communicator.missing_ranks
                evidence.append(
                    _describe_json(
                        path,
                        job,
                        communicator,
                        rank,
                        name,
                        is_world=is_world,
                        is_missing=is_missing,
                    )
                )
    return FileReport(
        path=path,
        format=FileFormat.NCCL_RAS,
        ranks=tuple(evidence),
        gaps=tuple(gaps),
        detail=f"of {job.timestamp}" if job.timestamp else "",
    )


def _describe_json(
    path: str,
    job: _JsonJob,
    communicator: _JsonCommunicator,
    rank: _JsonRank,
    name: str,
    *,
    is_world: bool,
    is_missing: bool,
) -> RankEvidence:
    counts = tuple(sorted((op, max(0, count)) for op, count in rank.collective_counts.items()))
    events = []
    if is_missing and rank.status.considered_dead:
        events.append(RankEvent(EventKind.DEAD, "is considered dead by NCCL's RAS", job.timestamp))
    elif is_missing:
        events.append(RankEvent(EventKind.UNREACHABLE, "did not answer NCCL's RAS", job.timestamp))
    if rank.status.async_error not in (0, 7):
        text = f"NCCL reports the asynchronous error {rank.status.async_error}"
        events.append(RankEvent(EventKind.NETWORK, text, job.timestamp))
    signatures = tuple(CallSignature(find_kind(op), op=op) for op, _ in counts)
    return RankEvidence(
        path=path,
        format=FileFormat.NCCL_RAS,
        rank=rank.rank if is_world else None,
        host=rank.host,
        pid=rank.pid,
        world_size=communicator.size if is_world else None,
        groups=(_make_group(name, communicator.size),),
        signatures=signatures or (CallSignature(None),),
        columns=() if is_missing or not counts else (_make_columns(counts),),
        is_complete=not is_missing,
        events=tuple(events),
        version=job.nccl_version,
        counts=(
            CommunicatorCount(
                name,
                communicator.size,
                rank.rank,
                None if is_missing else counts,
                "ABORT" if rank.status.abort_flag else "",
            ),
        ),
    )
