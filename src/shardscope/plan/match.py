"""Which entries of a plan match a module or tensor, and which name a mistyped pattern may mean."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Generic, Protocol, TypeVar, final

from shardscope.record.layer_names import fold_layers, is_layer_number
from shardscope.record.patterns import is_number_range, is_pattern, matches_name


class HasPattern(Protocol):
    """Anything with the name or pattern of modules and tensors that it applies to."""

    @property
    def pattern(self) -> str: ...


EntryT = TypeVar("EntryT", bound=HasPattern)


@final
class PlanMatcher(Generic[EntryT]):
    """Finds the entries of a plan for a name: an exact name first, then patterns in plan order.

    Examples:
        >>> PlanMatcher(Plan({"layers.*.wq": Colwise()}).entries).find("layers.3.wq")
        ['layers.*.wq': Colwise()]
    """

    def __init__(self, entries: Sequence[EntryT]) -> None:
        self.entries = entries
        self._positions = {entry.pattern: position for position, entry in enumerate(entries)}
        # By the parts before the first wildcard: plans may have a pattern for every layer.
        self._patterns: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for position, entry in enumerate(entries):
            if is_pattern(entry.pattern):
                self._patterns[_literal_prefix(entry.pattern)].append(position)
        self._matching_patterns: dict[str, tuple[int, ...]] = {}  # by name, computed once

    def find(self, *names: str) -> list[EntryT]:
        """The entries that match a module or tensor by any of its names, by precedence."""
        exact = [self._positions[name] for name in names if name in self._positions]
        patterns = sorted({position for name in names for position in self._match(name)})
        return [self.entries[position] for position in dict.fromkeys((*exact, *patterns))]

    def find_for_tensor(self, name: str, *modules: str) -> list[tuple[EntryT, bool]]:
        """The entries for the tensor called `name` in its module, which may have several names.

        Each comes with whether it matches the module. An entry with the tensor's exact name has
        precedence over one with the module's, and that over patterns.
        """
        tensors = [f"{module}.{name}".lstrip(".") for module in modules]
        matching = {entry.pattern: (entry, False) for entry in self.find(*tensors)}
        matching |= {entry.pattern: (entry, True) for entry in self.find(*modules)}

        def precedence(match: tuple[EntryT, bool]) -> tuple[int, int]:
            pattern = match[0].pattern
            group = 0 if pattern in tensors else 1 if pattern in modules else 2
            return group, self._positions[pattern]

        return sorted(matching.values(), key=precedence)

    def _match(self, name: str) -> tuple[int, ...]:
        if name not in self._matching_patterns:
            parts = tuple(name.split(".")) if name else ()
            self._matching_patterns[name] = tuple(
                position
                for length in range(len(parts) + 1)
                for position in self._patterns.get(parts[:length], ())
                if matches_name(self.entries[position].pattern, name)
            )
        return self._matching_patterns[name]


def _literal_prefix(pattern: str) -> tuple[str, ...]:
    return tuple(takewhile(lambda part: not is_pattern(part), pattern.split(".")))


_MAX_COMPARED = 4000
_CHARACTER_CLASS = re.compile(r"(?<![^.])\[[^]]*\](?![^.])")


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
        if not (is_layer_number(part) or is_number_range(part)):
            continue
        layer_names = [name.split(".")[position] for name in names if matches_name(wildcard, name)]
        numbers = sorted({int(number) for number in layer_names if is_layer_number(number)})
        if numbers:
            before = "".join(f"{prefix}." for prefix in parts[:position])
            layers = f"{before}{numbers[0]} … {before}{numbers[-1]}"
            return f" (it has {layers}). Check the layer count, or use the pattern {wildcard!r}."
    return ""


def _suggest_prefix(pattern: str, names: Sequence[str]) -> str:
    """For a pattern with a missing or superfluous prefix."""
    match = next((name for name in names if matches_name(f"**.{pattern}", name)), None)
    if match is not None:
        missing = match.split(".")[: len(match.split(".")) - len(pattern.split("."))]
        before = fold_layers(".".join(missing))
        if missing and "**" not in pattern:
            return f" (it has {match!r}). Write '{before}.{pattern}'."
    head, _, rest = pattern.partition(".")
    if rest and any(matches_name(rest, name) for name in names):
        return f" (it has {rest!r}, without {head!r}). Write {rest!r}."
    return ""


def _suggest_similar(pattern: str, names: Sequence[str]) -> str:
    generalized_names = list(dict.fromkeys(map(fold_layers, names)))
    generalized = fold_layers(_CHARACTER_CLASS.sub("*", pattern))
    suggestions = get_close_matches(generalized, generalized_names[:_MAX_COMPARED], n=1)
    if not suggestions:
        return ""
    exact = get_close_matches(pattern, list(names)[:_MAX_COMPARED], n=1)
    meant = exact[0] if exact and not is_pattern(pattern) else suggestions[0]
    return f". Did you mean {meant!r}?"
