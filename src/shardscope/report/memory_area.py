"""Memory over a step as an area: what was held of each kind, one above the other, and the peak."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardscope.record import MemoryKind, MemoryProfile, MemorySample, Phase
from shardscope.report.units import format_bytes

__all__ = ["MemoryArea"]

_HEIGHT = 10
_MAX_CELLS = 120
_BLOCK = "█"
# A letter where there are no colours; the first of most names is not its own.
_LOOKS = {
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
    """Columns of blocks from the first sample to the last, as many as there is room for."""

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
        """For each cell the moment at which most was held; without one, the last before it."""
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
        """The kind that each block of a column is of, from below."""
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
            letter, style = _LOOKS[kind] if kind is not None else (" ", "")
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
                letter, style = _LOOKS[kind]
                line.append(_BLOCK if has_colours else letter, style)
                line.append(f" {kind.replace('_', ' ')}  ", "dim")
        return line
