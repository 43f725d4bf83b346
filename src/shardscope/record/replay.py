"""Reads a stream back as a recording; lines that are truncated or damaged become gaps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, final

import msgspec
from msgspec.structs import replace

from shardscope.errors import RecordingError
from shardscope.record.encoding import SharedValues, check_schema, explain_damage, read_header
from shardscope.record.profile_records import Span
from shardscope.record.ranks import compress_ranks, format_ranks
from shardscope.record.recording import (
    Collective,
    Finding,
    Gap,
    Group,
    Module,
    RankProcess,
    Recording,
    RunInfo,
    Stop,
)
from shardscope.record.stream_lines import (
    STREAM_SCHEMA,
    StreamEnd,
    StreamHeader,
    StreamLine,
    StreamPart,
    StreamRepeat,
)
from shardscope.record.stream_state import OpenSpans, assign_rank, only_rank
from shardscope.record.text import excerpt
from shardscope.record.value_records import ValueSample

# A stream with more damaged lines than this is not ours; reading on would take hours.
_MAX_DAMAGED = 100_000
_MAX_NUMBERS = 50  # of damaged lines that are named
_MAX_RUNS = 100  # lines that say which rank this is; a real stream has one or two
_MAX_GROUPS = 8  # that the sentence on dropped collectives names

# A line that is not blank: blank lines are skipped in bulk, as there may be millions of them. After
# a crash of the machine, a file may end in zeros.
_LINE = re.compile(rb"[^\s\0][^\n]*")


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
    reader.finish()
    rank = only_rank(reader.run)
    return Recording(
        run=reader.run,
        groups=tuple(reader.groups),
        modules=tuple(reader.modules),
        collectives=reader.make_collectives(),
        findings=tuple(reader.findings),
        gaps=(*reader.gaps, *reader.find_losses(name, rank)),
        stops=reader.find_stops(rank),
        spans=tuple(reader.spans),
        values=tuple(reader.values),
        processes=() if reader.run.is_simulated else tuple(reader.processes),
        dropped=() if reader.first_part is None else reader.first_part.dropped,
    )


def _read_run(line: bytes, name: str) -> RunInfo:
    header = read_header(line)
    if header is not None:
        check_schema(header, name, newest=STREAM_SCHEMA)
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


@final
class _Reader:
    """Sorts a stream's lines into records and remembers the damaged ones."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.groups: list[Group] = []
        self.modules: list[Module] = []
        self.findings: list[Finding] = []
        self.gaps: list[Gap] = []
        self.spans: list[Span] = []
        self.values: list[ValueSample] = []
        self.processes: list[RankProcess] = []
        self.first_part: StreamPart | None = None
        # Each with what differs from it, if it is the template of a line that repeats it.
        self._calls: list[tuple[Collective, StreamRepeat | None]] = []
        self._templates: dict[int, Collective] = {}
        self._returned_ns: dict[int, int] = {}  # by order
        self._open_spans = OpenSpans()
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
        reason = self._keep(line)
        if reason is not None:
            self._remember_damage(number, reason)

    def _keep(self, line: StreamLine) -> str | None:
        """Add the record of a line; why that is not possible."""
        self._end = None  # a stream may be closed and reopened: only the last end marker counts
        if line.repeat is not None:
            template = self._templates.get(line.repeat.template)
            if template is None:
                return "it repeats a collective that is not in the stream"
            self._calls.append((template, line.repeat))
        elif line.returned is not None:
            self._returned_ns[line.returned.order] = line.returned.returned_ns
        elif line.collective is not None:
            self._values.share(line.collective)
            self._calls.append((line.collective, None))
            if line.template is not None:
                self._templates[line.template] = line.collective
        elif line.span is not None:
            self.spans.append(line.span)
            self._open_spans.end(line.span)
        elif line.begin is not None:
            self._open_spans.begin(line.begin)
        elif line.value is not None:
            self.values.append(line.value)
        elif line.module is not None:
            self.modules.append(line.module)
        else:
            return self._keep_rare(line)
        return None

    def _keep_rare(self, line: StreamLine) -> str | None:
        if line.group is not None:
            self.groups.append(line.group)
        elif line.finding is not None:
            self.findings.append(line.finding)
        elif line.gap is not None:
            self.gaps.append(line.gap)
        elif line.process is not None:
            self.processes.append(line.process)
        elif line.part is not None:
            self._begin_part(line.part)
        elif line.run is not None and self._num_runs < _MAX_RUNS:
            self._num_runs += 1
            self._set_run(line.run)
        elif line.end is not None:
            self._end = line.end
            self._open_spans.clear()
        else:
            return "a record of an unknown kind"
        return None

    def _begin_part(self, part: StreamPart) -> None:
        self._templates.clear()
        if self.first_part is None:
            self.first_part = part
            for begin in part.open_spans:
                self._open_spans.begin(begin)

    def _set_run(self, run: RunInfo) -> None:
        """Set the run, and its rank in records that were written before the rank was known."""
        for records in self._list_ranked():
            records[:] = assign_rank(records, self.run, run)
        self.run = run

    def finish(self) -> None:
        """Drop what a stream of limited size has twice: where it was written, and at its start."""
        if self.first_part is not None:
            for records in self._list_lasting():
                records[:] = dict.fromkeys(records)

    def make_collectives(self) -> tuple[Collective, ...]:
        """The records of all collectives, in order."""
        collectives = [self._complete(call, repeat) for call, repeat in self._calls]
        # Not in order where a signal handler issued one while another was being written.
        return tuple(sorted(collectives, key=lambda call: call.order))

    def _complete(self, call: Collective, repeat: StreamRepeat | None) -> Collective:
        if repeat is None:
            returned_ns = self._returned_ns.get(call.order)
            return call if returned_ns is None else replace(call, returned_ns=returned_ns)
        changes: dict[str, Any] = {}
        if repeat.input_bytes is not None:
            changes = {
                "input_bytes": repeat.input_bytes,
                "output_bytes": repeat.output_bytes or 0,
                "wire_bytes": repeat.wire_bytes or 0,
            }
        return replace(
            call,
            order=repeat.order,
            group_order=repeat.group_order,
            start_ns=repeat.start_ns,
            returned_ns=self._returned_ns.get(repeat.order),
            **changes,
        )

    def _remember_damage(self, number: int, reason: str) -> None:
        self._reason = self._reason or excerpt(reason)
        self._num_damaged += 1
        if len(self._damaged) < _MAX_NUMBERS:
            self._damaged.append(number)

    def find_losses(self, name: str, rank: int | None) -> list[Gap]:
        """Gaps for records that are missing or damaged, and for phases that were not left."""
        gaps = []
        if (fact := self._describe_dropped()) is not None:
            gaps.append(Gap(place="stream", fact=fact, rank=rank))
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
        num_dropped = 0 if self.first_part is None else self.first_part.num_records
        num_rolling = len(self._calls) + len(self.spans) + len(self.values)
        return num_dropped + num_rolling + sum(map(len, self._list_lasting()))

    def _list_ranked(self) -> tuple[list[Any], ...]:
        return self.gaps, self.spans, self.values, self.modules, self.processes

    def _list_lasting(self) -> tuple[list[Any], ...]:
        return self.groups, self.modules, self.findings, self.gaps, self.processes

    def _describe_dropped(self) -> str | None:
        part = self.first_part
        if part is None or not part.num_records:
            return None
        num_calls: Counter[str] = Counter()
        for record in part.dropped:
            num_calls[record.group] += record.num_collectives
        counts = [f"{name} {count:,}" for name, count in num_calls.most_common(_MAX_GROUPS)]
        if len(num_calls) > _MAX_GROUPS:
            counts.append(f"{len(num_calls) - _MAX_GROUPS:,} more groups")
        dropped = [f"{num_calls.total():,} collectives ({', '.join(counts)})"] if counts else []
        dropped += [f"{part.num_spans:,} spans"] if part.num_spans else []
        dropped += [f"{part.num_values:,} values"] if part.num_values else []
        return (
            f"only the newest records were kept: {' and '.join(dropped)} before them were dropped, "
            "as the size of the stream was limited"
        )
