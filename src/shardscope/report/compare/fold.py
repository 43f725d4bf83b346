"""Layers whose changes are the same, folded into one row: `layers.{0…31}.attn`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from shardscope.report.compare.changes import Change, Value

__all__ = ["fold_layers", "fold_path", "name_paths"]

_NUMBER = re.compile(r"(?<![\w.])[0-9]{1,9}(?=\.\w)|(?<=\w\.)[0-9]{1,9}(?!\w)")
# A module may be a number and nothing else, as those of `nn.Sequential`; a text with one is a size.
_LAYER = re.compile(rf"{_NUMBER.pattern}|^[0-9]{{1,9}}$")
_MAX_RUNS = 4  # of numbers that are named


def fold_layers(changes: Sequence[Change]) -> list[Change]:
    """Changes that differ in numbers of layers alone become one, where the first of them was."""
    groups: dict[object, list[Change]] = {}
    for index, one in enumerate(changes):
        key = _likeness(one) if one.path and fold_path(one.path) != one.path else index
        groups.setdefault(key, []).append(one)
    return [_join(group) for group in groups.values()]


def fold_path(path: str) -> str:
    """The same for modules that differ in numbers of layers alone."""
    return _LAYER.sub("*", path)


def name_paths(paths: Sequence[str]) -> str:
    """One name for several modules that fold to the same."""
    return _name_all(paths, _LAYER)


def _name_all(texts: Sequence[str], number: re.Pattern[str]) -> str:
    """One text for several that are the same but for numbers."""
    columns = zip(*(number.findall(text) for text in texts), strict=True)
    numbers = iter([_name_numbers(sorted({int(one) for one in column})) for column in columns])
    return number.sub(lambda _: next(numbers), texts[0])


def _likeness(change: Change) -> tuple[object, ...]:
    texts = (change.what, change.before, change.after)
    path = fold_path(change.path or "")
    return (change.area, change.unit, change.is_worse, path, *map(_fold_value, texts))


def _fold_value(value: Value | None) -> object:
    return _NUMBER.sub("*", value) if isinstance(value, str) else value


def _join(group: Sequence[Change]) -> Change:
    first = group[0]
    if len(group) == 1:
        return first
    return replace(
        first,
        path=name_paths([one.path or "" for one in group]),
        what=_name_all([one.what for one in group], _NUMBER),
        before=_join_values([one.before for one in group]),
        after=_join_values([one.after for one in group]),
        modules=tuple(name for one in group for name in one.modules),
        repeat=len(group),
    )


def _join_values(values: Sequence[Value | None]) -> Value | None:
    texts = [value for value in values if isinstance(value, str)]
    return _name_all(texts, _NUMBER) if texts else values[0]


def _name_numbers(numbers: Sequence[int]) -> str:
    """`7`, `{0…31}`, `{0,4,9}`, `{0…30,…}` where there are too many runs."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    named = [_name_run(run) for run in runs[:_MAX_RUNS]]
    return f"{{{','.join([*named, *['…'][: len(runs) > _MAX_RUNS]])}}}"


def _name_run(run: Sequence[int]) -> str:
    if len(run) > 2:
        return f"{run[0]}…{run[-1]}"
    return ",".join(map(str, run))
