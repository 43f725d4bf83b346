"""Data of the sharding view: parameters in columns, and a drawing for each layout."""

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
from shardscope.record.layer_names import fold_layers
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.html.page_views import Drawing, LayoutRow, Parameters, ShardingTable
from shardscope.report.html.shard_rectangles import Mesh, draw_layout, draw_placements
from shardscope.report.model.holdings import list_parameters, sum_holdings

_TIMES = re.compile(r" \(×\d+\)$")


class _Row(NamedTuple):
    """A parameter with its module and full name."""

    module: int
    name: str
    parameter: Parameter
    drawing: int
    ranks: str
    placement: str


def make_sharding(recording: Recording, index: Index) -> ShardingTable | None:
    """Make the view, or None if no parameters and no layouts were recorded."""
    drawings = _Drawings(recording)
    rows = list(_list_rows(recording, index, drawings))
    layouts = tuple(
        LayoutRow(name=layout.name or "Tensor", drawing=drawings.add(draw_layout(layout)))
        for layout in recording.layouts
    )
    if not rows and not layouts:
        return None
    holdings = sum_holdings(recording)
    return ShardingTable(
        parameters=_make_columns(rows, recording),
        drawings=drawings.all(),
        global_bytes=holdings and holdings.global_bytes,
        local_bytes=holdings and holdings.local_bytes,
        replicated_bytes=holdings and holdings.replicated_bytes,
        layouts=layouts,
    )


@final
class _Drawings:
    """The distinct drawings; parameters with the same placements share a drawing."""

    def __init__(self, recording: Recording) -> None:
        self._mesh = Mesh(recording, recording.run.axes)
        self._holders = _Holders(recording, self._mesh)
        self._drawn: dict[Drawing, int] = {}
        self._known: dict[object, int] = {}

    def add(self, drawing: Drawing) -> int:
        return self._drawn.setdefault(drawing, len(self._drawn))

    def all(self) -> tuple[Drawing, ...]:
        return tuple(self._drawn)

    def draw(self, module: Module, parameter: Parameter) -> int:
        if not parameter.placements or "Varying" in parameter.placements:
            return NOWHERE
        among = self._holders.find(module, parameter)
        key = (parameter.shape, parameter.placements, parameter.axes, among)
        if key not in self._known:
            drawing = draw_placements(
                parameter.shape, parameter.placements, parameter.axes, self._mesh, among=among
            )
            self._known[key] = self.add(drawing)
        return self._known[key]


@final
class _Holders:
    """Finds ranks that may hold a part of a parameter: a pipeline stage has its own modules."""

    def __init__(self, recording: Recording, mesh: Mesh) -> None:
        self._world_size = recording.run.world_size
        self._mesh = mesh
        self._forms: defaultdict[str, set[tuple[RankSpan, ...]]] = defaultdict(set)
        self._has_all = count_ranks(recording.run.ranks) == recording.run.world_size
        for module in recording.modules:
            self._forms[module.name].add(module.ranks)
        self._cache: dict[object, frozenset[int] | None] = {}

    def find(self, module: Module, parameter: Parameter) -> frozenset[int] | None:
        """Return the ranks, or None for all. Cached, as modules share few sets of ranks."""
        if not self._mesh.is_numbered:
            return None
        first = next(iter(module.ranks), RankSpan(0)).first
        key = frozenset(self._forms[module.name]) if self._has_all else (first, parameter.axes)
        if key not in self._cache:
            self._cache[key] = self._find_holders(module, parameter, first)
        return self._cache[key]

    def _find_holders(
        self, module: Module, parameter: Parameter, first: int
    ) -> frozenset[int] | None:
        if not self._has_all:
            return self._mesh.find_neighbours(first, parameter.axes)
        forms = self._forms[module.name]
        ranks = frozenset(rank for spans in forms for rank in expand_ranks(spans))
        return None if len(ranks) == self._world_size else ranks


def _list_rows(recording: Recording, index: Index, drawings: _Drawings) -> Iterator[_Row]:
    for module, parameter, name in list_parameters(recording):
        yield _Row(
            index.module(module.name),
            name,
            parameter,
            drawings.draw(module, parameter),
            format_ranks(module.ranks),
            _describe_placement(parameter, recording.run.world_size),
        )


def _describe_placement(parameter: Parameter, world_size: int) -> str:
    if parameter.placements:
        placed = zip(parameter.axes, parameter.placements, strict=False)
        words = ", ".join(f"{axis}: {placement}" for axis, placement in placed)
        return f"{words} (annotated with spmd_types)" if parameter.is_annotated else words
    if parameter.fsdp_group is not None:
        return "flattened with the others of its FSDP group"
    return "not distributed" if world_size > 1 else "not sharded"


def _make_columns(rows: Sequence[_Row], recording: Recording) -> Parameters:
    flags = _gather_flags(recording)
    parameters = [row.parameter for row in rows]
    return Parameters(
        module=tuple(row.module for row in rows),
        name=tuple(row.name for row in rows),
        shape=tuple(_format_shape(parameter.shape) for parameter in parameters),
        local_shape=tuple(_format_shape(parameter.local_shape) for parameter in parameters),
        dtype=tuple(parameter.dtype for parameter in parameters),
        drawing=tuple(row.drawing for row in rows),
        placement=tuple(row.placement for row in rows),
        global_bytes=tuple(parameter.global_bytes for parameter in parameters),
        local_bytes=tuple(parameter.local_bytes for parameter in parameters),
        is_trainable=tuple(parameter.is_trainable for parameter in parameters),
        is_buffer=tuple(parameter.is_buffer for parameter in parameters),
        rule=tuple(parameter.rule or "" for parameter in parameters),
        fsdp_group=tuple(_name_group(parameter) for parameter in parameters),
        alias_group=tuple(parameter.alias_group or "" for parameter in parameters),
        live_name=tuple(parameter.live_name or "" for parameter in parameters),
        checkpoint_key=tuple(parameter.checkpoint_key or "" for parameter in parameters),
        ranks=tuple(row.ranks for row in rows),
        flags=tuple(", ".join(_find_flags(row.name, flags)) for row in rows),
    )


def _format_shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "a number"


def _name_group(parameter: Parameter) -> str:
    if parameter.fsdp_group is None:
        return ""
    return parameter.fsdp_group or "(root)"


def _gather_flags(recording: Recording) -> dict[str, dict[str, None]]:
    """Map names or patterns of parameters to the rules of findings about them."""
    flags: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for finding in recording.findings:
        for name in finding.subject.split(", "):
            flags[_TIMES.sub("", name)][finding.rule] = None
    return dict(flags)


def _find_flags(name: str, flags: dict[str, dict[str, None]]) -> Iterator[str]:
    yield from {**flags.get(name, {}), **flags.get(fold_layers(name), {})}
