"""Reads a contract from `shardscope.toml`; errors name the key and the line."""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias, final

from shardscope.contract.limits import (
    ANY,
    BOUNDS,
    CEILINGS,
    COMM_KEYS,
    CONTRACT_KEYS,
    FINDING_KEYS,
    UNASKED,
    CauseKind,
    Contract,
    Figure,
    Limit,
    Selector,
    Side,
)
from shardscope.errors import ContractError
from shardscope.record import CollectiveKind, Phase, Record, Severity, read_text_file
from shardscope.record.units import parse_size

Path: TypeAlias = tuple[str | int, ...]
"""Keys that lead to a value; tables of an array are numbered."""

_BARE = re.compile(r"[\w-]+(?:\s*\.\s*[\w-]+)*")
_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def find_lines(text: str) -> dict[Path, int]:
    """The line numbers of tables and keys, from 1; keys inside a value are not listed."""
    lines: dict[Path, int] = {}
    seen: Counter[Path] = Counter()
    table: Path = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.match(line):
            table = _split(header[2])
            if header[1] == "[[":
                seen[table] += 1
                table = (*table, seen[table] - 1)
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_split(key[1])), number)
    return lines


def _split(key: str) -> Path:
    """Split a dotted key: `contract."a.b"` has two parts."""
    if _BARE.fullmatch(key):
        return tuple(part.strip() for part in key.split("."))
    try:
        value: object = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return (key,)
    parts: list[str | int] = []
    while isinstance(value, dict) and value:
        ((name, value),) = value.items()
        parts.append(name)
    return tuple(parts)


_MOST = 2**63 - 1


@final
class TomlLocation:
    """A location in a contract file, as the path of its keys; reads and checks values there."""

    def __init__(self, file: str, lines: Mapping[Path, int], path: Path = ()) -> None:
        self._file = file
        self._lines = lines
        self._path = path

    def at(self, key: str | int) -> TomlLocation:
        """The location of a key, or of a table of an array, inside this one."""
        return TomlLocation(self._file, self._lines, (*self._path, key))

    @property
    def line(self) -> int:
        """Its line, or that of the table that contains it; 1 if neither is known."""
        known = (self._path[:end] for end in range(len(self._path), 0, -1))
        return next((self._lines[path] for path in known if path in self._lines), 1)

    def fail(self, fact: str) -> ContractError:
        """An error about it; `fact` includes the remedy. Without a file it has no line."""
        where = f"{self._file}, line {self.line}" if self._lines else self._file
        return ContractError(f"{where}: {fact}")

    def check_keys(self, table: Mapping[str, Any], allowed: Sequence[str]) -> None:
        """Raise for an unknown key, and suggest the nearest known one."""
        for key in table:
            if key not in allowed:
                where = f" in [{self.name}]" if self._path else ""
                raise self.at(key).fail(
                    f"Unknown key '{key:.60}'{where}. {name_nearest(key, allowed)}"
                )

    @property
    def name(self) -> str:
        """The dotted name of the table: `contract.comm`."""
        return ".".join(key for key in self._path if isinstance(key, str))

    @property
    def key(self) -> str:
        """The last key of the path."""
        return str(self._path[-1])

    def as_table(self, value: Any) -> Mapping[str, Any]:
        """The value, if it is a table."""
        if not isinstance(value, Mapping):
            raise self.fail(f"{self.key} is {_show(value)}. Make it a table: [{self.name}]")
        return value

    def as_tables(self, value: Any) -> list[Mapping[str, Any]]:
        """The value, if it is an array of tables."""
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.fail(
                f"{self.key} is not an array of tables. Begin each with [[{self.name}]], in two "
                "brackets."
            )
        return value

    def as_count(self, value: Any) -> int:
        """The value, if it is a count."""
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
        """The value as names, if it is text or a list of texts, each one `allowed` (if given)."""
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
    """`Did you mean …?`, or a list of all allowed words if none is similar."""
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


_LINE = re.compile(r"line (\d+)")


class ContractFile(Record, frozen=True, kw_only=True):
    """A contract, its file, and the line of each limit."""

    path: str
    contract: Contract
    lines: Mapping[Limit, int]


def read_contract(path: str | os.PathLike[str]) -> Contract:
    """Read a contract from a file.

    Args:
        path: A TOML file.

    Examples:
        >>> contract = read_contract("shardscope.toml")
    """
    return open_contract(path).contract


def open_contract(path: str | os.PathLike[str]) -> ContractFile:
    """Read a contract from a file, with the line of each limit.

    Args:
        path: A TOML file.

    Examples:
        >>> open_contract("shardscope.toml").contract
    """
    return parse_contract(read_text(path), name=os.fspath(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, with its line ends."""
    name = os.fspath(path)
    try:
        return read_text_file(path)
    except FileNotFoundError as error:
        raise ContractError(
            f"There is no contract '{name}'. Name one with --contract, or record one from the "
            f"current figures: shardscope contract record RECORDING -o {name}"
        ) from error
    except UnicodeDecodeError as error:
        raise ContractError(f"'{name}' is not text in UTF-8. Name a TOML file.") from error
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ContractError(f"cannot read '{name}': {reason}. Name a TOML file.") from error


def parse_contract(text: str, *, name: str = "shardscope.toml") -> ContractFile:
    """A contract from its text; `name` is the file's name in errors."""
    document = parse_toml(text, name)
    root = TomlLocation(name, find_lines(text))
    root.check_keys(document, ("contract", "ci"))  # the second is read by `shardscope ci`
    if "contract" not in document:
        raise ContractError(
            f"'{name}' has no [contract] table, so it has no limits. Add limits below that "
            "header, or record the current figures: shardscope contract record RECORDING -o "
            f"{name} --force"
        )
    location = root.at("contract")
    limits = list(_read_limits(location, location.as_table(document["contract"])))
    if not limits:
        raise location.fail("the contract has no limits. Add one, such as gaps = 0")
    lines: dict[Limit, int] = {}
    for limit, line in limits:
        lines.setdefault(limit, line)
    return ContractFile(
        path=name, contract=Contract(tuple(limit for limit, _ in limits)), lines=lines
    )


def has_limits(text: str, name: str = "shardscope.toml") -> bool:
    """Whether a file has a `[contract]`; one with `[ci]` alone has not, nor an empty one."""
    document = parse_toml(text, name)
    return bool(document.keys() - {"ci"})


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The document; raises ContractError with the line if it is not valid TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fact, _, position = str(error).rpartition(" (at ")
        line = _LINE.search(position)  # or the end of the document
        number = line[1] if line else text.rstrip("\n").count("\n") + 1
        raise ContractError(f"{name}, line {number}: {fact}. Correct the TOML.") from error
    except RecursionError as error:
        raise ContractError(f"{name}: it is nested too deeply. Correct the TOML.") from error
    except ValueError as error:  # Python refuses to read numbers of thousands of digits
        raise ContractError(f"{name}: a number has too many digits. Correct the TOML.") from error


def _read_limits(location: TomlLocation, table: Mapping[str, Any]) -> Iterator[tuple[Limit, int]]:
    location.check_keys(table, CONTRACT_KEYS)
    for key, value in table.items():
        key_location = location.at(key)
        if key == "comm":
            for index, comm_table in enumerate(key_location.as_tables(value)):
                yield from read_comm(key_location.at(index), comm_table)
        elif key == "findings":
            yield from _read_findings(key_location, value)
        elif key == "types":
            for tensor, types in key_location.as_table(value).items():
                of_tensor = key_location.at(tensor)
                limit = Limit(figure=Figure.TYPES, tensor=tensor, types=of_tensor.as_name(types))
                yield limit, of_tensor.line
        elif key == UNASKED:
            causes = (CauseKind.UNASKED,)
            yield (
                Limit(figure=Figure.COUNT, causes=causes, most=key_location.as_count(value)),
                key_location.line,
            )
        else:
            figure = CEILINGS[key]
            yield (
                Limit(figure=figure, most=_read_number(key_location, figure, value)),
                key_location.line,
            )


def _read_findings(location: TomlLocation, value: Any) -> Iterator[tuple[Limit, int]]:
    """The limits on findings: a number for all of them, or a table of severities and rules."""
    if not isinstance(value, Mapping):
        value = {ANY: location.as_count(value)}
    location.check_keys(value, FINDING_KEYS)
    for key, most in value.items():
        key_location = location.at(key)
        if key == "rules":
            for rule, count in key_location.as_table(most).items():
                of_rule = Limit(
                    figure=Figure.FINDINGS, rule=rule, most=key_location.at(rule).as_count(count)
                )
                yield of_rule, key_location.at(rule).line
        else:
            severity = None if key == ANY else Severity(key)
            count = key_location.as_count(most)
            yield Limit(figure=Figure.FINDINGS, severity=severity, most=count), key_location.line


def read_comm(location: TomlLocation, table: Mapping[str, Any]) -> Iterator[tuple[Limit, int]]:
    """The limits of a `[[contract.comm]]` table, one for each figure, with their lines."""
    location.check_keys(table, COMM_KEYS)
    selector = read_selector(location, table)
    bounds: dict[Figure, dict[Side, int]] = {}
    for key, value in table.items():
        if key in BOUNDS:
            figure, side = BOUNDS[key]
            bounds.setdefault(figure, {})[side] = _read_number(location.at(key), figure, value)
    if not bounds:
        raise location.fail("it has no limit. Give it count, max_bytes or another bound.")
    for figure, sides in bounds.items():
        yield _make_limit(location, figure, sides, selector), location.line


def _make_limit(
    location: TomlLocation, figure: Figure, sides: Mapping[Side, int], selector: Selector
) -> Limit:
    if "exact" in sides and len(sides) > 1:
        raise location.fail(f"it has {figure} beside max_{figure} or min_{figure}. Keep one.")
    try:
        return Limit(
            figure=figure,
            least=sides.get("least", sides.get("exact")),
            most=sides.get("most", sides.get("exact")),
            **selector._asdict(),
        )
    except ContractError as error:
        raise location.fail(str(error)) from error


def read_selector(location: TomlLocation, table: Mapping[str, Any]) -> Selector:
    """The selector of the collectives that a table limits."""

    def read(key: str, allowed: Iterable[str] = ()) -> tuple[str, ...]:
        return location.at(key).as_names(table[key], allowed) if key in table else ()

    return Selector(
        module=location.at("module").as_name(table["module"]) if "module" in table else None,
        phases=tuple(map(Phase, read("phase", Phase))),
        axes=read("axis"),
        kinds=tuple(map(CollectiveKind, read("kind", CollectiveKind))),
        causes=tuple(map(CauseKind, read("cause", CauseKind))),
    )


def _read_number(location: TomlLocation, figure: Figure, value: Any) -> int:
    return location.as_size(value) if figure.is_size else location.as_count(value)
