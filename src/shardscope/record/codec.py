"""Recordings to and from files: JSON, gzip if the name ends in .gz. Streams are `stream.py`'s."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from shardscope.errors import RecordingError
from shardscope.record.base import Record
from shardscope.record.coverage import Coverage, OpCoverage, Verdict
from shardscope.record.encoding import encode_json
from shardscope.record.header import FileHeader, brief, check_schema, explain_damage, read_header
from shardscope.record.input import read_file
from shardscope.record.limits import check_claims
from shardscope.record.memory import MemoryProfile
from shardscope.record.output import write_file
from shardscope.record.recording import FORMAT, SCHEMA, Mark, Module, Parameter, Recording
from shardscope.record.replay import read_stream
from shardscope.record.sharing import SharedValues
from shardscope.record.stream import STREAM_FORMAT

__all__ = ["encode", "encode_pieces", "load", "save"]

_DECODER = msgspec.json.Decoder(Recording)
_PIECE_SIZE = 4096  # records
# Why ops were called sharded, before there was another word for those that run on local tensors.
_LOCAL_DETAILS = (
    "on plain tensors, each rank's own",
    "takes no tensors",
    "no input has a dim to shard",
)

_T = TypeVar("_T", bound=Record)


def save(recording: Recording, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a recording to a file; the same recording gives the same bytes.

    Args:
        recording: The recording.
        path: Where to write; gzip-compressed if the name ends in `.gz`.
        force: Overwrite a file that exists.

    Examples:
        >>> save(t.recording, "step.json.gz")
    """
    if not isinstance(recording, Recording):
        raise RecordingError(
            f"save() got {type(recording).__name__}, not a Recording. "
            f"Give it what load(), merge() or a trace's `recording` gives."
        )
    return write_file(encode_pieces(recording), path, force=force)


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a recording or a stream; raises RecordingError if the file cannot be read.

    Args:
        path: A file written by `save` or by `trace(stream=…)`.

    Examples:
        >>> recording = load("step.json.gz")
        >>> len(recording.collectives)
    """
    name = os.fspath(path)
    data = read_file(path, start=b"{")
    header = _find_header(data, name)
    if header.format not in (FORMAT, STREAM_FORMAT):
        raise RecordingError(_explain_foreign(name, header))
    check_schema(header, name)
    recording = read_stream(data, name) if header.format == STREAM_FORMAT else _decode(data, name)
    check_claims(recording, name, len(data))
    return _upgrade(recording, header.schema)


def _decode(data: bytes, name: str) -> Recording:
    try:
        recording = _DECODER.decode(data)
    except (ValueError, RecursionError) as error:
        raise RecordingError(explain_damage(error, data, name)) from error
    values = SharedValues()
    for collective in recording.collectives:
        values.share(collective)
    return recording


def encode(recording: Recording) -> bytes:
    """Encode a recording as JSON that ends in a newline.

    Args:
        recording: The recording.

    Examples:
        >>> encode(recording)[:1]
        b'{'
    """
    return b"".join(encode_pieces(recording))


def encode_pieces(recording: Recording) -> Iterator[bytes]:
    """Encode a recording as JSON, some thousand records at a time, to save memory.

    Args:
        recording: The recording.

    Examples:
        >>> for piece in encode_pieces(recording):
        ...     file.write(piece)
    """
    before = b"{"
    for name in recording.__struct_fields__:
        value = getattr(recording, name)
        yield before + encode_json(name) + b":"
        if isinstance(value, tuple):
            yield from _encode_records(value)
        else:
            yield encode_json(value)
        before = b","
    yield b"}\n"


def _encode_records(records: tuple[object, ...]) -> Iterator[bytes]:
    before = b"["
    for start in range(0, len(records), _PIECE_SIZE):
        batch = encode_json(records[start : start + _PIECE_SIZE])
        yield before + batch.removeprefix(b"[").removesuffix(b"]")
        before = b","
    yield b"]" if records else b"[]"


def _find_header(data: bytes, name: str) -> FileHeader:
    # A stream's header is its first line; a recording, however it is laid out, is one JSON value.
    end = data.find(b"\n")
    first_line = read_header(data[:end]) if end >= 0 else None
    if first_line is not None and first_line.format == STREAM_FORMAT:
        return first_line
    try:
        return msgspec.json.decode(data, type=FileHeader)
    except (ValueError, RecursionError) as error:
        raise RecordingError(explain_damage(error, data, name)) from error


def _explain_foreign(name: str, header: FileHeader) -> str:
    if header.format:
        fact = f"the key 'format' is '{brief(header.format)}'"
    else:
        fact = "the key 'format' is missing"
    return (
        f"'{name}' is JSON but not a shardscope recording: {fact} (expected '{FORMAT}'). "
        f"Name a file that shardscope wrote."
    )


def _upgrade(recording: Recording, schema: int) -> Recording:
    """The same recording in the current schema.

    Until schema 2, zero stood for what was not recorded, and simulations recorded their own clock.
    """
    if schema >= SCHEMA:
        return recording
    is_timed = any(call.start_ns for call in recording.collectives)
    if recording.run.is_simulated or not is_timed:
        calls = tuple(replace(call, start_ns=None) for call in recording.collectives)
    else:
        calls = recording.collectives
    return replace(
        recording,
        modules=tuple(map(_upgrade_module, recording.modules)),
        collectives=calls,
        coverage=tuple(map(_upgrade_coverage, recording.coverage)),
        memory=tuple(map(_upgrade_memory, recording.memory)),
        explanations=tuple(
            replace(one, stages=tuple(_without_zeros(stage, "total_ns") for stage in one.stages))
            for one in recording.explanations
        ),
        schema=SCHEMA,
    )


def _without_zeros(record: _T, *names: str) -> _T:
    """The record with None for each of these fields that is zero."""
    return replace(record, **{name: None for name in names if getattr(record, name) == 0})


def _upgrade_module(module: Module) -> Module:
    marks: tuple[Mark, ...] = tuple(_without_zeros(one, "num_parameters") for one in module.marks)
    parameters = tuple(map(_upgrade_parameter, module.parameters))
    return replace(module, parameters=parameters, marks=marks)


def _upgrade_parameter(one: Parameter) -> Parameter:
    """One that has elements has bytes: if there are none, they were not recorded."""
    has_bytes = one.global_bytes or not math.prod(one.shape)
    return one if has_bytes else _without_zeros(one, "global_bytes", "local_bytes")


def _upgrade_memory(profile: MemoryProfile) -> MemoryProfile:
    return _without_zeros(profile, "first_peak_bytes", "reserved_bytes", "needed_bytes")


def _upgrade_coverage(coverage: Coverage) -> Coverage:
    return replace(coverage, ops=tuple(map(_upgrade_op, coverage.ops)))


def _upgrade_op(op: OpCoverage) -> OpCoverage:
    is_local = op.verdict is Verdict.SHARDED and op.detail in _LOCAL_DETAILS
    return replace(_without_zeros(op, "flops"), verdict=Verdict.LOCAL if is_local else op.verdict)
