"""Reads a stream back as a recording; lines that are truncated or damaged become gaps."""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import final

import msgspec
from msgspec.structs import replace

from shardscope.errors import RecordingError
from shardscope.record.encoding import SharedValues, check_schema, explain_damage, read_header
from shardscope.record.profile_records import Span, SpanBegin
from shardscope.record.ranks import compress_ranks, count_ranks, format_ranks
from shardscope.record.recording import (
    Collective,
    Finding,
    Gap,
    Group,
    Module,
    Recording,
    RunInfo,
    Stop,
)
from shardscope.record.stream import StreamEnd, StreamHeader, StreamLine
from shardscope.record.text import excerpt
from shardscope.record.value_records import ValueSample

# A stream with more damaged lines than this is not ours; reading on would take hours.
_MAX_DAMAGED = 100_000
_MAX_NUMBERS = 50  # of damaged lines that are named
_MAX_OPEN = 20  # phases of a thread, and threads, that are named and kept
_MAX_RUNS = 100  # lines that say which rank this is; a real stream has one or two
_HOST = "cpu"

# A line that is not blank: blank lines are skipped in bulk, as there may be millions of them.
_LINE = re.compile(rb"\S[^\n]*")


def read_stream(data: bytes, name: str) -> Recording:
    """Read a stream up to where it ends or was cut off.

    Args:
        data: The bytes of the stream.
        name: What gaps call the file.

    Examples:
        >>> read_stream(Path("run-0.jsonl").read_bytes(), "run-0.jsonl")
    """
    header_end = data.find(b"\n")
    run = _read_run(data if header_end < 0 else data[:header_end], name)
    reader = _Reader(run)
    for number, line in _number_lines(data, header_end):
        reader.read_line(number, line)
        if reader.is_hopeless:
            break
    return Recording(
        run=reader.run,
        groups=tuple(reader.groups),
        modules=tuple(reader.modules),
        collectives=tuple(reader.collectives),
        findings=tuple(reader.findings),
        gaps=(*reader.gaps, *reader.find_losses(name, _only_rank(reader.run))),
        stops=reader.find_stops(_only_rank(reader.run)),
        spans=tuple(reader.spans),
        values=tuple(reader.values),
    )


def _read_run(line: bytes, name: str) -> RunInfo:
    header = read_header(line)
    if header is not None:
        check_schema(header, name)
    try:
        return msgspec.json.decode(line, type=StreamHeader).run
    except (ValueError, RecursionError) as error:
        raise RecordingError(explain_damage(error, line, name)) from error


def _number_lines(data: bytes, header_end: int) -> Iterator[tuple[int, bytes]]:
    """The lines after the first, with numbers; a list would be larger than the file."""
    if header_end < 0:
        return
    number, counted = 1, header_end
    for match in _LINE.finditer(data, header_end):
        number += data.count(b"\n", counted, match.start())
        counted = match.start()
        yield number, match.group()


def _only_rank(run: RunInfo) -> int | None:
    return run.ranks[0].first if count_ranks(run.ranks) == 1 else None


@final
class _Reader:
    """Sorts a stream's lines into records and remembers the damaged ones."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.groups: list[Group] = []
        self.modules: list[Module] = []
        self.collectives: list[Collective] = []
        self.findings: list[Finding] = []
        self.gaps: list[Gap] = []
        self.spans: list[Span] = []
        self.values: list[ValueSample] = []
        self._open_spans = _OpenSpans()
        self._end: StreamEnd | None = None
        self._num_runs = 0
        self._num_damaged = 0
        self._damaged: list[int] = []
        self._reason = ""
        self._decoder = msgspec.json.Decoder(StreamLine)
        self._values = SharedValues()

    @property
    def is_hopeless(self) -> bool:
        """Whether too many lines are damaged to read the rest."""
        return self._num_damaged >= _MAX_DAMAGED

    def read_line(self, number: int, data: bytes) -> None:
        """Add the record of a line, or remember the line's number if it is damaged."""
        try:
            line = self._decoder.decode(data)
        except (ValueError, RecursionError) as error:
            self._remember_damage(number, str(error))
            return
        if not self._keep(line):
            self._remember_damage(number, "a record of an unknown kind")

    def _keep(self, line: StreamLine) -> bool:
        self._end = None  # a stream may be closed and reopened: only the last end marker counts
        if line.collective is not None:
            self._values.share(line.collective)
            self.collectives.append(line.collective)
        elif line.module is not None:
            self.modules.append(line.module)
        elif line.group is not None:
            self.groups.append(line.group)
        elif line.finding is not None:
            self.findings.append(line.finding)
        elif line.gap is not None:
            self.gaps.append(line.gap)
        elif line.span is not None:
            self.spans.append(line.span)
            self._open_spans.end(line.span)
        elif line.value is not None:
            self.values.append(line.value)
        elif line.begin is not None:
            self._open_spans.begin(line.begin)
        elif line.run is not None and self._num_runs < _MAX_RUNS:
            self._num_runs += 1
            self._set_run(line.run)
        elif line.end is not None:
            self._end = line.end
            self._open_spans.clear()
        else:
            return False
        return True

    def _set_run(self, run: RunInfo) -> None:
        """Set the run, and its rank in records that were written before the rank was known."""
        old_run, self.run = self.run, run
        old_rank, new_rank = _only_rank(old_run), _only_rank(run)
        if old_rank is None or new_rank is None or old_rank == new_rank:
            return
        self.gaps[:] = [
            replace(record, rank=new_rank) if record.rank == old_rank else record
            for record in self.gaps
        ]
        self.spans[:] = [
            replace(record, rank=new_rank) if record.rank == old_rank else record
            for record in self.spans
        ]
        self.values[:] = [
            replace(record, rank=new_rank) if record.rank == old_rank else record
            for record in self.values
        ]
        self.modules[:] = [
            replace(record, ranks=run.ranks) if record.ranks == old_run.ranks else record
            for record in self.modules
        ]

    def _remember_damage(self, number: int, reason: str) -> None:
        self._reason = self._reason or excerpt(reason)
        self._num_damaged += 1
        if len(self._damaged) < _MAX_NUMBERS:
            self._damaged.append(number)

    def find_losses(self, name: str, rank: int | None) -> list[Gap]:
        """Gaps for records that are missing or damaged, and for phases that were not left."""
        gaps = []
        if self._num_damaged:
            place = f"{name}, line {self._format_numbers()}"
            gaps.append(Gap(place=place, fact=self._describe_damage(), rank=rank, is_loss=True))
        fact = None if self.is_hopeless else self._describe_end()
        if fact is not None:
            gaps.append(Gap(place=name, fact=fact, rank=rank, is_loss=True))
        fact = self._open_spans.describe()
        if fact is not None:
            gaps.append(Gap(place="phases", fact=fact, rank=rank))
        return gaps

    def find_stops(self, rank: int | None) -> tuple[Stop, ...]:
        """How the rank stopped, if it did not leave its trace normally."""
        if rank is None or (self._end is not None and self._end.error is None):
            return ()
        # A torn last line counts: a full disk, where the run goes on, leaves one more often than
        # a killed process does.
        has_lost = any(gap.is_loss for gap in self.gaps)
        stop = Stop(
            rank=rank,
            error=None if self._end is None else self._end.error,
            open_spans=self._open_spans.as_records(rank),
            is_gapless=not has_lost and not self._num_damaged and self._count_missing() <= 0,
        )
        return (stop,)

    def _format_numbers(self) -> str:
        numbers = format_ranks(compress_ranks(self._damaged))
        return numbers + (",…" if self._num_damaged > len(self._damaged) else "")

    def _describe_damage(self) -> str:
        fact = f"{self._num_damaged} of its lines cannot be read, the first: {self._reason}"
        return f"{fact}; reading stopped there" if self.is_hopeless else fact

    def _describe_end(self) -> str | None:
        if self._end is None:
            return "the stream has no end: the run was killed, or is still running"
        num_lost = self._count_missing()
        if num_lost <= 0:
            return None
        verb = "is" if num_lost == 1 else "are"
        return f"{num_lost} of the {self._end.num_records} records written {verb} missing"

    def _count_missing(self) -> int:
        return 0 if self._end is None else self._end.num_records - self._count()

    def _count(self) -> int:
        kinds = (
            self.groups,
            self.modules,
            self.collectives,
            self.findings,
            self.gaps,
            self.spans,
            self.values,
        )
        return sum(len(records) for records in kinds)


@final
class _OpenSpans:
    """Phases that were entered and not left where a stream stops, such as on a killed rank."""

    def __init__(self) -> None:
        # Start times by thread and name, sorted: a hostile stream may have very many.
        self._starts: dict[tuple[str, str], list[int]] = {}

    def begin(self, begin: SpanBegin) -> None:
        """Add a phase that was entered."""
        insort(self._starts.setdefault((begin.thread, begin.name), []), begin.start_ns)

    def end(self, span: Span) -> None:
        """Remove a phase that was left: of those on its thread, the last to begin before it."""
        key = (span.thread, span.name)
        starts = self._starts.get(key)
        if starts is None or span.device != _HOST:
            return
        # The first, if all began later: a clock may be set back.
        del starts[max(0, bisect_right(starts, span.start_ns) - 1)]
        if not starts:
            del self._starts[key]

    def clear(self) -> None:
        """Remove all: the trace was left while they were open, so their ends are not recorded."""
        self._starts.clear()

    def as_records(self, rank: int) -> tuple[SpanBegin, ...]:
        """The open phases as records, at most as many as `describe` names."""
        return tuple(
            SpanBegin(rank=rank, name=name, start_ns=start_ns, thread=thread)
            for thread, opened in self._by_thread()[:_MAX_OPEN]
            for start_ns, name in opened[-_MAX_OPEN:]
        )

    def describe(self) -> str | None:
        """A sentence with the open phases by thread, outermost first; None if there are none."""
        threads = self._by_thread()
        if not threads:
            return None
        lines = [_describe_thread(thread, opened) for thread, opened in threads[:_MAX_OPEN]]
        if len(threads) > _MAX_OPEN:
            lines.append(f"{len(threads) - _MAX_OPEN:,} more threads")
        return f"still open where the stream stops, outermost first: {'; '.join(lines)}"

    def _by_thread(self) -> list[tuple[str, list[tuple[int, str]]]]:
        """Open phases by thread, the main thread first, as sorted pairs of start time and name."""
        threads: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for (thread, name), starts in self._starts.items():
            threads[thread].extend((start_ns, name) for start_ns in starts)
        return [(thread, sorted(threads[thread])) for thread in sorted(threads)]


def _describe_thread(thread: str, opened: Sequence[tuple[int, str]]) -> str:
    names = [name for _, name in opened]
    if len(names) > _MAX_OPEN:
        half = _MAX_OPEN // 2
        names[half:-half] = [f"… {len(names) - 2 * half:,} more …"]
    # Without their times, so that ranks that hang in the same place are shown together.
    return " > ".join(names) + (f" (thread {thread})" if thread else "")
