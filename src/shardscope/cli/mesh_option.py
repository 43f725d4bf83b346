"""`--mesh dp=8,tp=4` as axes and their sizes."""

from __future__ import annotations

import math

from shardscope.cli.console import is_launched
from shardscope.cli.target import check_file
from shardscope.errors import TargetError
from shardscope.record.ranks import MAX_RANKS
from shardscope.report.text.style import shorten

_MAX_ECHO = 60  # characters of the argument that a message repeats


def choose_axes(target: str, mesh: str | None, *, verb: str) -> dict[str, int] | None:
    """The axes to simulate; None if a launcher started the ranks."""
    if mesh is None and not is_launched():
        check_file(target)  # a path that does not exist is the mistake to correct first
        raise TargetError(
            f"There is no mesh to run {shorten(target, _MAX_ECHO)} on. Give one to simulate, such "
            "as --mesh dp=8,tp=4, or start real ranks: torchrun --nproc-per-node 8 --no-python "
            f"shardscope {verb} {target}"
        )
    return None if mesh is None else parse_mesh(mesh)


def parse_mesh(text: str) -> dict[str, int]:
    """Read `dp=8,tp=4` as the axes' sizes, by name."""
    axes: dict[str, int] = {}
    shown = repr(shorten(text, _MAX_ECHO))
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not name or not equals:
            raise TargetError(
                f"--mesh {shown} has {shorten(part.strip(), _MAX_ECHO)!r} where NAME=SIZE is "
                "expected. Give the name and size of each axis, such as --mesh dp=8,tp=4."
            )
        if name in axes:
            raise TargetError(
                f"--mesh {shown} has the axis {shorten(name, _MAX_ECHO)!r} twice. "
                "Give each axis a name of its own."
            )
        axes[name] = _parse_size(name, size)
    if math.prod(axes.values()) > MAX_RANKS:
        raise TargetError(
            f"--mesh {shown} has more than {MAX_RANKS:,} ranks, the most that a recording can "
            "have. Choose smaller axes."
        )
    return axes


def _parse_size(name: str, text: str) -> int:
    digits = text.removeprefix("-").lstrip("0") if text.removeprefix("-").isdecimal() else ""
    if not digits or text.startswith("-"):
        size = shorten(text, _MAX_ECHO) or "no number"
        raise TargetError(
            f"axis {shorten(name, _MAX_ECHO)} has size {size} in --mesh; sizes must be whole "
            f"numbers from 1 to {MAX_RANKS:,}, such as --mesh dp=8,tp=4."
        )
    # int() refuses numbers of thousands of digits; any size that is too large will do.
    return int(digits) if len(digits) < 10 else MAX_RANKS + 1
