"""A place in a contract file, and what is said of a value that cannot be there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, final

from shardscope.contract.lines import Path
from shardscope.contract.sizes import parse_size
from shardscope.errors import ContractError

__all__ = ["Place", "name_nearest"]

_MOST = 2**63 - 1


@final
class Place:
    """Keys that lead somewhere in a file."""

    def __init__(self, file: str, lines: Mapping[Path, int], path: Path = ()) -> None:
        self._file = file
        self._lines = lines
        self._path = path

    def at(self, key: str | int) -> Place:
        """The place of a key, or of a table of an array, in this one."""
        return Place(self._file, self._lines, (*self._path, key))

    @property
    def line(self) -> int:
        """Where it begins, or else what it lies in; the file's first line if nobody knows."""
        known = (self._path[:end] for end in range(len(self._path), 0, -1))
        return next((self._lines[path] for path in known if path in self._lines), 1)

    def fail(self, fact: str) -> ContractError:
        """An error about it; `fact` has the remedy too. What is in no file has no line."""
        where = f"{self._file}, line {self.line}" if self._lines else self._file
        return ContractError(f"{where}: {fact}")

    def check_keys(self, table: Mapping[str, Any], allowed: Sequence[str]) -> None:
        """Refuse a key that means nothing, and say which was meant."""
        for key in table:
            if key not in allowed:
                where = f" in [{self.name}]" if self._path else ""
                raise self.at(key).fail(
                    f"'{key:.60}' means nothing{where}. {name_nearest(key, allowed)}"
                )

    @property
    def name(self) -> str:
        """`contract.comm`."""
        return ".".join(key for key in self._path if isinstance(key, str))

    @property
    def key(self) -> str:
        """The last of the keys."""
        return str(self._path[-1])

    def as_table(self, value: Any) -> Mapping[str, Any]:
        """The value, if it is a table."""
        if not isinstance(value, Mapping):
            raise self.fail(f"{self.key} is {_show(value)}. Make it a table: [{self.name}]")
        return value

    def as_tables(self, value: Any) -> list[Mapping[str, Any]]:
        """The value, if it is an array of tables."""
        if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            raise self.fail(
                f"{self.key} is not an array of tables. Begin each with [[{self.name}]], in two "
                "brackets."
            )
        return value

    def as_count(self, value: Any) -> int:
        """The value, if it is a number of things."""
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise self.fail(f"{self.key} is {_show(value)}. Give a whole number, such as 2.")
        return value

    def as_size(self, value: Any) -> int:
        """The value, if it is a number of bytes."""
        size = parse_size(value) if isinstance(value, str) else value
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _MOST:
            raise self.fail(
                f'{self.key} is {_show(value)}. Give bytes as a number, or a size such as "64MiB".'
            )
        return size

    def as_name(self, value: Any) -> str:
        """The value, if it is text."""
        if not isinstance(value, str):
            raise self.fail(f"{self.key} is {_show(value)}. Write it in quotes.")
        return value

    def as_names(self, value: Any, allowed: Iterable[str] = ()) -> tuple[str, ...]:
        """One text or several, each one of those allowed, if that is said."""
        texts = value if isinstance(value, list) else [value]
        names = tuple(dict.fromkeys(map(self.as_name, texts)))
        known = tuple(allowed)
        for name in names:
            if known and name not in known:
                raise self.fail(f"there is no {self.key} '{name:.60}'. {name_nearest(name, known)}")
        if not names:
            raise self.fail(f"{self.key} is empty. Give a name, or remove it.")
        return names


def name_nearest(word: str, allowed: Sequence[str]) -> str:
    """`Did you mean …?`, or all there are where nothing is near."""
    near = get_close_matches(word.lower().replace("-", "_"), allowed, n=1)
    if near:
        return f"Did you mean '{near[0]}'?"
    return (
        f"Use {', '.join(allowed[:-1])} or {allowed[-1]}."
        if len(allowed) > 1
        else (f"Use '{allowed[0]}'.")
    )


def _show(value: Any) -> str:
    return f"{value!r:.60}"
