"""`--mesh dp=8,tp=4` as axes and their sizes."""

from __future__ import annotations

import math

from shardscope.cli.launch import is_launched
from shardscope.cli.target import name_target
from shardscope.errors import TargetError
from shardscope.record.ranks import MAX_RANKS
from shardscope.report.names import shorten

__all__ = ["choose_axes", "parse_mesh"]

_MAX_ECHO = 60  # characters of the argument that a message repeats


def choose_axes(target: str, mesh: str | None, *, verb: str) -> dict[str, int] | None:
    """The axes to simulate; None where a launcher gives the world."""
    if mesh is None and not is_launched():
        raise TargetError(
            f"There is no mesh to run {name_target(target)} on. Give one to simulate, such as "
            "--mesh dp=8,tp=4, or start the real thing with torchrun --no-python shardscope "
            f"{verb}."
        )
    return None if mesh is None else parse_mesh(mesh)


def parse_mesh(text: str) -> dict[str, int]:
    """`dp=8,tp=4` as axes."""
    axes: dict[str, int] = {}
    shown = repr(shorten(text, _MAX_ECHO))
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not name or not equals or not size.isdecimal() or not size.strip("0"):
            raise TargetError(
                f"--mesh {shown} is not understood at {shorten(part.strip(), _MAX_ECHO)!r}. Give "
                "the name and size of each axis, such as --mesh dp=8,tp=4."
            )
        if name in axes:
            raise TargetError(f"--mesh {shown} names the axis {name!r} twice. Name each once.")
        # Python refuses to read numbers of thousands of digits, and one too large is enough.
        axes[name] = int(size) if len(size) < 10 else MAX_RANKS + 1
    if math.prod(axes.values()) > MAX_RANKS:
        raise TargetError(
            f"--mesh {shown} has more than {MAX_RANKS:,} ranks, the most that a recording can "
            "name. Choose smaller axes."
        )
    return axes
