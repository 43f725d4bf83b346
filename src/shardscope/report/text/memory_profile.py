"""A rank's memory during a step: by kind, by module, and over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import final

from msgspec import Struct
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from shardscope.record import MemoryKind, MemoryProfile, MemorySample, Phase, Recording
from shardscope.record.layer_names import fold_layers
from shardscope.record.units import format_bytes, plural
from shardscope.report.model.memory_peaks import find_worst, most_bytes
from shardscope.report.text.style import draw_level, format_bar, format_share, make_text, make_title
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row, narrower_layouts

_ESTIMATE = "estimated: the step ran on tensors without data"
_LIVE = "estimated from the ops of a step of the training run"

_NUM_MODULES = 12
_NUM_CELLS = 64
_LETTERS = {
    Phase.FORWARD: "f",
    Phase.BACKWARD: "b",
    Phase.RECOMPUTE: "r",
    Phase.OPTIMIZER: "o",
    Phase.OUTSIDE: " ",
}
_KIND_COLUMNS = {
    "kind": Column("at the peak", ColumnStyle.NAME, 15),
    "bytes": Column("bytes"),
    "share": Column("share"),
    "bar": Column("", ColumnStyle.NAME, 8),
}
_MODULE_COLUMNS: dict[str, Column] = {
    "module": Column("module", ColumnStyle.NAME, 24),
    **{str(kind): Column(kind.replace("_", " ")) for kind in MemoryKind},
    "bytes": Column("in all"),
}


def render_memory(
    recording: Recording, *, is_folded: bool = True, has_course: bool = True
) -> Iterator[RenderableType]:
    """Render the rank that needs most memory in full, and how other ranks compare."""
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
        yield _MemoryLine(profile)


def describe_basis(profile: MemoryProfile) -> str:
    """Describe where the figures of memory come from."""
    return _LIVE if profile.is_live else _ESTIMATE


def _describe_ranks(profiles: Sequence[MemoryProfile]) -> str:
    worst = find_worst(profiles)
    if len(profiles) == 1:
        return f"rank {worst.rank}; {describe_basis(worst)}"
    least = format_bytes(min(map(most_bytes, profiles)))
    ranks = f"rank {worst.rank}, the most of {len(profiles):,} ranks (least: {least})"
    return f"{ranks}; {describe_basis(worst)}"


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
    """State whether the rank fits in the device's memory, and by how much."""
    room = format_bytes(device)
    if needed is None:
        return Text(f"whether it fits in {room} is not known: what it needs was not recorded")
    rest = format_bytes(abs(device - needed))
    text = Text(f"needs {format_bytes(needed)} including the CUDA context: ")
    if needed > device:
        return text.append(f"does not fit in {room}, {rest} too much", "bold red")
    return text.append(f"fits in {room}, {rest} free", "bold green")


def _render_kinds(profile: MemoryProfile) -> RenderableType:
    rows: list[Row] = []
    for kind in MemoryKind:
        num_bytes = sum(use.num_bytes for use in profile.at_peak if use.kind is kind)
        if num_bytes:
            rows.append(
                {
                    "kind": kind.replace("_", " "),
                    "bytes": format_bytes(num_bytes),
                    "share": format_share(num_bytes, profile.peak_bytes),
                    "bar": format_bar(num_bytes, profile.peak_bytes),
                }
            )
    return Grid(_KIND_COLUMNS, rows, narrower_layouts(list(_KIND_COLUMNS), "bar", "share"))


class ModuleUse(Struct):
    """Memory of one module, or of several that differ only in their numbers."""

    names: dict[str, None]
    by_kind: dict[MemoryKind, int]

    def total(self) -> int:
        """Sum all kinds."""
        return sum(self.by_kind.values())


def _render_modules(profile: MemoryProfile, *, is_folded: bool) -> RenderableType:
    uses = sorted(gather_module_uses(profile, is_folded).values(), key=lambda use: -use.total())
    shown = uses if not is_folded else uses[:_NUM_MODULES]
    rows: list[Row] = [
        {
            "module": _name_module(use),
            **{
                kind: format_bytes(use.by_kind[kind]) if use.by_kind.get(kind) else "·"
                for kind in MemoryKind
                if any(kind in shown_use.by_kind for shown_use in shown)
            },
            "bytes": format_bytes(use.total()),
        }
        for use in shown
    ]
    rest = sum(use.total() for use in uses[len(shown) :])
    more = plural(len(uses) - len(shown), "more row")
    note = f"… and {more}: {format_bytes(rest)}" if rest else ""
    kinds = [kind for kind in MemoryKind if any(kind in use.by_kind for use in shown)]
    kinds.sort(key=lambda kind: sum(use.by_kind.get(kind, 0) for use in shown))
    layouts = narrower_layouts(
        ["module", *sorted(kinds, key=list(MemoryKind).index), "bytes"], *kinds
    )
    return Grid(_MODULE_COLUMNS, rows, layouts, note=note)


def gather_module_uses(profile: MemoryProfile, is_folded: bool) -> dict[str | None, ModuleUse]:
    """Sum memory at the peak by module, None for no module; `layers.*.wq` if layers are folded."""
    uses: dict[str | None, ModuleUse] = {}
    for use in profile.at_peak:
        key = use.module
        if key is not None and is_folded:
            key = fold_layers(key)
        entry = uses.setdefault(key, ModuleUse({}, {}))
        entry.names[use.module or ""] = None
        entry.by_kind[use.kind] = entry.by_kind.get(use.kind, 0) + use.num_bytes
        if use.module is None:
            entry.names = {}
    return uses


def _name_module(use: ModuleUse) -> Text:
    if not use.names:
        return Text("outside any module", "dim")
    name = next(iter(use.names))
    if len(use.names) == 1:
        return make_text(name or "the model itself")
    return make_text(fold_layers(name)).append(f" ×{len(use.names)}", "dim")


def _describe_letters(profile: MemoryProfile) -> str:
    met = {sample.phase for sample in profile.samples}
    words = (f"{letter} {phase}" for phase, letter in _LETTERS.items() if phase in met)
    return ", ".join(word for word in words if not word.startswith(" "))


@final
class _MemoryLine:
    """A row of bars, one of phases, and one that marks the peak, as wide as the terminal allows."""

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
        bars, phases, num_bytes, phase = "", "", 0, Phase.OUTSIDE
        for cell in cells:
            if cell:
                top = max(cell, key=lambda sample: sum(sample.num_bytes))
                num_bytes, phase = sum(top.num_bytes), top.phase
            bars += draw_level(num_bytes, self._profile.peak_bytes)
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


_HEIGHT = 10
_MAX_CELLS = 120
_BLOCK = "█"
# A letter for terminals without colours; initials are not unique.
_KIND_STYLES = {
    MemoryKind.PARAMETERS: ("P", "blue"),
    MemoryKind.GRADIENTS: ("G", "magenta"),
    MemoryKind.OPTIMIZER_STATE: ("O", "yellow"),
    MemoryKind.ACTIVATIONS: ("A", "green"),
    MemoryKind.GATHERED: ("F", "cyan"),
    MemoryKind.COMMUNICATION: ("C", "red"),
    MemoryKind.TEMPORARIES: ("t", "bright_black"),
}
_PHASES = {
    Phase.FORWARD: "f",
    Phase.BACKWARD: "b",
    Phase.RECOMPUTE: "r",
    Phase.OPTIMIZER: "o",
    Phase.OUTSIDE: " ",
}


@final
class MemoryArea:
    """Stacked columns of memory by kind over time, as many as fit."""

    def __init__(self, profile: MemoryProfile) -> None:
        self._profile = profile
        self._kinds = list(MemoryKind)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        margin = len(format_bytes(self._profile.peak_bytes)) + 1
        num_cells = max(1, min(_MAX_CELLS, options.max_width - margin))
        cells = self._choose_samples(num_cells)
        has_colours = console.color_system is not None and not console.no_color
        columns = [self._stack(sample) for sample in cells]
        for row in range(_HEIGHT, 0, -1):
            yield self._draw_row(row, columns, margin, has_colours=has_colours)
        phases = "".join(_PHASES[cell.phase] if cell else " " for cell in cells)
        yield Text(" " * margin + phases, "dim", no_wrap=True)
        yield Text(self._mark_peak(num_cells, margin, options.max_width), "bold", no_wrap=True)
        yield self._explain(columns, has_colours=has_colours)

    def _choose_samples(self, num_cells: int) -> list[MemorySample | None]:
        """Return for each column its largest sample, or the previous sample if it has none."""
        tops: list[MemorySample | None] = [None] * num_cells
        for sample in self._profile.samples:
            cell = self._find_cell(sample.order, num_cells)
            top = tops[cell]
            if top is None or sum(sample.num_bytes) > sum(top.num_bytes):
                tops[cell] = sample
        last = None
        for cell, top in enumerate(tops):
            last = tops[cell] = top or last
        return tops

    def _find_cell(self, order: int, num_cells: int) -> int:
        first, last = self._profile.samples[0].order, self._profile.samples[-1].order
        cell = (order - first) * num_cells // max(1, last - first + 1)
        return min(max(0, cell), num_cells - 1)

    def _stack(self, sample: MemorySample | None) -> list[MemoryKind]:
        """Return the kind of each block in a column, from the bottom."""
        if sample is None:
            return []
        column: list[MemoryKind] = []
        below = 0
        for kind, num_bytes in zip(self._kinds, sample.num_bytes, strict=False):
            below += num_bytes
            top = round(below * _HEIGHT / max(1, self._profile.peak_bytes))
            column += [kind] * (min(top, _HEIGHT) - len(column))
        return column

    def _draw_row(
        self, row: int, columns: Sequence[list[MemoryKind]], margin: int, *, has_colours: bool
    ) -> Text:
        label = {_HEIGHT: self._profile.peak_bytes, _HEIGHT // 2: self._profile.peak_bytes // 2}
        name = format_bytes(label[row]) if row in label else ""
        line = Text(no_wrap=True).append(name.rjust(margin - 1) + " ", "dim")
        blocks = (column[row - 1] if row <= len(column) else None for column in columns)
        for kind, run in groupby(blocks):
            letter, style = _KIND_STYLES[kind] if kind is not None else (" ", "")
            block = _BLOCK if has_colours and kind is not None else letter
            line.append(block * len(list(run)), style)
        return line

    def _mark_peak(self, num_cells: int, margin: int, width: int) -> str:
        cell = margin + self._find_cell(self._profile.peak_order, num_cells)
        words = f"peak, {format_bytes(self._profile.peak_bytes)}"
        if cell + len(words) + 2 <= width:
            return f"{' ' * cell}▲ {words}"
        return f"{words} ▲".rjust(cell + 1)

    def _explain(self, columns: Sequence[list[MemoryKind]], *, has_colours: bool) -> Text:
        met = {kind for column in columns for kind in column}
        line = Text()
        for kind in reversed(self._kinds):
            if kind in met:
                letter, style = _KIND_STYLES[kind]
                line.append(_BLOCK if has_colours else letter, style)
                line.append(f" {kind.replace('_', ' ')}  ", "dim")
        return line
