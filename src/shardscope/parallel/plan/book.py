"""Which entries of a plan speak of a name, and in which order they are heard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import final

from shardscope.parallel.placements import Shard
from shardscope.parallel.plan.axes import Axes
from shardscope.parallel.plan.entries import Entry, Styles
from shardscope.parallel.plan.styles import (
    ModuleInput,
    ModuleOutput,
    Replicated,
    WeightStyle,
)
from shardscope.record.patterns import is_pattern, matches_deeply

__all__ = ["Book", "Rule", "weight_style"]


@final
@dataclass(frozen=True, eq=False)
class Rule:
    """An entry with what it says along each axis of the mesh, by the axis' position."""

    entry: Entry
    position: int  # in the plan
    said: dict[int, Styles]

    @property
    def pattern(self) -> str:
        return self.entry.pattern

    @property
    def place(self) -> str:
        return f"The plan's entry {self.pattern!r}: {self.entry.meaning}"

    @property
    def is_sweeping(self) -> bool:
        """Whether it ends in a wildcard, and so may match what it was not meant for."""
        return is_pattern(self.pattern.rpartition(".")[2])


@final
class Book:
    """The rules of a plan, found by name: an exact name first, then patterns in their order."""

    def __init__(self, entries: Sequence[Entry], axes: Axes) -> None:
        self.rules = [
            Rule(entry, position, _spread(entry, axes)) for position, entry in enumerate(entries)
        ]
        self._exact = {rule.pattern: rule for rule in self.rules if not rule.entry.is_pattern}
        # By what stands before the first wildcard: plans may have a pattern for every layer.
        self._patterns: defaultdict[tuple[str, ...], list[Rule]] = defaultdict(list)
        for rule in self.rules:
            if rule.entry.is_pattern:
                self._patterns[_plain_parts(rule.pattern)].append(rule)
        self._found: dict[str, list[Rule]] = {}

    def find(self, name: str) -> list[Rule]:
        """The rules for a module or tensor, the most telling first."""
        if name not in self._found:
            exact = [self._exact[name]] if name in self._exact else []
            self._found[name] = exact + self._matching(name)
        return self._found[name]

    def _matching(self, name: str) -> list[Rule]:
        parts = tuple(name.split(".")) if name else ()
        near = [
            rule
            for length in range(len(parts) + 1)
            for rule in self._patterns.get(parts[:length], ())
            if matches_deeply(rule.pattern, name)
        ]
        return sorted(near, key=lambda rule: rule.position)

    def find_for_tensor(self, name: str) -> Iterator[tuple[Rule, bool]]:
        """The rules for a tensor or its module, each with whether it speaks of the module."""
        module = name.rpartition(".")[0]
        for_module = self.find(module)
        found = {rule.position: (rule, False) for rule in self.find(name)}
        found.update({rule.position: (rule, True) for rule in for_module})
        exact = {name: 0, module: 1}
        yield from sorted(
            found.values(), key=lambda one: (exact.get(one[0].pattern, 2), one[0].position)
        )


def _plain_parts(pattern: str) -> tuple[str, ...]:
    return tuple(takewhile(lambda part: not is_pattern(part), pattern.split(".")))


def weight_style(styles: Styles) -> WeightStyle | None:
    """The one of the styles that lays out parameters, if there is one."""
    return next((one for one in styles if not isinstance(one, (ModuleInput, ModuleOutput))), None)


def _spread(entry: Entry, axes: Axes) -> dict[int, Styles]:
    row: list[Styles] = [
        (one if isinstance(one, Shard) else Replicated(),) for one in entry.in_order
    ]
    return axes.spread(entry.by_axis, row, f"The plan's entry {entry.pattern!r}")
