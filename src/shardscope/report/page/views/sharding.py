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
        global_bytes=held and held.global_bytes,
        local_bytes=held and held.local_bytes,
        replicated_bytes=held and held.replicated_bytes,
        layouts=layouts,
    )


@final
class _Drawings:
    """Each drawing once, however many parameters lie so."""

    def __init__(self, recording: Recording) -> None:
        self._mesh = Mesh(recording, recording.run.axes)
        self._holders = _Holders(recording, self._mesh)
        self._drawn: dict[Drawing, int] = {}
        self._known: dict[object, int] = {}

    def add(self, drawing: Drawing) -> int:
        return self._drawn.setdefault(drawing, len(self._drawn))

    def all(self) -> tuple[Drawing, ...]:
        return tuple(self._drawn)

    def draw(self, module: Module, one: Parameter) -> int:
        if not one.placements:
            return NOWHERE
        among = self._holders.find(module, one)
        key = (one.shape, one.placements, one.axes, among)
        if key not in self._known:
            drawing = draw_placements(one.shape, one.placements, one.axes, self._mesh, among=among)
            self._known[key] = self.add(drawing)
        return self._known[key]


@final
class _Holders:
    """Ranks that may hold a part of a parameter: a stage of a pipeline has modules of its own."""

    def __init__(self, recording: Recording, mesh: Mesh) -> None:
        self._world_size = recording.run.world_size
        self._mesh = mesh
        self._forms: defaultdict[str, set[tuple[RankSpan, ...]]] = defaultdict(set)
        self._has_all = count_ranks(recording.run.ranks) == recording.run.world_size
        for module in recording.modules:
            self._forms[module.name].add(module.ranks)
        self._found: dict[object, frozenset[int] | None] = {}

    def find(self, module: Module, one: Parameter) -> frozenset[int] | None:
        """None where that is all of them. Modules share few sets of ranks: each is made once."""
        if not self._mesh.is_numbered:
            return None
        first = next(iter(module.ranks), RankSpan(0)).first
        key = frozenset(self._forms[module.name]) if self._has_all else (first, one.axes)
        if key not in self._found:
            self._found[key] = self._look(module, one, first)
        return self._found[key]

    def _look(self, module: Module, one: Parameter, first: int) -> frozenset[int] | None:
        if not self._has_all:
            return self._mesh.find_neighbours(first, one.axes)
        forms = self._forms[module.name]
        ranks = frozenset(rank for spans in forms for rank in expand_ranks(spans))
        return None if len(ranks) == self._world_size else ranks


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
        return "flattened with the others of its FSDP group"
    return "not distributed" if world_size > 1 else "not sharded"


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
