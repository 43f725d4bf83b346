"""Parameters in columns, and a drawing for each way in which they lie."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from shardscope.record import (
    Module,
    Parameter,
    RankSpan,
    Recording,
    count_ranks,
    expand_ranks,
    format_ranks,
)
from shardscope.report.holdings import list_parameters, sum_holdings
from shardscope.report.page.index import NOWHERE, Index
from shardscope.report.page.sharding import Drawing, LayoutRow, Parameters, ShardingTable
from shardscope.report.page.views.drawings import draw_layout, draw_placements
from shardscope.report.page.views.holders import Mesh

__all__ = ["make_sharding"]

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
_TIMES = re.compile(r" \(×\d+\)$")


class _Row(NamedTuple):
    """A parameter, and where it is to be found."""

    module: int
    name: str
    parameter: Parameter
    drawing: int
    ranks: str
    placement: str


def make_sharding(recording: Recording, index: Index) -> ShardingTable | None:
    """None where no parameter and no layout is known."""
    drawings = _Drawings(recording)
    rows = list(_list_rows(recording, index, drawings))
    layouts = tuple(
        LayoutRow(name=one.name or "Tensor", drawing=drawings.add(draw_layout(one)))
        for one in recording.layouts
    )
    if not rows and not layouts:
        return None
    held = sum_holdings(recording)
    return ShardingTable(
        parameters=_make_columns(rows, recording),
        drawings=drawings.all(),
        global_bytes=held.global_bytes,
        local_bytes=held.local_bytes,
        replicated_bytes=held.replicated_bytes,
        layouts=layouts,
    )


@final
class _Drawings:
    """Each drawing once, however many parameters lie so."""

    def __init__(self, recording: Recording) -> None:
        self._run = recording.run
        self._mesh = Mesh(recording, recording.run.axes)
        self._drawn: dict[Drawing, int] = {}
        self._known: dict[object, int] = {}
        self._has_all = count_ranks(recording.run.ranks) == recording.run.world_size
        self._holders: defaultdict[str, set[int]] = defaultdict(set)
        if self._has_all:
            for module in recording.modules:
                self._holders[module.name].update(expand_ranks(module.ranks))

    def add(self, drawing: Drawing) -> int:
        return self._drawn.setdefault(drawing, len(self._drawn))

    def all(self) -> tuple[Drawing, ...]:
        return tuple(self._drawn)

    def draw(self, module: Module, one: Parameter) -> int:
        if not one.placements:
            return NOWHERE
        among = self._find_holders(module, one)
        key = (one.shape, one.placements, one.axes, among)
        if key not in self._known:
            drawing = draw_placements(one.shape, one.placements, one.axes, self._mesh, among=among)
            self._known[key] = self.add(drawing)
        return self._known[key]

    def _find_holders(self, module: Module, one: Parameter) -> frozenset[int] | None:
        """Ranks that may hold a part: a stage of a pipeline has modules of its own."""
        if self._has_all:
            holders = self._holders[module.name]
            return None if len(holders) == self._run.world_size else frozenset(holders)
        return self._mesh.find_neighbours(next(iter(module.ranks), RankSpan(0)).first, one.axes)


def _list_rows(recording: Recording, index: Index, drawings: _Drawings) -> Iterator[_Row]:
    for module, one, name in list_parameters(recording):
        yield _Row(
            index.module(module.name),
            name,
            one,
            drawings.draw(module, one),
            format_ranks(module.ranks),
            _describe_placement(one, recording.run.world_size),
        )


def _describe_placement(one: Parameter, world_size: int) -> str:
    if one.placements:
        placed = zip(one.axes, one.placements, strict=False)
        return ", ".join(f"{axis}: {placement}" for axis, placement in placed)
    if one.fsdp_group is not None:
        return "flat, with others of its FSDP group"
    return "not distributed" if world_size > 1 else "whole"


def _make_columns(rows: Sequence[_Row], recording: Recording) -> Parameters:
    flags = _gather_flags(recording)
    ones = [row.parameter for row in rows]
    return Parameters(
        module=tuple(row.module for row in rows),
        name=tuple(row.name for row in rows),
        shape=tuple(_format_shape(one.shape) for one in ones),
        local_shape=tuple(_format_shape(one.local_shape) for one in ones),
        dtype=tuple(one.dtype for one in ones),
        drawing=tuple(row.drawing for row in rows),
        placement=tuple(row.placement for row in rows),
        global_bytes=tuple(one.global_bytes for one in ones),
        local_bytes=tuple(one.local_bytes for one in ones),
        is_trainable=tuple(one.is_trainable for one in ones),
        is_buffer=tuple(one.is_buffer for one in ones),
        rule=tuple(one.rule or "" for one in ones),
        fsdp_group=tuple(_name_group(one) for one in ones),
        alias_group=tuple(one.alias_group or "" for one in ones),
        live_name=tuple(one.live_name or "" for one in ones),
        checkpoint_key=tuple(one.checkpoint_key or "" for one in ones),
        ranks=tuple(row.ranks for row in rows),
        flags=tuple(", ".join(_find_flags(row.name, flags)) for row in rows),
    )


def _format_shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "a number"


def _name_group(one: Parameter) -> str:
    if one.fsdp_group is None:
        return ""
    return one.fsdp_group or "(root)"


def _gather_flags(recording: Recording) -> dict[str, dict[str, None]]:
    """Rules of findings by the names of parameters, or the patterns, that they are about."""
    flags: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for finding in recording.findings:
        for name in finding.subject.split(", "):
            flags[_TIMES.sub("", name)][finding.rule] = None
    return dict(flags)


def _find_flags(name: str, flags: dict[str, dict[str, None]]) -> Iterator[str]:
    yield from {**flags.get(name, {}), **flags.get(_LAYER.sub("*", name), {})}
