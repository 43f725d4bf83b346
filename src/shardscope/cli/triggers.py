"""What a comparison must not show: `--fail-on bytes:worse,graph-breaks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from shardscope.errors import DiffError
from shardscope.report.compare.changes import Area, Change, Changes, Status
from shardscope.report.layout import plural

__all__ = ["Trigger", "find_reasons", "parse_areas", "parse_tolerance", "parse_triggers"]

_ANY = "any"
_WORSE = "worse"
_KINDS = (_WORSE, *map(str, Status))


class Trigger(Struct, frozen=True):
    """Changes of one area, or of all, and of these only some kind."""

    text: str
    area: Area | None = None
    kind: str | None = None

    def fires(self, change: Change) -> bool:
        """Whether the change is one of these."""
        if self.area not in (None, change.area):
            return False
        if self.kind == _WORSE:
            return change.is_worse is True
        return self.kind in (None, change.status)


def parse_triggers(texts: Sequence[str]) -> list[Trigger]:
    """`any`, `worse`, an area, or an area and which of its changes: `memory:worse`."""
    return [_parse_trigger(one) for one in _split(texts)]


def parse_areas(texts: Sequence[str]) -> list[Area]:
    """Names of areas, joined by commas or one by one."""
    return [_parse_area(one, option="--area") for one in _split(texts)]


def parse_tolerance(text: str) -> float:
    """`5%` or `0.05`, as a share."""
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not 0 <= share < float("inf"):
        raise DiffError(f"--tolerance is {text!r}, which is no share. Write 5% or 0.05.")
    return share


def find_reasons(changes: Changes, triggers: Sequence[Trigger]) -> Iterator[str]:
    """A few words for each trigger that fires."""
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
            f"--fail-on {text!r} does not say which changes. Write {area}, or {area}: and one of "
            f"{', '.join(_KINDS)}."
        )
    known = None if area == _ANY else _parse_area(area, option="--fail-on")
    return Trigger(text, known, kind or None)


def _parse_area(name: str, *, option: str) -> Area:
    try:
        return Area(name)
    except ValueError:
        more = "any, worse, " if option == "--fail-on" else ""
        raise DiffError(
            f"{option} {name!r} is no area. Write one of {more}{', '.join(Area)}."
        ) from None
