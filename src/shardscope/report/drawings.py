"""How parameters lie: a small picture of each way in which they are cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardscope.record import Parameter, Recording
from shardscope.report.heading import name_holder
from shardscope.report.layout import make_text, make_title, plural
from shardscope.report.numbered import fold_numbers
from shardscope.report.placements import read_cuts
from shardscope.report.units import format_bytes, sum_known

__all__ = ["render_drawings"]

_MAX_DRAWINGS = 12
_MAX_ROWS = 4
_MAX_COLUMNS = 8
_WIDTH = 2 * _MAX_COLUMNS + 1
_HELD, _OTHER = "■", "□"


class _Way(Struct, frozen=True):
    """A way to lie: how many parts each dim is cut into, and along which axes."""

    parts: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[str, ...]


class _Users(Struct):
    """The parameters that lie so."""

    names: dict[str, None]
    sizes: list[int | None]  # of each, on one rank

    @property
    def num_bytes(self) -> int | None:
        """Of all of them, on one rank."""
        return sum_known(self.sizes)


def render_drawings(recording: Recording) -> Iterator[RenderableType]:
    """A picture for each way in which parameters lie, what holds most bytes first."""
    ways = sorted(_gather(recording).items(), key=lambda item: -(item[1].num_bytes or 0))
    if not ways:
        return
    yield make_title("Placements", f"{_HELD} on one rank, {_OTHER} on other ranks")
    for way, users in ways[:_MAX_DRAWINGS]:
        yield _draw(way, users, name_holder(recording.run))
    if len(ways) > _MAX_DRAWINGS:
        yield Text(f"… {len(ways) - _MAX_DRAWINGS:,} more, in the table below", "dim")


def _gather(recording: Recording) -> dict[_Way, _Users]:
    sizes = {axis.name: axis.size for axis in recording.run.axes}
    ways: dict[_Way, _Users] = {}
    for module in recording.modules:
        for one in module.parameters:
            if one.placements:
                way = _Way(_count_parts(one, sizes), one.placements, one.axes)
                users = ways.setdefault(way, _Users({}, []))
                users.names[fold_numbers(f"{module.name}.{one.name}".lstrip("."))] = None
                users.sizes.append(one.local_bytes)
    return ways


def _count_parts(one: Parameter, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """How many parts each dim is cut into, by the mesh or else by the size of this rank's."""
    axes = [(axis, sizes.get(axis, 0)) for axis in one.axes]
    parts = [1] * len(one.shape)
    for cut in read_cuts(axes, one.placements, len(one.shape)):
        if cut.dim is not None:
            parts[cut.dim] *= cut.size
    return tuple(parts) if all(parts) else _compare_shapes(one)


def _compare_shapes(one: Parameter) -> tuple[int, ...]:
    pairs = zip(one.shape, one.local_shape, strict=False)
    return tuple(-(-whole // held) if whole > 0 and held > 0 else 1 for whole, held in pairs)


def _draw(way: _Way, users: _Users, holder: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, width=_WIDTH)
    table.add_column(overflow="fold")
    table.add_row(_draw_pieces(way.parts), _describe(way, users, holder))
    return table


def _draw_pieces(parts: tuple[int, ...]) -> Text:
    """Rows are the first dim that is cut, columns the next; a tensor with one cut lies flat."""
    cut = [count for count in parts if count > 1]
    rows, columns = (1, cut[0]) if len(cut) == 1 else (*cut, 1, 1)[:2]
    shown = min(columns, _MAX_COLUMNS)
    more = " …" if columns > shown else ""
    lines = []
    for row in range(min(rows, _MAX_ROWS)):
        first = Text().append(_HELD if row == 0 else _OTHER, "bold cyan" if row == 0 else "dim")
        lines.append(first.append(" " + " ".join(_OTHER * (shown - 1)) + more, "dim"))
    if rows > _MAX_ROWS:
        lines.append(Text("⋮", "dim"))
    return Text("\n").join(lines)


def _describe(way: _Way, users: _Users, holder: str) -> RenderableType:
    placed = zip(way.axes, way.placements, strict=False)
    head = make_text(", ".join(f"{axis}: {placement}" for axis, placement in placed), "bold")
    cuts = [f"dim {dim} in {count:,}" for dim, count in enumerate(way.parts) if count > 1]
    words = f"sharded: {' and '.join(cuts)}" if cuts else "replicated on every rank"
    size = users.num_bytes
    held = "sizes not recorded" if size is None else f"{format_bytes(size)} on {holder}"
    facts = f"{plural(len(users.sizes), 'parameter')}, {held}; {words}"
    names = list(users.names)
    rest = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return Group(head, Text(facts), make_text(", ".join(names[:3]) + rest, "dim", width=160))
