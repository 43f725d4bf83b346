"""Reads logs of training runs: watchdog messages, tracebacks, and what torchrun and Slurm report.

Lines of several ranks may be interleaved, as torchrun and srun print them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import final

from msgspec import Struct

from shardscope.hang.evidence import (
    CallSignature,
    CallState,
    ColumnBuilder,
    EventKind,
    FileFormat,
    FileReport,
    Frame,
    GroupFact,
    RankEvent,
    RankEvidence,
    ThreadStack,
)
from shardscope.hang.evidence.failures import classify_error
from shardscope.hang.evidence.names import find_kind
from shardscope.hang.readers.stack_dumps import (
    is_traceback,
    parse_fault_stacks,
    parse_spy_stacks,
    parse_traceback,
)
from shardscope.hang.readers.text_lines import LineRank, split_lines
from shardscope.record.text import excerpt

_MAX_EVENTS = 2_000  # of a rank
_NO_WORK = 2**31
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?|\[?[VIWEF]\d{3,4} \d\d:\d\d:\d\d\.\d+"
)
_WATCHDOG = re.compile(
    r"\[Rank (?P<member>\d{1,7})\]\s+Watchdog caught collective operation timeout: WorkNCCL\("
    r"SeqNum=(?P<number>\d{1,12}), OpType=(?P<op>\w+)(?:, NumelIn=(?P<input>\d{1,15}), "
    r"NumelOut=(?P<output>\d{1,15}))?"
)
_STATUS = re.compile(
    r"\[PG (?:ID )?(?P<id>\w+)(?: PG GUID (?P<name>[^\s()\]]+)(?:\((?P<desc>[^)]*)\))?)?"
    r" Rank (?P<member>\d{1,7})\]"
)
_WORK = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,12})(?:, last started (?:NCCL )?work: "
    r"-?\d{1,12})?, last completed (?:NCCL )?work: (?P<completed>-?\d{1,12})",
    re.IGNORECASE,
)
_AT_WORK = re.compile(r"at (?:NCCL )?work(?: sequence id)?: (?P<number>\d{1,12})")
_FAILED = re.compile(
    r"failed \(exitcode: (?P<code>-?\d{1,5})\) local_rank: (?P<local>\d{1,6}) "
    r"\(pid: (?P<pid>\d{1,9})\)"
)
_FAILURE_FIELD = re.compile(r"^\s+(?P<field>time|host|rank|exitcode|traceback)\s+: (?P<value>.*)$")
_FAILURE_RANK = re.compile(r"(?P<rank>\d{1,7}) \(local_rank: (?P<local>\d{1,6})\)")
_FAILURE_EXIT = re.compile(r"(?P<code>-?\d{1,5}) \(pid: (?P<pid>\d{1,9})\)")
_CLOSING = re.compile(r"Sending process (?P<pid>\d{1,9}) closing signal (?P<signal>SIG\w+)")
_SRUN = re.compile(
    r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,-]+): (?P<what>Killed|Terminated|"
    r"Out Of Memory|Segmentation fault|Aborted|Exited with exit code \d+|.*signal.*)"
)
_KERNEL = re.compile(
    r"(?:Out of memory: Killed process|oom-kill:|oom_reaper: reaped process|NVRM: Xid).*"
)
_KERNEL_PID = re.compile(r"(?:process|pid=|task=\S+,pid=)\s*(?P<pid>\d{1,9})")
_BARRIER = re.compile(r"Ranks? (?P<ranks>[\d, ]{1,4000}?)(?: |, )failed to pass monitoredBarrier")
_SIGNALS = {6: "SIGABRT", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM", 7: "SIGBUS", 19: "SIGSTOP"}
_FATAL = re.compile(r"^(?:Fatal Python error: .*|terminate called after .*|Segmentation fault.*)")
_NETWORK_WARNING = re.compile(r"NCCL WARN (?P<text>.*)")


def read_log(data: bytes, path: str) -> FileReport:
    """Events, stacks and the progress of NCCL's groups by rank, of a log."""
    lines = split_lines(data)
    reader = _LogReader(path, LineRank(lines))
    reader.read(lines)
    return FileReport(path=path, format=FileFormat.LOG, ranks=reader.finish())


class _Failure(Struct):
    """A block of torchrun's report."""

    is_root: bool
    fields: dict[str, str]


class _Progress(Struct):
    """What a rank's watchdog says of a group."""

    description: str = ""
    enqueued: int = -1
    completed: int = -1
    stuck: int = -1


@final
class _LogReader:
    """Sorts what a log says by rank; rank None stands for the rank that the file is of."""

    def __init__(self, path: str, line_rank: LineRank) -> None:
        self._path = path
        self._line_rank = line_rank
        self._events: defaultdict[int | None, list[RankEvent]] = defaultdict(list)
        self._lines: defaultdict[int | None, list[str]] = defaultdict(list)
        self._numbers: defaultdict[int | None, list[int]] = defaultdict(list)
        self._progress: dict[int | None, dict[str, _Progress]] = defaultdict(dict)
        self._stuck: dict[int | None, dict[int, CallSignature]] = defaultdict(dict)
        self._failures: list[_Failure] = []
        self._is_root = False
        self._pids: dict[int, int] = {}  # rank by process
        self._hosts: dict[int, str] = {}
        self._local: dict[int, int | None] = {}  # rank by local rank
        self._by_pid: list[tuple[int, RankEvent]] = []

    def read(self, lines: list[str]) -> None:
        """Sort all lines."""
        for number, full_line in enumerate(lines, 1):
            rank, local_rank, line = self._line_rank.strip(full_line)
            if rank is None and local_rank is not None:
                rank = self._local.setdefault(local_rank, None)
            self._lines[rank].append(line)
            self._numbers[rank].append(number)
            self._read_line(rank, line, number)
        for rank, own_lines in self._lines.items():
            self._find_tracebacks(rank, own_lines)

    def _read_line(self, rank: int | None, line: str, number: int) -> None:
        if "work" in line or "Watchdog" in line:
            self._read_watchdog(rank, line, number)
        elif "failed (exitcode" in line and (match := _FAILED.search(line)) is not None:
            text = (
                f"process {match['pid']} (local rank {match['local']}) {name_exit(match['code'])}"
            )
            event = RankEvent(_kind_of_exit(match["code"]), text, find_time(line), number)
            self._by_pid.append((int(match["pid"]), event))
        elif "closing signal" in line and (match := _CLOSING.search(line)) is not None:
            text = f"torchrun sent it {match['signal']}"
            event = RankEvent(EventKind.INTERRUPTED, text, find_time(line), number)
            self._by_pid.append((int(match["pid"]), event))
        elif line.startswith("srun: ") and (match := _SRUN.search(line)) is not None:
            for task in read_ranges(match["ranks"]):
                self._hosts[task] = match["host"]
                kind = classify_error(match["what"])
                is_exit = kind is EventKind.EXCEPTION
                self._add(task, EventKind.SIGNAL if is_exit else kind, match["what"], number)
        elif "monitoredBarrier" in line and (match := _BARRIER.search(line)) is not None:
            for missing in read_ranges(match["ranks"]):
                self._add(missing, EventKind.UNREACHABLE, "did not reach monitored_barrier", number)
        elif "NCCL WARN" in line and (match := _NETWORK_WARNING.search(line)) is not None:
            kind = classify_error(match["text"])
            if kind in (EventKind.NETWORK, EventKind.CONNECTION, EventKind.GPU):
                self._add(rank, kind, excerpt(match["text"]), number, line)
        elif _FATAL.match(line):
            self._add(rank, EventKind.SIGNAL, excerpt(line), number)
        elif ("emory" in line or "Xid" in line or "oom" in line) and (
            match := _KERNEL.search(line)
        ):
            pid = _KERNEL_PID.search(match[0])
            event = RankEvent(classify_error(match[0]), excerpt(match[0]), find_time(line), number)
            if pid is not None:
                self._by_pid.append((int(pid["pid"]), event))
            else:
                self._events[rank].append(event)
        else:
            self._read_failure(line)

    def _add(
        self, rank: int | None, kind: EventKind, text: str, number: int, line: str = ""
    ) -> None:
        if len(self._events[rank]) < _MAX_EVENTS:
            self._events[rank].append(RankEvent(kind, text, find_time(line), number))

    def _read_watchdog(self, rank: int | None, line: str, number: int) -> None:
        watchdog = _WATCHDOG.search(line)
        if watchdog is not None:
            rank = int(watchdog["member"]) if rank is None and not self._is_own_file() else rank
            self._stuck[rank][int(watchdog["number"])] = _make_signature(watchdog)
            text = (
                f"waited in {watchdog['op']} with number {watchdog['number']} of its group until "
                "NCCL's watchdog gave up"
            )
            self._add(rank, EventKind.TIMEOUT, text, number, line)
        status, work = _STATUS.search(line), _WORK.search(line)
        if status is None or work is None:
            return
        name = status["name"] or status["id"]
        progress = self._progress[rank].setdefault(name, _Progress())
        progress.description = status["desc"] or progress.description
        progress.enqueued = max(progress.enqueued, int(work["enqueued"]))
        progress.completed = max(progress.completed, int(work["completed"]))
        at_work = _AT_WORK.search(line)
        if at_work is not None:
            progress.stuck = int(at_work["number"])

    def _is_own_file(self) -> bool:
        """Whether lines without a mark are of the rank that the file is of."""
        return len(self._lines) <= 1

    def _read_failure(self, line: str) -> None:
        if line.startswith("Root Cause (first observed failure)"):
            self._is_root = True
        elif line.startswith("Failures:"):
            self._is_root = False
        elif (match := _FAILURE_FIELD.match(line)) is not None:
            if match["field"] == "time":
                self._failures.append(_Failure(self._is_root, {}))
            if self._failures:
                self._failures[-1].fields[match["field"]] = match["value"].strip()

    def _find_tracebacks(self, rank: int | None, lines: list[str]) -> None:
        index = 0
        numbers = self._numbers[rank]
        while index < len(lines):
            if is_traceback(lines[index]):
                frames, error, end = parse_traceback(lines, index)
                if error and "ChildFailedError" not in error and "SignalException" not in error:
                    kind = classify_error(error)
                    event = RankEvent(kind, excerpt(error), "", numbers[index], frames)
                    self._events[rank].append(event)
                index = max(end, index + 1)
            else:
                index += 1

    def finish(self) -> tuple[RankEvidence, ...]:
        """The evidence of each rank that the log says something of."""
        self._sort_failures()
        for pid, event in self._by_pid:
            rank = self._pids.get(pid)
            if rank is not None and not any(_same(event, known) for known in self._events[rank]):
                self._events[rank].append(event)
        ranks = {*self._lines, *self._events, *self._progress}
        pids = {rank: pid for pid, rank in self._pids.items()}
        evidence = []
        for rank in sorted(ranks, key=lambda rank: -1 if rank is None else rank):
            stacks = self._find_stacks(rank)
            events = sorted(self._events[rank], key=lambda event: event.line)[:_MAX_EVENTS]
            if rank is None and not (events or stacks or self._progress.get(None)):
                continue
            evidence.append(
                self._describe_rank(rank, events, stacks, None if rank is None else pids.get(rank))
            )
        return tuple(evidence)

    def _find_stacks(self, rank: int | None) -> tuple[ThreadStack, ...]:
        lines = self._lines[rank]
        if any("most recent call first" in line for line in lines):
            return tuple(parse_fault_stacks(lines)[0])
        if any(line.startswith("Thread ") for line in lines):
            return tuple(parse_spy_stacks(lines))
        return ()

    def _describe_rank(
        self,
        rank: int | None,
        events: list[RankEvent],
        stacks: tuple[ThreadStack, ...],
        pid: int | None,
    ) -> RankEvidence:
        groups, signatures, builders = [], [CallSignature(None)], []
        for name, progress in self._progress.get(rank, {}).items():
            if progress.enqueued >= _NO_WORK:
                continue
            groups.append(GroupFact(name, progress.description, backend="nccl"))
            builder = ColumnBuilder(len(groups) - 1)
            stuck = self._stuck[rank].get(progress.stuck)
            if stuck is not None and progress.stuck >= 1:
                signatures.append(stuck)
                builder.add(
                    progress.stuck - 1, progress.stuck, len(signatures) - 1, 0, CallState.FAILED
                )
            builder.num_issued = max(0, progress.enqueued)
            builder.num_done = max(0, progress.completed)
            builders.append(builder)
        return RankEvidence(
            path=self._path,
            format=FileFormat.LOG,
            rank=rank,
            host=self._hosts.get(rank, "") if rank is not None else "",
            pid=pid,
            groups=tuple(groups),
            signatures=tuple(signatures),
            columns=tuple(builder.build() for builder in builders),
            has_states=bool(builders),
            stacks=stacks,
            events=tuple(events),
        )

    def _sort_failures(self) -> None:
        for failure in self._failures:
            fields = failure.fields
            rank_match = _FAILURE_RANK.match(fields.get("rank", ""))
            exit_match = _FAILURE_EXIT.match(fields.get("exitcode", ""))
            if rank_match is None or exit_match is None:
                continue
            rank = int(rank_match["rank"])
            self._pids[int(exit_match["pid"])] = rank
            self._hosts[rank] = fields.get("host", "")
            code = exit_match["code"]
            self._events[rank].append(
                RankEvent(
                    _kind_of_exit(code),
                    name_exit(code),
                    fields.get("time", ""),
                    _NO_WORK,
                    is_root=failure.is_root,
                )
            )


def _make_signature(match: re.Match[str]) -> CallSignature:
    kind = find_kind(match["op"])
    sizes = [int(match[name]) for name in ("input", "output") if match[name] is not None]
    return CallSignature(kind, op=match["op"], num_elements=max(sizes, default=None))


def _same(event: RankEvent, known: RankEvent) -> bool:
    return event.kind is known.kind and known.line == _NO_WORK


def _kind_of_exit(code: str) -> EventKind:
    number = int(code)
    if number == 0:
        return EventKind.EXIT
    if number == -15:
        return EventKind.INTERRUPTED
    return EventKind.SIGNAL if number < 0 else EventKind.EXIT


def name_exit(code: str) -> str:
    """`was killed by SIGKILL` or `exited with code 1`."""
    number = int(code)
    if number < 0:
        return f"was killed by {_SIGNALS.get(-number, f'signal {-number}')}"
    return f"exited with code {number}"


def find_time(line: str) -> str:
    """The time in a line, as its text; empty if it has none."""
    match = _TIME.search(line[:200])
    return match[0] if match is not None else ""


def read_ranges(text: str) -> list[int]:
    """The numbers of `0,3-5`, at most 100,000."""
    numbers: list[int] = []
    for part in re.split(r"[,\s]+", text):
        first, _, last = part.partition("-")
        if first.isdigit() and len(first) < 8:
            end = int(last) if last.isdigit() and len(last) < 8 else int(first)
            numbers.extend(range(int(first), min(end, int(first) + 100_000) + 1))
    return numbers[:100_000]


def list_frames(evidence: RankEvidence) -> tuple[Frame, ...]:
    """The frames of the last traceback of a rank."""
    return next((event.frames for event in reversed(evidence.events) if event.frames), ())
