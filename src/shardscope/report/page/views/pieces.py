"""Parts of a tensor as rectangles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, Self, final

from msgspec import Struct

from shardscope.record import Stretches
from shardscope.report.layout import plural
from shardscope.report.page.sharding import Piece

__all__ = ["MAX_PIECES", "Part", "Sides", "cut_pieces", "tell_sizes"]

MAX_PIECES = 64
_DIGITS = 6  # of a share: a millionth of a screen


class Part(Struct, frozen=True):
    """What some ranks hold: stretches of each dim."""

    ranks: str
    stretches: tuple[Stretches, ...]

    def length(self, dim: int) -> int:
        """How much of a dim it has."""
        return sum(stop - start for start, stop in self.stretches[dim])


class _Extent(NamedTuple):
    """From where to where a rectangle reaches, in shares and as an index."""

    start: float
    length: float
    written: str


@final
class Sides:
    """Which dims a picture shows, from left to right and from top to bottom; None is no dim."""

    def __init__(
        self, shape: tuple[int, ...], *, vertical: int | None, horizontal: int | None
    ) -> None:
        self.shape = shape
        self.vertical = vertical
        self.horizontal = horizontal

    @classmethod
    def choose(cls, shape: tuple[int, ...], parts: Sequence[Part]) -> Self:
        """The last two dims that are cut; where there are not two, the last dims beside them."""
        dims = range(len(shape))
        cut = [dim for dim in dims if len({part.stretches[dim] for part in parts}) > 1]
        others = [dim for dim in dims if dim not in cut]
        chosen = sorted([*cut[-2:], *others[::-1]][:2]) if len(cut) < 2 else cut[-2:]
        vertical, horizontal = [None, None, *chosen][-2:]
        return cls(shape, vertical=vertical, horizontal=horizontal)

    def name(self, dim: int | None) -> str:
        """`dim 1: 4096`."""
        return "" if dim is None else f"dim {dim}: {self.shape[dim]}"

    def extents(self, part: Part, dim: int | None) -> Iterator[_Extent]:
        """Where the part lies along a side."""
        if dim is None:
            yield _Extent(0.0, 1.0, "")
            return
        size = self.shape[dim]
        for start, stop in part.stretches[dim]:
            if start < stop:
                share = (stop - start) / size
                yield _Extent(start / size, share, _write_index(((start, stop),), size))

    def write_indices(self, part: Part, rows: _Extent, columns: _Extent) -> str:
        """`[0:512, :]`, as Python would."""
        shown = {self.vertical: rows.written, self.horizontal: columns.written}
        written = [
            shown.get(dim) or _write_index(part.stretches[dim], size)
            for dim, size in enumerate(self.shape)
        ]
        return f"[{', '.join(written)}]"


def _write_index(stretches: Stretches, size: int) -> str:
    if stretches == ((0, size),):
        return ":"
    return " and ".join(f"{start}:{stop}" for start, stop in stretches)


def cut_pieces(sides: Sides, parts: Sequence[Part]) -> tuple[Piece, ...]:
    """A rectangle for each stretch of each part; those that fall on one another are one."""
    pieces: dict[tuple[_Extent, _Extent], tuple[int, str, list[str]]] = {}
    for color, part in enumerate(parts):
        if any(part.length(dim) == 0 for dim in range(len(sides.shape))):
            continue
        for rows, columns in product(
            sides.extents(part, sides.vertical), sides.extents(part, sides.horizontal)
        ):
            indices = sides.write_indices(part, rows, columns)
            _, _, ranks = pieces.setdefault((rows, columns), (color, indices, []))
            ranks.append(part.ranks)
    return tuple(
        Piece(
            left=round(columns.start, _DIGITS),
            top=round(rows.start, _DIGITS),
            width=round(columns.length, _DIGITS),
            height=round(rows.length, _DIGITS),
            ranks=",".join(ranks),
            indices=indices if len(ranks) == 1 else f"{indices} and more",
            color=color,
        )
        for (rows, columns), (color, indices, ranks) in pieces.items()
    )


def tell_sizes(shape: tuple[int, ...], parts: Sequence[Part]) -> str:
    """A sentence where parts are not of the same size."""
    if 0 in shape:
        return "It has no elements."
    told = []
    for dim in range(len(shape)):
        lengths = Counter(part.length(dim) for part in parts)
        if len(lengths) > 1:
            sizes = " and ".join(
                f"{length:,}" for length in sorted(lengths, reverse=True) if length
            )
            empty = f"; {plural(lengths[0], 'part')} with nothing" if lengths[0] else ""
            told.append(f"Dim {dim} is sharded unevenly, in shards of {sizes}{empty}.")
    return " ".join(told)
