"""Parse which changes make a comparison fail: `--fail-on bytes:worse,graph-breaks`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from msgspec import Struct

from shardscope.cli.verb import suggest
from shardscope.errors import DiffError, ShardscopeError
from shardscope.record.units import plural
from shardscope.report.compare.changes import Area, Change, Changes, Status
from shardscope.report.text.style import shorten

_ANY = "any"
_WORSE = "worse"
_KINDS = (_WORSE, *map(str, Status))


class Trigger(Struct, frozen=True):
    """Which changes make a comparison fail: those of an area or of all, and of which kind."""

    text: str
    area: Area | None = None
    kind: str | None = None

    def fires(self, change: Change) -> bool:
        """Whether the change makes the comparison fail."""
        if self.area not in (None, change.area):
            return False
        if self.kind == _WORSE:
            return change.is_worse is True
        return self.kind in (None, change.status)


def parse_triggers(texts: Sequence[str]) -> list[Trigger]:
    """`any`, `worse`, an area, or an area and which of its changes: `memory:worse`."""
    return [_parse_trigger(text) for text in _split(texts)]


def parse_areas(texts: Sequence[str]) -> list[Area]:
    """Names of areas, separated by commas or given one at a time."""
    return [_parse_area(name, option="--area") for name in _split(texts)]


def parse_share(text: str, *, option: str, at_most: float = sys.float_info.max) -> float:
    """Read `5%` or `0.05` as 0.05; raises ShardscopeError below 0 or above `at_most`."""
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not 0 <= share <= at_most:
        limit = "" if at_most == sys.float_info.max else f" from 0% to {at_most:.0%}"
        raise ShardscopeError(
            f"{option} must be a percentage or fraction{limit}, such as 5% or 0.05; got "
            f"{shorten(text, 60)!r}."
        )
    return share


def find_reasons(changes: Changes, triggers: Sequence[Trigger]) -> Iterator[str]:
    """Name each trigger that fires, with the number of changes."""
    for trigger in triggers:
        count = sum(row.repeat for row in changes.rows if trigger.fires(row))
        if count:
            yield f"{trigger.text} ({plural(count, 'change')})"


def _split(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]


def _parse_trigger(text: str) -> Trigger:
    area, colon, kind = text.partition(":")
    if text == _WORSE:
        return Trigger(text, None, _WORSE)
    if colon and kind not in _KINDS:
        raise DiffError(
            f"Unknown kind of change {kind!r} in --fail-on {text!r}.{suggest(kind, _KINDS)} "
            f"Write {area}, or {area}:KIND with one of {', '.join(_KINDS)}."
        )
    known = None if area == _ANY else _parse_area(area, option="--fail-on")
    return Trigger(text, known, kind or None)


def _parse_area(name: str, *, option: str) -> Area:
    try:
        return Area(name)
    except ValueError:
        known = [*((_ANY, _WORSE) if option == "--fail-on" else ()), *map(str, Area)]
        raise DiffError(
            f"Unknown {option} value {name!r}.{suggest(name, known)} "
            f"Choose from {', '.join(known)}."
        ) from None
