"""A stream read back as a recording: whatever was cut or damaged becomes a gap, not a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import final

import msgspec
from msgspec.structs import replace

from shardscope.errors import RecordingError
from shardscope.record.header import brief, check_schema, explain_damage, read_header
from shardscope.record.ranks import compress_ranks, count_ranks, format_ranks
from shardscope.record.recording import (
    Collective,
    Finding,
    Gap,
    Group,
    Module,
    Recording,
    RunInfo,
)
from shardscope.record.sharing import SharedValues
from shardscope.record.spans import Span
from shardscope.record.stream import StreamEnd, StreamHeader, StreamLine
from shardscope.record.unended import UnendedSpans

__all__ = ["read_stream"]

# A stream with more damaged lines than this is none of ours; reading on would take hours.
_MAX_DAMAGED = 100_000
_MAX_NUMBERS = 50  # of damaged lines that are named

# A line that holds something: blank ones are skipped in bulk, however many millions there are.
_LINE = re.compile(rb"\S[^\n]*")


def read_stream(data: bytes, name: str) -> Recording:
    """The recording in a stream up to where it was cut; `name` is what gaps call the file."""
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
        spans=tuple(reader.spans),
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
    """The lines after the first, one at a time: a list of them would cost more than the file."""
    if header_end < 0:
        return
    number, counted = 1, header_end
    for found in _LINE.finditer(data, header_end):
        number += data.count(b"\n", counted, found.start())
        counted = found.start()
        yield number, found.group()


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
        self._unended = UnendedSpans()
        self._end: StreamEnd | None = None
        self._num_damaged = 0
        self._damaged: list[int] = []
        self._reason = ""
        self._decoder = msgspec.json.Decoder(StreamLine)
        self._values = SharedValues()

    @property
    def is_hopeless(self) -> bool:
        """Whether so much is damaged that the rest is not worth reading."""
        return self._num_damaged >= _MAX_DAMAGED

    def read_line(self, number: int, data: bytes) -> None:
        """Keep the record of one line, or its number if it has none."""
        try:
            line = self._decoder.decode(data)
        except (ValueError, RecursionError) as error:
            self._remember_damage(number, str(error))
            return
        if not self._keep(line):
            self._remember_damage(number, "a record of an unknown kind")

    def _keep(self, line: StreamLine) -> bool:
        self._end = None  # a stream may be closed and go on: only what ends it is its end
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
            self._unended.end(line.span)
        elif line.begin is not None:
            self._unended.begin(line.begin)
        elif line.run is not None:
            self._become(line.run)
        elif line.end is not None:
            self._end = line.end
            self._unended.forget()
        else:
            return False
        return True

    def _become(self, run: RunInfo) -> None:
        """What was written before the rank was known is this rank's."""
        was, self.run = self.run, run
        then, now = _only_rank(was), _only_rank(run)
        if then is None or now is None or then == now:
            return
        self.gaps[:] = [replace(one, rank=now) if one.rank == then else one for one in self.gaps]
        self.spans[:] = [replace(one, rank=now) if one.rank == then else one for one in self.spans]
        self.modules[:] = [
            replace(one, ranks=run.ranks) if one.ranks == was.ranks else one for one in self.modules
        ]

    def _remember_damage(self, number: int, reason: str) -> None:
        self._reason = self._reason or brief(reason)
        self._num_damaged += 1
        if len(self._damaged) < _MAX_NUMBERS:
            self._damaged.append(number)

    def find_losses(self, name: str, rank: int | None) -> list[Gap]:
        """What the stream should hold and does not."""
        gaps = []
        if self._num_damaged:
            place = f"{name}, line {self._format_numbers()}"
            gaps.append(Gap(place=place, fact=self._describe_damage(), rank=rank, is_loss=True))
        fact = None if self.is_hopeless else self._describe_end()
        if fact is not None:
            gaps.append(Gap(place=name, fact=fact, rank=rank, is_loss=True))
        stuck = self._unended.describe()
        if stuck is not None:
            gaps.append(Gap(place="phases", fact=stuck, rank=rank))
        return gaps

    def _format_numbers(self) -> str:
        numbers = format_ranks(compress_ranks(self._damaged))
        return numbers + (",…" if self._num_damaged > len(self._damaged) else "")

    def _describe_damage(self) -> str:
        fact = f"{self._num_damaged} of its lines cannot be read, the first: {self._reason}"
        return f"{fact}; reading stopped there" if self.is_hopeless else fact

    def _describe_end(self) -> str | None:
        if self._end is None:
            return "the stream has no end: the run was killed, or is still running"
        num_lost = self._end.num_records - self._count()
        if num_lost <= 0:
            return None
        verb = "is" if num_lost == 1 else "are"
        return f"{num_lost} of the {self._end.num_records} records written {verb} missing"

    def _count(self) -> int:
        kinds = (
            self.groups,
            self.modules,
            self.collectives,
            self.findings,
            self.gaps,
            self.spans,
        )
        return sum(len(records) for records in kinds)
