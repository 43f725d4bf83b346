"""Which entries of a plan apply to a name, on which mesh axes, and what a mistyped name may
have meant.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from typing import TypeVar, final

from shardscope.errors import PlanError
from shardscope.parallel.plan.parse import Entry, Styles
from shardscope.parallel.plan.styles import (
    ModuleInput,
    ModuleOutput,
    Replicated,
    WeightStyle,
)
from shardscope.plan.placements import Shard
from shardscope.record.patterns import is_pattern, matches_deeply

_T = TypeVar("_T")

_DEFAULT_AXIS = "tp"


@final
class Axes:
    """The mesh's axes, names and sizes in order; finds the axis that a part of a plan is for."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.names = tuple(sizes)
        self.sizes = tuple(sizes.values())
        if not sizes:
            raise PlanError("The mesh has no axes. Give one, such as {'tp': 4}.")
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise PlanError(
                    f"The mesh's axis {name!r} has size {size!r}. Give it at least one rank."
                )

    def spread(
        self, by_axis: Sequence[tuple[str | None, _T]], in_order: Sequence[_T], location: str
    ) -> dict[int, _T]:
        """By position of the axis, the styles or placements that the plan has at `location`."""
        if in_order and len(in_order) != len(self.names):
            raise PlanError(
                f"{location} gives {_count(len(in_order), 'placement')}, but the mesh has "
                f"{_count(len(self.names), 'axis')}: {self.description}. Give one for each, or "
                "name "
                "the axis: {'" + self.names[-1] + "': …}."
            )
        if in_order:
            return dict(enumerate(in_order))
        return {self._position(axis, location): value for axis, value in by_axis}

    @property
    def description(self) -> str:
        """E.g. `dp=2 and tp=4`."""
        return " and ".join(map(self.describe_axis, range(len(self.names))))

    def describe_axis(self, position: int) -> str:
        """E.g. `tp=4`."""
        return f"{self.names[position]}={self.sizes[position]}"

    def _position(self, axis: str | None, location: str) -> int:
        if axis is None:
            return self._default_position(location)
        if axis not in self.names:
            suggestions = get_close_matches(axis, self.names, n=1)
            remedy = f"Did you mean {suggestions[0]!r}?" if suggestions else "Name one of them."
            raise PlanError(
                f"{location} is for the axis {axis!r}, but the mesh has {self.description}. "
                f"{remedy}"
            )
        return self.names.index(axis)

    def _default_position(self, location: str) -> int:
        if _DEFAULT_AXIS in self.names:
            return self.names.index(_DEFAULT_AXIS)
        if len(self.names) > 1:
            raise PlanError(
                f"{location} does not name an axis, and the mesh has {self.description}. Write {{'"
                + self.names[-1]
                + "': …} around it."
            )
        return 0


def _count(number: int, noun: str) -> str:
    many = {"axis": "axes"}.get(noun, f"{noun}s")
    return f"{number} {noun if number == 1 else many}"


@final
@dataclass(frozen=True, eq=False)
class Rule:
    """An entry of the plan, with its styles by position of the mesh axis."""

    entry: Entry
    position: int  # in the plan
    styles_by_axis: dict[int, Styles]

    @property
    def pattern(self) -> str:
        return self.entry.pattern

    @property
    def location(self) -> str:
        return f"The plan's entry {self.pattern!r}: {self.entry.meaning}"

    @property
    def ends_in_wildcard(self) -> bool:
        """Whether it ends in a wildcard, and so may match modules that it is not meant for."""
        return is_pattern(self.pattern.rpartition(".")[2])


@final
class PlanMatcher:
    """Finds the rules of a plan for a name: an exact name first, then patterns in their order."""

    def __init__(self, entries: Sequence[Entry], axes: Axes) -> None:
        self.rules = [
            Rule(entry, position, _spread(entry, axes)) for position, entry in enumerate(entries)
        ]
        self._exact = {rule.pattern: rule for rule in self.rules if not rule.entry.is_pattern}
        # By the parts before the first wildcard: plans may have a pattern for every layer.
        self._patterns: defaultdict[tuple[str, ...], list[Rule]] = defaultdict(list)
        for rule in self.rules:
            if rule.entry.is_pattern:
                self._patterns[_literal_prefix(rule.pattern)].append(rule)
        self._cache: dict[str, list[Rule]] = {}

    def find(self, name: str) -> list[Rule]:
        """The rules that match a module or tensor, by precedence."""
        if name not in self._cache:
            exact = [self._exact[name]] if name in self._exact else []
            self._cache[name] = exact + self._matching(name)
        return self._cache[name]

    def _matching(self, name: str) -> list[Rule]:
        parts = tuple(name.split(".")) if name else ()
        matching = [
            rule
            for length in range(len(parts) + 1)
            for rule in self._patterns.get(parts[:length], ())
            if matches_deeply(rule.pattern, name)
        ]
        return sorted(matching, key=lambda rule: rule.position)

    def find_for_tensor(self, name: str) -> Iterator[tuple[Rule, bool]]:
        """The rules that match a tensor or its module, each with whether it matches the module."""
        module = name.rpartition(".")[0]
        for_module = self.find(module)
        by_position = {rule.position: (rule, False) for rule in self.find(name)}
        by_position.update({rule.position: (rule, True) for rule in for_module})
        exact = {name: 0, module: 1}
        yield from sorted(
            by_position.values(), key=lambda item: (exact.get(item[0].pattern, 2), item[0].position)
        )


def _literal_prefix(pattern: str) -> tuple[str, ...]:
    return tuple(takewhile(lambda part: not is_pattern(part), pattern.split(".")))


def weight_style(styles: Styles) -> WeightStyle | None:
    """The style that places the parameters, if there is one."""
    return next(
        (style for style in styles if not isinstance(style, (ModuleInput, ModuleOutput))), None
    )


def _spread(entry: Entry, axes: Axes) -> dict[int, Styles]:
    row: list[Styles] = [
        (placement if isinstance(placement, Shard) else Replicated(),)
        for placement in entry.in_order
    ]
    return axes.spread(entry.by_axis, row, f"The plan's entry {entry.pattern!r}")


_MAX_COMPARED = 4000


def suggest_name(pattern: str, names: Sequence[str]) -> str:
    """The names that the program has instead of `pattern`, and the remedy, for an error text."""
    for suggestion in (_suggest_layers, _suggest_prefix, _suggest_similar):
        if text := suggestion(pattern, names):
            return text
    tops = sorted({name.partition(".")[0] for name in names if name})
    shown = ", ".join(tops[:6]) + (" and others" if len(tops) > 6 else "")
    return f" (it has {shown}). Fix the name or remove the entry." if tops else ""


def _suggest_layers(pattern: str, names: Sequence[str]) -> str:
    """For a pattern that is right but for the number of a layer."""
    parts = pattern.split(".")
    for position, part in enumerate(parts):
        wildcard = ".".join(
            ["*" if index == position else name for index, name in enumerate(parts)]
        )
        if not re.fullmatch(r"\d+|\[\d+-\d+\]", part):
            continue
        layer_names = [
            name.split(".")[position] for name in names if matches_deeply(wildcard, name)
        ]
        numbers = sorted({int(number) for number in layer_names if number.isdecimal()})
        if numbers:
            before = "".join(f"{prefix}." for prefix in parts[:position])
            layers = f"{before}{numbers[0]} … {before}{numbers[-1]}"
            return f" (it has {layers}). Check the layer count, or use the pattern {wildcard!r}."
    return ""


def _suggest_prefix(pattern: str, names: Sequence[str]) -> str:
    """For a pattern with a missing or superfluous prefix."""
    match = next((name for name in names if matches_deeply(f"**.{pattern}", name)), None)
    if match is not None:
        missing = match.split(".")[: len(match.split(".")) - len(pattern.split("."))]
        before = ".".join("*" if part.isdecimal() else part for part in missing)
        if missing and "**" not in pattern:
            return f" (it has {match!r}). Write '{before}.{pattern}'."
    head, _, rest = pattern.partition(".")
    if rest and any(matches_deeply(rest, name) for name in names):
        return f" (it has {rest!r}, without {head!r}). Write {rest!r}."
    return ""


def _suggest_similar(pattern: str, names: Sequence[str]) -> str:
    generalized_names = list(
        dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
    )
    generalized = re.sub(r"(?<![^.])(\d+|\[[^]]*\])(?![^.])", "*", pattern)
    suggestions = get_close_matches(generalized, generalized_names[:_MAX_COMPARED], n=1)
    if not suggestions:
        return ""
    exact = get_close_matches(pattern, list(names)[:_MAX_COMPARED], n=1)
    meant = exact[0] if exact and not is_pattern(pattern) else suggestions[0]
    return f". Did you mean {meant!r}?"
