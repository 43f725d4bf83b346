"""Where graphs break: the stops of many traces, told apart and put together by line."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from shardscope._torch.break_ids import find_break_id
from shardscope._torch.compile_events import Line, Stop
from shardscope.comm.stack import shown_path
from shardscope.compile.explain.fixes import suggest_fix
from shardscope.compile.explain.frames import Frame, function_name
from shardscope.record import BreakSite, Source, replace_surrogates

__all__ = ["Sites", "first_line", "make_source"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NEXT = "*** While handling this graph break, another graph break occurred: ***"
_PARTS = re.compile(
    r"(?P<kind>[^\n]*)(?:\n  Higher Order Operator: [^\n]*)?"
    r"(?:\n  Explanation: (?P<explanation>.*?))?"
    r"(?P<hints>(?:\n  Hint: .*?)*)?"
    r"(?:\n\n?  Developer debug context:.*|\Z)",
    re.DOTALL,
)
# Of a branch, torch shows how its condition was computed, with whole paths.
_AFTERWORDS = "The branch condition involves"
_MAX_TEXT = 600


@dataclass
class _Site:
    """A site while events are still being counted."""

    kind: str
    source: Source
    stop: Stop
    num_events: int = 0


@final
class Sites:
    """Counts break events by site; tells a new event from the same one tried again."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, int, str], _Site] = {}
        # By the whole stack: how deep below the compiled function the last stop there was.
        self._depths: dict[tuple[object, ...], int] = {}

    def add(self, frame: Frame, stop: Stop) -> int:
        """Count the stop of a frame's trace; the number of its site.

        Dynamo inlines calls. Where it must stop in one, it stops again in every function on the
        way, each compiled in its turn as the others call it: the same lines, nearer each time.
        """
        kind = _first_kind(stop)
        lines = stop.stack or (Line(frame.file, frame.line, frame.name),)
        place = _innermost((*_below_us(frame.callers), *lines))
        key = (place.file, place.line, kind)
        if key not in self._sites:
            self._sites[key] = _Site(kind, make_source(place), stop)
        where = (key, *_whole_stack(frame.callers, lines))
        depth = len(lines)
        if depth >= self._depths.get(where, 0):
            self._sites[key].num_events += 1
        self._depths[where] = depth
        return list(self._sites).index(key)

    @property
    def num_events(self) -> int:
        """How many events were counted so far."""
        return sum(site.num_events for site in self._sites.values())

    def make_records(self) -> tuple[BreakSite, ...]:
        """In the order in which they were met."""
        return tuple(_make_record(site) for site in self._sites.values())


def _whole_stack(callers: Sequence[Line], lines: Sequence[Line]) -> tuple[tuple[str, int], ...]:
    """The user's lines from the outermost down; a function that was resumed has but one."""
    kept: list[Line] = []
    for line in (*callers, *lines):
        if _is_foreign(line.file):
            continue
        is_resumed = line.function != function_name(line.function)
        if is_resumed and kept and _is_same_function(kept[-1], line):
            kept.pop()
        kept.append(line)
    return tuple((line.file, line.line) for line in kept)


def _is_same_function(one: Line, other: Line) -> bool:
    return one.file == other.file and function_name(one.function) == function_name(other.function)


def _below_us(callers: Sequence[Line]) -> Sequence[Line]:
    """Those that what is explained called; where it was called from is no part of it."""
    ours = [index for index, line in enumerate(callers) if line.file.startswith(_OURS)]
    return callers[ours[-1] + 1 :] if ours else callers


def _innermost(lines: Sequence[Line]) -> Line:
    own = [line for line in lines if not _is_foreign(line.file)]
    return (own or list(lines))[-1]


def _is_foreign(file: str) -> bool:
    """Whether a file is torch's, ours or Python's own: nothing that the user can change."""
    is_pythons = file.startswith(_STDLIB) and "site-packages" not in file
    return is_pythons or file.startswith((_TORCH, _OURS))


def make_source(line: Line) -> Source:
    """A line as a record."""
    text = line.text or linecache.getline(line.file, line.line)
    return Source(
        file=replace_surrogates(shown_path(line.file)),
        line=line.line,
        function=function_name(line.function),
        text=replace_surrogates(text.strip().partition("\n")[0][:200]),
    )


def first_line(frame: Frame) -> Source | None:
    """Where the function begins, or goes on; None if dynamo put it there."""
    if frame.is_torchs:
        return None
    return make_source(Line(frame.file, frame.line, frame.name))


def _first_kind(stop: Stop) -> str:
    """What went wrong first; what could not be done about it came after."""
    first = stop.message.partition(_NEXT)[0]
    return first.strip().partition("\n")[0].strip() if _NEXT in stop.message else stop.kind


def _make_record(site: _Site) -> BreakSite:
    explanation, hints = _read_message(site.stop.message)
    return BreakSite(
        source=site.source,
        num_events=site.num_events,
        reason=_tidy(site.kind),
        explanation=explanation,
        break_id=find_break_id(site.kind),
        hints=hints,
        fix=suggest_fix(site.kind, site.stop.message, file=_last_file(site.stop)),
    )


def _last_file(stop: Stop) -> str:
    return stop.stack[-1].file if stop.stack else ""


def _read_message(message: str) -> tuple[str, tuple[str, ...]]:
    found = _PARTS.match(message.partition(_NEXT)[0].strip())
    if found is None or found["explanation"] is None:
        return _tidy(message), ()
    hints = [_tidy(one) for one in (found["hints"] or "").split("\n  Hint: ")[1:]]
    return _tidy(found["explanation"].partition(_AFTERWORDS)[0]), tuple(hints)


def _tidy(text: str) -> str:
    """One line, without addresses, which differ from run to run."""
    text = " ".join(_ADDRESS.sub("", text).split())
    return replace_surrogates(text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…")
