"""A stream read back as a recording: whatever was cut or damaged becomes a gap, not a failure."""

from __future__ import annotations

from typing import final

import msgspec

from shardscope.errors import RecordingError
from shardscope.record.header import check_schema, explain_damage, read_header
from shardscope.record.ranks import RankSpan, compress_ranks, count_ranks, format_ranks
from shardscope.record.recording import (
    Collective,
    Finding,
    Gap,
    Group,
    Module,
    Recording,
    RunInfo,
)
from shardscope.record.stream import StreamEnd, StreamHeader, StreamLine

__all__ = ["read_stream"]


def read_stream(data: bytes, name: str) -> Recording:
    """The recording in a stream up to where it was cut; `name` is what gaps call the file."""
    # What follows the last newline is empty, or a line that was cut while it was written.
    first, *lines = data.removesuffix(b"\n").split(b"\n")
    run = _read_run(first, name)
    reader = _Reader()
    for number, line in enumerate(lines, start=2):
        reader.read_line(number, line)
    return Recording(
        run=run,
        groups=tuple(reader.groups),
        modules=tuple(reader.modules),
        collectives=tuple(reader.collectives),
        findings=tuple(reader.findings),
        gaps=(*reader.gaps, *reader.find_losses(name, _only_rank(run.ranks))),
    )


def _read_run(line: bytes, name: str) -> RunInfo:
    header = read_header(line)
    if header is not None:
        check_schema(header, name)
    try:
        return msgspec.json.decode(line, type=StreamHeader).run
    except (ValueError, RecursionError) as error:
        raise RecordingError(explain_damage(error, line, name)) from error


def _only_rank(ranks: tuple[RankSpan, ...]) -> int | None:
    return ranks[0].first if count_ranks(ranks) == 1 else None


@final
class _Reader:
    """Sorts a stream's lines into records and remembers the damaged ones."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.modules: list[Module] = []
        self.collectives: list[Collective] = []
        self.findings: list[Finding] = []
        self.gaps: list[Gap] = []
        self._end: StreamEnd | None = None
        self._damaged: list[int] = []
        self._reason = ""
        self._decoder = msgspec.json.Decoder(StreamLine)

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
            self.collectives.append(line.collective)
        elif line.module is not None:
            self.modules.append(line.module)
        elif line.group is not None:
            self.groups.append(line.group)
        elif line.finding is not None:
            self.findings.append(line.finding)
        elif line.gap is not None:
            self.gaps.append(line.gap)
        elif line.end is not None:
            self._end = line.end
        else:
            return False
        return True

    def _remember_damage(self, number: int, reason: str) -> None:
        self._reason = self._reason or reason
        self._damaged.append(number)

    def find_losses(self, name: str, rank: int | None) -> list[Gap]:
        """What the stream should hold and does not."""
        gaps = []
        if self._damaged:
            lines = format_ranks(compress_ranks(self._damaged))
            fact = f"{len(self._damaged)} of its lines cannot be read, the first: {self._reason}"
            gaps.append(Gap(place=f"{name}, line {lines}", fact=fact, rank=rank))
        if self._end is None:
            fact = "the stream has no end: the run was killed, or is still running"
            gaps.append(Gap(place=name, fact=fact, rank=rank))
        elif (num_lost := self._end.num_records - self._count()) > 0:
            fact = f"{num_lost} of the {self._end.num_records} records written are missing"
            gaps.append(Gap(place=name, fact=fact, rank=rank))
        return gaps

    def _count(self) -> int:
        kinds = (self.groups, self.modules, self.collectives, self.findings, self.gaps)
        return sum(len(records) for records in kinds)
