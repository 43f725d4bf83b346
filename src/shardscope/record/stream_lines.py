"""The lines of a stream, which `stream.py` writes and `replay.py` reads."""

from __future__ import annotations

from msgspec import Struct

from shardscope.record.profile_records import Span, SpanBegin
from shardscope.record.ranks import Natural
from shardscope.record.recording import (
    Collective,
    DroppedCollectives,
    Finding,
    Gap,
    Group,
    Module,
    RankProcess,
    RunInfo,
)
from shardscope.record.value_records import ValueSample

STREAM_FORMAT = "shardscope.stream"
# Since 3, collectives that repeat are short lines. The records are those of the recording's schema.
STREAM_SCHEMA = 3

StreamRecord = Group | Module | Collective | Finding | Gap | RankProcess | Span | ValueSample


class StreamHeader(Struct, frozen=True, kw_only=True):
    """The first line."""

    format: str = STREAM_FORMAT
    schema: int = STREAM_SCHEMA
    run: RunInfo


class StreamEnd(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last line's content: the trace was left after so many records.

    `error` is the type and the first line of the exception that it was left with, if any.
    """

    num_records: Natural
    error: str | None = None


class StreamRepeat(Struct, frozen=True, array_like=True):
    """A collective that is as an earlier one, but for its positions and times.

    `template` is the number of the earlier collective's line. Bytes are None if they are the same,
    too.
    """

    template: Natural
    order: Natural
    group_order: Natural
    start_ns: Natural | None = None
    input_bytes: Natural | None = None
    output_bytes: Natural | None = None
    wire_bytes: Natural | None = None


class StreamReturn(Struct, frozen=True, array_like=True):
    """When the call of an earlier collective had returned to the program."""

    order: Natural
    returned_ns: Natural


class StreamPart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The beginning of a part of a stream of limited size, which has no template at first.

    If earlier parts are not in the file, this is what was in them: collectives in `dropped`, the
    number of spans and values, and the spans that had begun.
    """

    num_records: Natural = 0
    dropped: tuple[DroppedCollectives, ...] = ()
    num_spans: Natural = 0
    num_values: Natural = 0
    open_spans: tuple[SpanBegin, ...] = ()


class StreamLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Any line after the first: exactly one of these fields is set.

    Besides, `template` is the number by which later lines refer to this line's collective.
    """

    group: Group | None = None
    module: Module | None = None
    collective: Collective | None = None
    template: Natural | None = None
    repeat: StreamRepeat | None = None
    returned: StreamReturn | None = None
    process: RankProcess | None = None
    finding: Finding | None = None
    gap: Gap | None = None
    begin: SpanBegin | None = None
    span: Span | None = None
    value: ValueSample | None = None
    part: StreamPart | None = None
    run: RunInfo | None = None  # instead of the header's: what came before is this rank's too
    end: StreamEnd | None = None
