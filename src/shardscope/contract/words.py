"""Limits and figures in words."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.contract.limits import CauseKind, Figure, Limit
from shardscope.contract.sizes import describe_size

__all__ = ["describe_bound", "describe_limit", "describe_value", "name_module"]

_ROOT = "the root module"
_NAMES = {
    Figure.COUNT: "collectives",
    Figure.BYTES: "input bytes",
    Figure.WIRE_BYTES: "wire bytes",
    Figure.OUTPUT_BYTES: "output bytes",
}


def describe_limit(limit: Limit) -> str:
    """What is limited: `all_reduce[tp] in layers.*.attn, forward`."""
    if not limit.is_on_comm:
        what = limit.rule or (f"{limit.severity}" if limit.severity else "")
        return f"{limit.figure.replace('_', ' ')}{f' ({what})' if what else ''}"
    what = _join(limit.kinds) or ("collectives" if limit.figure is Figure.COUNT else "")
    if limit.axes:
        what = f"{what or 'all'}[{_join(limit.axes)}]"
    if limit.figure is not Figure.COUNT:
        what = f"{_NAMES[limit.figure]}{f' of {what}' if what else ''}"
    where = "" if limit.module is None else f" in {name_module(limit.module)}"
    causes = "" if not limit.causes else f", {_join(map(_name_cause, limit.causes))}"
    phases = "" if not limit.phases else f", {_join(limit.phases)}"
    return f"{what}{where}{phases}{causes}"


def describe_bound(limit: Limit) -> str:
    """`exactly 2`, `at most 64 MiB`, `1 to 3`."""
    least, most = limit.least, limit.most
    if least is not None and most is not None:
        if least == most:
            return f"exactly {describe_value(limit, most)}"
        return f"{describe_value(limit, least)} to {describe_value(limit, most)}"
    if most is not None:
        return f"at most {describe_value(limit, most)}" if most else "none"
    assert least is not None
    return f"at least {describe_value(limit, least)}"


def describe_value(limit: Limit, value: int) -> str:
    """`2`, `64 MiB`."""
    return describe_size(value) if limit.figure.is_size else f"{value:,}"


def name_module(name: str) -> str:
    """The root has no name."""
    return name or _ROOT


def _name_cause(cause: CauseKind) -> str:
    special = {CauseKind.UNASKED: "implicit", CauseKind.UNKNOWN: "of unknown cause"}
    return special.get(cause, f"by {cause}")


def _join(words: Sequence[str] | map[str]) -> str:
    return " or ".join(map(str, words))
