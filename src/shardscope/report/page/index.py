"""Positions of modules and of lines of the program, which all views point to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from shardscope.record import Source
from shardscope.report.page.records import Sources

__all__ = ["NOWHERE", "Index", "Names"]

NOWHERE = -1
_MAX_TEXT = 400  # characters of a line of code


@final
class Index:
    """Knows each module by its names; takes lines as they come, each once."""

    def __init__(self, paths: Iterable[tuple[str, int]], *, nowhere: int = NOWHERE) -> None:
        """`paths` name positions, the first of a name counting; `nowhere` is for no module."""
        self._modules: dict[str, int] = {}
        for path, position in paths:
            self._modules.setdefault(path, position)
        self._nowhere = nowhere
        self._found: dict[str, int] = {}
        self._sources: dict[Source, int] = {}

    @property
    def positions(self) -> Mapping[str, int]:
        """Of all modules, by name."""
        return self._modules

    def module(self, path: str | None) -> int:
        """Of a module or, of something that is none, of what it lies in."""
        if path is None:
            return self._nowhere
        position = self.named(path)
        return position if position != NOWHERE else self._modules.get("", NOWHERE)

    def has(self, path: str) -> bool:
        """Whether a module has this very name."""
        return path in self._modules

    def named(self, path: str) -> int:
        """The same, but for things that lie in nothing but the root."""
        position = self._found.get(path)
        if position is None:
            known = path
            while known and known not in self._modules:
                known = known.rpartition(".")[0]
            is_below = bool(known) or not path
            position = self._modules.get(known, NOWHERE) if is_below else NOWHERE
            self._found[path] = position
        return position

    def source(self, source: Source | None) -> int:
        """Of a line."""
        if source is None:
            return NOWHERE
        return self._sources.setdefault(source, len(self._sources))

    def sources(self) -> Sources:
        """All lines that were asked for."""
        lines = list(self._sources)
        return Sources(
            file=tuple(one.file for one in lines),
            line=tuple(one.line for one in lines),
            function=tuple(one.function for one in lines),
            text=tuple(one.text.strip()[:_MAX_TEXT] for one in lines),
        )


@final
class Names:
    """A list of names, each once, in the order in which they were asked for."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._positions = {name: position for position, name in enumerate(dict.fromkeys(names))}

    def at(self, name: str) -> int:
        """Its position."""
        return self._positions.setdefault(name, len(self._positions))

    def find(self, name: str) -> int:
        """Its position, or that of nothing."""
        return self._positions.get(name, NOWHERE)

    def all(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._positions)
