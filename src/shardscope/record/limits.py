"""Limits on the ranks and meshes of a file: a few bytes can name a million ranks to process."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardscope.errors import RecordingError
from shardscope.record.header import brief
from shardscope.record.ranks import MAX_RANKS, RankSpan, count_ranks
from shardscope.record.recording import Recording
from shardscope.record.source import Axis

__all__ = ["check_claims"]

# Ranks that a file of any size may name, and how many more per byte.
_RECORDED = (16_384, 1)
_IN_MODULES = (65_536, 16)
_ELSEWHERE = (2 * MAX_RANKS, 16)

# Deeper than any model: reading a name costs the square of its number of parts.
_MAX_PARTS = 512

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
    for module_name in set(_list_module_names(recording)):
        if module_name is not None and module_name.count(".") >= _MAX_PARTS:
            raise RecordingError(
                f"'{name}' names a module '{brief(module_name)}' that is nested more than "
                f"{_MAX_PARTS} deep. {_REMEDY}"
            )
    modules = {module.ranks for module in recording.modules}
    others = {group.ranks for group in recording.groups} | set(_list_elsewhere(recording))
    for place, found, (num_free, per_byte) in (
        ("$.run.ranks", {recording.run.ranks}, _RECORDED),
        ("$.modules", modules, _IN_MODULES),
        ("its groups, layouts and comparisons", others, _ELSEWHERE),
    ):
        num_named = sum(map(count_ranks, found))
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
            f"'{name}' names {num_ranks} ranks at {place}, some of them twice, for its world size "
            f"is {world_size}. {_REMEDY}"
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
    for parity in recording.parity:
        yield from (divergence.module for divergence in parity.divergences)


def _list_meshes(recording: Recording) -> Iterator[tuple[str, tuple[Axis, ...]]]:
    yield "$.run.axes", recording.run.axes
    for field in ("coverage", "layouts", "parity", "parallel"):
        for index, record in enumerate(getattr(recording, field)):
            yield f"$.{field}[{index}].axes", record.axes
