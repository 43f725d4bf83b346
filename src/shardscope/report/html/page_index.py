"""Positions of modules and of source lines, which all views refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from shardscope.record import Source
from shardscope.report.html.page import Sources

NOWHERE = -1
_MAX_TEXT = 400  # characters of a line of code


@final
class Index:
    """Finds modules by their names, and collects the distinct source lines."""

    def __init__(self, paths: Iterable[tuple[str, int]], *, nowhere: int = NOWHERE) -> None:
        """`paths` are names with positions; the first of equal names counts."""
        self._modules: dict[str, int] = {}
        for path, position in paths:
            self._modules.setdefault(path, position)
        self._nowhere = nowhere
        self._cache: dict[str, int] = {}
        self._sources: dict[Source, int] = {}

    @property
    def positions(self) -> Mapping[str, int]:
        """Positions of all modules, by name."""
        return self._modules

    def module(self, path: str | None) -> int:
        """Return the position of a module; for another path, of its nearest ancestor."""
        if path is None:
            return self._nowhere
        position = self.named(path)
        return position if position != NOWHERE else self._modules.get("", NOWHERE)

    def has(self, path: str) -> bool:
        """Whether a module has exactly this name."""
        return path in self._modules

    def named(self, path: str) -> int:
        """Return the position like `module`, but `NOWHERE` if the nearest ancestor is the root."""
        position = self._cache.get(path)
        if position is None:
            known = path
            while known and known not in self._modules:
                known = known.rpartition(".")[0]
            is_below = bool(known) or not path
            position = self._modules.get(known, NOWHERE) if is_below else NOWHERE
            self._cache[path] = position
        return position

    def source(self, source: Source | None) -> int:
        """Return the position of a source line, which is added if it is new."""
        if source is None:
            return NOWHERE
        return self._sources.setdefault(source, len(self._sources))

    def sources(self) -> Sources:
        """Return all source lines that were added."""
        lines = list(self._sources)
        return Sources(
            file=tuple(source.file for source in lines),
            line=tuple(source.line for source in lines),
            function=tuple(source.function for source in lines),
            text=tuple(source.text.strip()[:_MAX_TEXT] for source in lines),
        )


@final
class Names:
    """A list of distinct names, in order of first use."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._positions = {name: position for position, name in enumerate(dict.fromkeys(names))}

    def at(self, name: str) -> int:
        """Return the position of a name, which is added if it is new."""
        return self._positions.setdefault(name, len(self._positions))

    def find(self, name: str) -> int:
        """Return the position of a name, or `NOWHERE`."""
        return self._positions.get(name, NOWHERE)

    def all(self) -> tuple[str, ...]:
        """Return all names."""
        return tuple(self._positions)
