"""What a rank's memory holds during a step: for what, whose, and when most."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import final

from msgspec import Struct
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from shardscope.record import MemoryKind, MemoryProfile, MemorySample, Phase, Recording
from shardscope.report.grid import Column, Grid, Look, Row, leave_out
from shardscope.report.layout import (
    draw_level,
    format_bar,
    format_share,
    make_text,
    make_title,
    plural,
)
from shardscope.report.units import format_bytes

__all__ = ["ESTIMATE", "describe_room", "find_worst", "most_bytes", "render_memory"]

ESTIMATE = "estimated: the step ran on tensors without data"
"""Where all figures of memory come from."""

_NUM_MODULES = 12
_NUM_CELLS = 64
_LETTERS = {
    Phase.FORWARD: "f",
    Phase.BACKWARD: "b",
    Phase.RECOMPUTE: "r",
    Phase.OPTIMIZER: "o",
    Phase.OUTSIDE: " ",
}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_KIND_COLUMNS = {
    "kind": Column("at the peak", Look.NAME, 15),
    "bytes": Column("bytes"),
    "share": Column("share"),
    "bar": Column("", Look.NAME, 8),
}
_MODULE_COLUMNS: dict[str, Column] = {
    "module": Column("module", Look.NAME, 24),
    **{str(kind): Column(kind.replace("_", " ")) for kind in MemoryKind},
    "bytes": Column("in all"),
}


def render_memory(
    recording: Recording, *, is_folded: bool = True, has_course: bool = True
) -> Iterator[RenderableType]:
    """The rank that needs most in full, and how the others compare."""
    if not recording.memory:
        return
    profile = find_worst(recording.memory)
    yield make_title("Memory", _describe_ranks(recording.memory))
    yield from _render_peak(profile)
    yield Text()
    yield _render_kinds(profile)
    yield make_title("Memory by module", "at the peak, excluding children; ×n: together")
    yield _render_modules(profile, is_folded=is_folded)
    if has_course and len(profile.samples) > 1:
        yield make_title("Memory over the step", _describe_letters(profile))
        yield _Course(profile)


def find_worst(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """The rank that needs most."""
    return max(profiles, key=most_bytes)


def most_bytes(profile: MemoryProfile) -> int:
    """Of all steps, the first among them if it was recorded."""
    return max(profile.peak_bytes, profile.first_peak_bytes or 0)


def _describe_ranks(profiles: Sequence[MemoryProfile]) -> str:
    worst = find_worst(profiles)
    if len(profiles) == 1:
        return f"rank {worst.rank}; {ESTIMATE}"
    least = format_bytes(min(map(most_bytes, profiles)))
    ranks = f"rank {worst.rank}, the most of {len(profiles):,} ranks (least: {least})"
    return f"{ranks}; {ESTIMATE}"


def _render_peak(profile: MemoryProfile) -> Iterator[RenderableType]:
    line = Text().append(format_bytes(profile.peak_bytes), "bold").append(" at the peak, in ")
    line.append(str(profile.peak_phase))
    if profile.peak_module is not None:
        line.append(" of ").append_text(make_text(profile.peak_module or "the model", width=80))
    yield line
    facts = []
    if profile.first_peak_bytes not in (None, profile.peak_bytes):
        facts.append(f"first step: {format_bytes(profile.first_peak_bytes or 0)}")
    if profile.reserved_bytes is not None:
        facts.append(f"reserved by the allocator: {format_bytes(profile.reserved_bytes)}")
    if facts:
        yield Text(" · ".join(facts), "dim")
    if profile.device_bytes is not None:
        yield describe_room(profile.device_bytes, profile.needed_bytes)


def describe_room(device: int, needed: int | None) -> Text:
    """Whether it fits, and by how much."""
    room = format_bytes(device)
    if needed is None:
        return Text(f"whether it fits in {room} is not known: what it needs was not recorded")
    rest = format_bytes(abs(device - needed))
    figures = Text(f"needs {format_bytes(needed)} including the CUDA context: ")
    if needed > device:
        return figures.append(f"does not fit in {room}, {rest} too much", "bold red")
    return figures.append(f"fits in {room}, {rest} free", "bold green")


def _render_kinds(profile: MemoryProfile) -> RenderableType:
    rows: list[Row] = []
    for kind in MemoryKind:
        held = sum(use.num_bytes for use in profile.at_peak if use.kind is kind)
        if held:
            rows.append(
                {
                    "kind": kind.replace("_", " "),
                    "bytes": format_bytes(held),
                    "share": format_share(held, profile.peak_bytes),
                    "bar": format_bar(held, profile.peak_bytes),
                }
            )
    return Grid(_KIND_COLUMNS, rows, leave_out(list(_KIND_COLUMNS), "bar", "share"))


class _Held(Struct):
    """What one module, or several that differ by their numbers alone, hold."""

    names: dict[str, None]
    by_kind: dict[MemoryKind, int]

    def total(self) -> int:
        return sum(self.by_kind.values())


def _render_modules(profile: MemoryProfile, *, is_folded: bool) -> RenderableType:
    held = sorted(_gather(profile, is_folded).values(), key=lambda one: -one.total())
    shown = held if not is_folded else held[:_NUM_MODULES]
    rows: list[Row] = [
        {
            "module": _name_module(one),
            **{
                kind: format_bytes(one.by_kind[kind]) if one.by_kind.get(kind) else "·"
                for kind in MemoryKind
                if any(kind in other.by_kind for other in shown)
            },
            "bytes": format_bytes(one.total()),
        }
        for one in shown
    ]
    rest = sum(one.total() for one in held[len(shown) :])
    more = plural(len(held) - len(shown), "more row")
    note = f"… and {more}: {format_bytes(rest)}" if rest else ""
    kinds = [kind for kind in MemoryKind if any(kind in one.by_kind for one in shown)]
    kinds.sort(key=lambda kind: sum(one.by_kind.get(kind, 0) for one in shown))
    layouts = leave_out(["module", *sorted(kinds, key=list(MemoryKind).index), "bytes"], *kinds)
    return Grid(_MODULE_COLUMNS, rows, layouts, note=note)


def _gather(profile: MemoryProfile, is_folded: bool) -> dict[str | None, _Held]:
    held: dict[str | None, _Held] = {}
    for use in profile.at_peak:
        key = use.module
        if key is not None and is_folded:
            key = _NUMBER.sub("*", key)
        one = held.setdefault(key, _Held({}, {}))
        one.names[use.module or ""] = None
        one.by_kind[use.kind] = one.by_kind.get(use.kind, 0) + use.num_bytes
        if use.module is None:
            one.names = {}
    return held


def _name_module(held: _Held) -> Text:
    if not held.names:
        return Text("outside any module", "dim")
    name = next(iter(held.names))
    if len(held.names) == 1:
        return make_text(name or "the model itself")
    return make_text(_NUMBER.sub("*", name)).append(f" ×{len(held.names)}", "dim")


def _describe_letters(profile: MemoryProfile) -> str:
    met = {sample.phase for sample in profile.samples}
    words = (f"{letter} {phase}" for phase, letter in _LETTERS.items() if phase in met)
    return ", ".join(word for word in words if not word.startswith(" "))


@final
class _Course:
    """A line of bars, one of phases, and one that marks the peak, as wide as there is room."""

    def __init__(self, profile: MemoryProfile) -> None:
        self._profile = profile

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        num_cells = max(1, min(_NUM_CELLS, options.max_width))
        bars, phases = self._draw(num_cells)
        yield Text(bars, "cyan", no_wrap=True)
        yield Text(phases, "dim", no_wrap=True)
        yield Text(self._mark_peak(num_cells, options.max_width), "bold", no_wrap=True)

    def _draw(self, num_cells: int) -> tuple[str, str]:
        cells: list[list[MemorySample]] = [[] for _ in range(num_cells)]
        for sample in self._profile.samples:
            cells[self._find_cell(sample.order, num_cells)].append(sample)
        bars, phases, held, phase = "", "", 0, Phase.OUTSIDE
        for cell in cells:
            if cell:
                top = max(cell, key=lambda sample: sum(sample.num_bytes))
                held, phase = sum(top.num_bytes), top.phase
            bars += draw_level(held, self._profile.peak_bytes)
            phases += _LETTERS[phase]
        return bars, phases

    def _mark_peak(self, num_cells: int, width: int) -> str:
        cell = self._find_cell(self._profile.peak_order, num_cells)
        size = format_bytes(self._profile.peak_bytes)
        if cell + len(size) + 2 <= width:
            return f"{' ' * cell}▲ {size}"
        return f"{size} ▲".rjust(cell + 1)

    def _find_cell(self, order: int, num_cells: int) -> int:
        first, last = self._profile.samples[0].order, self._profile.samples[-1].order
        cell = (order - first) * num_cells // max(1, last - first + 1)
        return min(max(0, cell), num_cells - 1)
