"""Saves and loads recordings: as JSON, gzipped if the name ends in .gz, or as Parquet.

`stream.py` writes streams, and `parquet.py` has the columns of Parquet files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from shardscope.errors import RecordingError
from shardscope.record.base import Axis, Phase, Record
from shardscope.record.encoding import (
    FileHeader,
    SharedValues,
    check_schema,
    encode_json,
    explain_damage,
    read_header,
)
from shardscope.record.files import read_file, write_file
from shardscope.record.parquet import MAGIC, ParquetRecording, encode_parquet, is_parquet_name
from shardscope.record.profile_records import (
    NO_POSITION,
    AllocationTable,
    MemoryKind,
    MemoryProfile,
)
from shardscope.record.ranks import MAX_RANKS, RankSpan, count_ranks
from shardscope.record.recording import FORMAT, SCHEMA, Mark, Module, Parameter, Recording
from shardscope.record.replay import read_stream
from shardscope.record.sharding_records import Coverage, OpCoverage, OpVerdict
from shardscope.record.stream_lines import STREAM_FORMAT
from shardscope.record.text import excerpt

# How many ranks a file of any size may name, and how many more per byte.
_RECORDED = (16_384, 1)
_IN_MODULES = (65_536, 16)
_ELSEWHERE = (2 * MAX_RANKS, 16)

# Deeper than any model: reading a name costs the square of its number of parts.
_MAX_PARTS = 512

_ALLOCATION_COLUMNS = (
    "start",
    "end",
    "num_bytes",
    "address",
    "kind",
    "phase",
    "module",
    "source",
)
_REMEDY = "The file was damaged or edited; record again."

Spans = tuple[RankSpan, ...]


def check_claims(recording: Recording, name: str, num_bytes: int) -> None:
    """Raise RecordingError if a file names too many ranks for its size, or impossible ones."""
    world_size = recording.run.world_size
    for place, spans in _list_in_world(recording):
        _check_world(place, spans, world_size, name)
    for place, axes in _list_meshes(recording):
        if math.prod(axis.size for axis in axes) > MAX_RANKS:
            raise RecordingError(
                f"'{name}' has a mesh of more than {MAX_RANKS:,} ranks at {place}. {_REMEDY}"
            )
    for index, layout in enumerate(recording.layouts):
        if any(len(part.stretches) != len(layout.shape) for part in layout.slices):
            raise RecordingError(
                f"'{name}' has a slice at $.layouts[{index}].slices with other dims than its "
                f"tensor, which has {len(layout.shape)}. {_REMEDY}"
            )
    for index, profile in enumerate(recording.memory):
        if profile.allocations is not None:
            _check_allocations(profile.allocations, f"$.memory[{index}].allocations", name)
    for module_name in set(_list_module_names(recording)):
        if module_name is not None and module_name.count(".") >= _MAX_PARTS:
            raise RecordingError(
                f"'{name}' names a module '{excerpt(module_name)}' that is nested more than "
                f"{_MAX_PARTS} deep. {_REMEDY}"
            )
    modules = {module.ranks for module in recording.modules}
    further_spans = {group.ranks for group in recording.groups} | set(_list_elsewhere(recording))
    for place, span_sets, (num_free, per_byte) in (
        ("$.run.ranks", {recording.run.ranks}, _RECORDED),
        ("$.modules", modules, _IN_MODULES),
        ("its groups, layouts, comparisons, checks and hangs", further_spans, _ELSEWHERE),
    ):
        num_named = sum(map(count_ranks, span_sets))
        if num_named > num_free + per_byte * num_bytes:
            raise RecordingError(
                f"'{name}' names {num_named:,} ranks at {place}, more than can be in a file of "
                f"{num_bytes:,} bytes. {_REMEDY}"
            )


def _check_world(place: str, spans: Spans, world_size: int, name: str) -> None:
    for span in spans:
        if (last := span.as_range()[-1]) >= world_size:
            raise RecordingError(
                f"'{name}' names rank {last} at {place}, but its world size is {world_size}. "
                f"{_REMEDY}"
            )
    if (num_ranks := count_ranks(spans)) > world_size:
        raise RecordingError(
            f"'{name}' names {num_ranks} ranks at {place}, some of them twice: its world size "
            f"is {world_size}. {_REMEDY}"
        )


def _check_allocations(table: AllocationTable, place: str, name: str) -> None:
    """Raise RecordingError if columns differ in length, or point outside of their lists."""
    segments = table.segments
    lengths = {len(getattr(table, column)) for column in _ALLOCATION_COLUMNS}
    segment_lengths = {len(segments.address), len(segments.num_bytes), len(segments.order)}
    if len(lengths) > 1 or len(segment_lengths) > 1:
        raise RecordingError(f"'{name}' has columns of different lengths at {place}. {_REMEDY}")
    for column, size in (
        ("kind", len(MemoryKind)),
        ("phase", len(Phase)),
        ("module", len(table.modules)),
        ("source", len(table.sources)),
    ):
        positions = getattr(table, column)
        if positions and not (min(positions) >= NO_POSITION and max(positions) < size):
            raise RecordingError(
                f"'{name}' has a position at {place}.{column} that is not in its list of {size}. "
                f"{_REMEDY}"
            )


def _list_in_world(recording: Recording) -> Iterator[tuple[str, Spans]]:
    """Rank spans that must be within the world of the run, each with its JSON path."""
    yield "$.run.ranks", recording.run.ranks
    for index, group in enumerate(recording.groups):
        yield f"$.groups[{index}].ranks", group.ranks
    for index, module in enumerate(recording.modules):
        yield f"$.modules[{index}].ranks", module.ranks
    for index, call in enumerate(recording.collectives):
        if call.rank >= recording.run.world_size:
            yield f"$.collectives[{index}].rank", (RankSpan(call.rank),)


def _list_elsewhere(recording: Recording) -> Iterator[Spans]:
    """Rank spans that may belong to another world than the run's."""
    for layout in recording.layouts:
        yield from (part.ranks for part in layout.slices)
    for parity in recording.parity:
        yield from (tensor.ranks for tensor in parity.tensors)
    for program in recording.parallel:
        yield from (tensor.ranks for tensor in program.verdicts)
        yield from (memory.ranks for memory in program.rank_memory)
    for explanation in recording.explanations:
        yield from (collective.group for collective in explanation.collectives)
    for comparison in recording.comparisons:
        yield from (deviation.ranks for deviation in comparison.deviations)
    for check in recording.checks:
        yield from (role.ranks for role in check.roles)
        yield from (variation.ranks for variation in check.variations)
    for hang in recording.hangs:
        yield from (hang.ranks, hang.missing_ranks)
        yield from (source.ranks for source in hang.sources)
        yield from (cause.ranks for cause in hang.causes)
        yield from (progress.ranks for progress in hang.progress)
        yield from (state.ranks for state in hang.states)
        for wait in hang.waits:
            yield from (wait.waiters, wait.missing)
        for divergence in hang.divergences:
            yield from (side.ranks for side in divergence.sides)


def _list_module_names(recording: Recording) -> Iterator[str | None]:
    for module in recording.modules:
        yield module.name
        yield from module.aliases
    for call in recording.collectives:
        yield from (call.owner, call.trigger)
    for coverage in recording.coverage:
        for op in coverage.ops:
            yield from op.modules
    for profile in recording.memory:
        yield from (use.module for use in profile.at_peak)
        yield from (sample.module for sample in profile.samples)
        yield from profile.allocations.modules if profile.allocations is not None else ()
    for parity in recording.parity:
        yield from (divergence.module for divergence in parity.divergences)
    yield from (value.name for value in recording.values)
    for comparison in recording.comparisons:
        yield from (deviation.name for deviation in comparison.deviations)
    for types in recording.types:
        yield from (tensor.module for tensor in types.tensors)


def _list_meshes(recording: Recording) -> Iterator[tuple[str, tuple[Axis, ...]]]:
    yield "$.run.axes", recording.run.axes
    for field in ("coverage", "layouts", "parity", "types", "parallel"):
        for index, record in enumerate(getattr(recording, field)):
            yield f"$.{field}[{index}].axes", record.axes


_DECODER = msgspec.json.Decoder(Recording)
_PIECE_SIZE = 4096  # records
# Details of ops whose verdict was `sharded` before there was the verdict `local`.
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
        path: Where to write: Parquet if the name ends in `.parquet`, else JSON, gzip-compressed if
            it ends in `.gz`.
        force: Overwrite a file that exists.

    Examples:
        >>> save(t.recording, "step.json.gz")
    """
    if not isinstance(recording, Recording):
        raise RecordingError(
            f"save() got {type(recording).__name__}, not a Recording. "
            f"Give it what load(), merge() or a trace's `recording` gives."
        )
    is_parquet = is_parquet_name(path)
    pieces = encode_parquet(recording) if is_parquet else encode_pieces(recording)
    return write_file(pieces, path, force=force)


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a recording or a stream; raises RecordingError if the file cannot be read.

    Args:
        path: A file written by `save` (JSON or Parquet, whatever its name) or by
            `trace(stream=…)`.

    Examples:
        >>> recording = load("step.json.gz")
        >>> len(recording.collectives)
    """
    name = os.fspath(path)
    data = read_file(path, start=b"{")
    if data.startswith(MAGIC):
        return _load_parquet(path)
    header = _find_header(data, name)
    if header.format not in (FORMAT, STREAM_FORMAT):
        raise RecordingError(_explain_foreign(name, header))
    is_stream = header.format == STREAM_FORMAT
    if not is_stream:
        check_schema(header, name)
    recording = read_stream(data, name) if is_stream else _decode(data, name)
    check_claims(recording, name, len(data))
    return _upgrade(recording, header.schema)


def open_parquet(path: str | os.PathLike[str]) -> tuple[ParquetRecording, Recording]:
    """Open a Parquet file without reading its collectives, and read everything else in it."""
    file = ParquetRecording(path)
    check_schema(file.header, file.name)
    rest = file.read_rest(_DECODER)
    check_claims(rest, file.name, file.num_bytes)
    return file, _upgrade(rest, file.header.schema)


def _load_parquet(path: str | os.PathLike[str]) -> Recording:
    file, rest = open_parquet(path)
    recording = replace(rest, collectives=tuple(file.list_calls()))
    check_claims(recording, file.name, file.num_bytes)
    return recording


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
        fact = f"the key 'format' is '{excerpt(header.format)}'"
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
            replace(
                explanation,
                stages=tuple(_without_zeros(stage, "total_ns") for stage in explanation.stages),
            )
            for explanation in recording.explanations
        ),
        schema=SCHEMA,
    )


def _without_zeros(record: _T, *names: str) -> _T:
    """The record with None for each of these fields that is zero."""
    return replace(record, **{name: None for name in names if getattr(record, name) == 0})


def _upgrade_module(module: Module) -> Module:
    marks: tuple[Mark, ...] = tuple(_without_zeros(mark, "num_parameters") for mark in module.marks)
    parameters = tuple(map(_upgrade_parameter, module.parameters))
    return replace(module, parameters=parameters, marks=marks)


def _upgrade_parameter(parameter: Parameter) -> Parameter:
    """Zero bytes of a parameter that has elements mean that they were not recorded."""
    has_bytes = parameter.global_bytes or not math.prod(parameter.shape)
    return parameter if has_bytes else _without_zeros(parameter, "global_bytes", "local_bytes")


def _upgrade_memory(profile: MemoryProfile) -> MemoryProfile:
    return _without_zeros(profile, "first_peak_bytes", "reserved_bytes", "needed_bytes")


def _upgrade_coverage(coverage: Coverage) -> Coverage:
    return replace(coverage, ops=tuple(map(_upgrade_op, coverage.ops)))


def _upgrade_op(op: OpCoverage) -> OpCoverage:
    is_local = op.verdict is OpVerdict.SHARDED and op.detail in _LOCAL_DETAILS
    return replace(_without_zeros(op, "flops"), verdict=OpVerdict.LOCAL if is_local else op.verdict)
