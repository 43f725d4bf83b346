"""`shardscope.toml`: reading a contract, and saying what is wrong with one, and where."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardscope.contract.keys import (
    ANY,
    BOUNDS,
    CEILINGS,
    COMM_KEYS,
    CONTRACT_KEYS,
    FINDING_KEYS,
    UNASKED,
    Side,
)
from shardscope.contract.limits import CauseKind, Contract, Figure, Limit, Selector
from shardscope.contract.lines import find_lines
from shardscope.contract.place import Place
from shardscope.errors import ContractError
from shardscope.record import CollectiveKind, Phase, Record, Severity, read_text_file

__all__ = [
    "ContractFile",
    "open_contract",
    "parse_contract",
    "read_comm",
    "read_contract",
    "read_selector",
    "read_text",
]

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
    """What a file says, with the line ends that it has."""
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
    """A contract from its text; `name` is for what is said about it."""
    document = _parse(text, name)
    root = Place(name, find_lines(text))
    root.check_keys(document, ("contract",))
    if "contract" not in document:
        raise ContractError(
            f"'{name}' has no [contract] table, so it has no limits. Add limits below that "
            "header, or record the current figures: shardscope contract record RECORDING -o "
            f"{name} --force"
        )
    place = root.at("contract")
    limits = list(_read_limits(place, place.as_table(document["contract"])))
    if not limits:
        raise place.fail("the contract has no limits. Add one, such as gaps = 0")
    lines: dict[Limit, int] = {}
    for limit, line in limits:
        lines.setdefault(limit, line)
    return ContractFile(
        path=name, contract=Contract(tuple(limit for limit, _ in limits)), lines=lines
    )


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fact, _, place = str(error).rpartition(" (at ")
        line = _LINE.search(place)  # or the end of the document
        number = line[1] if line else text.rstrip("\n").count("\n") + 1
        raise ContractError(f"{name}, line {number}: {fact}. Correct the TOML.") from error
    except RecursionError as error:
        raise ContractError(f"{name}: it is nested too deeply. Correct the TOML.") from error
    except ValueError as error:  # Python refuses to read numbers of thousands of digits
        raise ContractError(f"{name}: a number has too many digits. Correct the TOML.") from error


def _read_limits(place: Place, table: Mapping[str, Any]) -> Iterator[tuple[Limit, int]]:
    place.check_keys(table, CONTRACT_KEYS)
    for key, value in table.items():
        at = place.at(key)
        if key == "comm":
            for index, one in enumerate(at.as_tables(value)):
                yield from read_comm(at.at(index), one)
        elif key == "findings":
            yield from _read_findings(at, value)
        elif key == UNASKED:
            causes = (CauseKind.UNASKED,)
            yield Limit(figure=Figure.COUNT, causes=causes, most=at.as_count(value)), at.line
        else:
            figure = CEILINGS[key]
            yield Limit(figure=figure, most=_read_number(at, figure, value)), at.line


def _read_findings(place: Place, value: Any) -> Iterator[tuple[Limit, int]]:
    """A number for all of them, or a table of severities and rules."""
    if not isinstance(value, Mapping):
        value = {ANY: place.as_count(value)}
    place.check_keys(value, FINDING_KEYS)
    for key, most in value.items():
        at = place.at(key)
        if key == "rules":
            for rule, count in at.as_table(most).items():
                of_rule = Limit(figure=Figure.FINDINGS, rule=rule, most=at.at(rule).as_count(count))
                yield of_rule, at.at(rule).line
        else:
            severity = None if key == ANY else Severity(key)
            count = at.as_count(most)
            yield Limit(figure=Figure.FINDINGS, severity=severity, most=count), at.line


def read_comm(place: Place, table: Mapping[str, Any]) -> Iterator[tuple[Limit, int]]:
    """A limit for each figure that the table bounds, and its line."""
    place.check_keys(table, COMM_KEYS)
    selector = read_selector(place, table)
    bounds: dict[Figure, dict[Side, int]] = {}
    for key, value in table.items():
        if key in BOUNDS:
            figure, side = BOUNDS[key]
            bounds.setdefault(figure, {})[side] = _read_number(place.at(key), figure, value)
    if not bounds:
        raise place.fail("it has no limit. Give it count, max_bytes or another bound.")
    for figure, sides in bounds.items():
        yield _make_limit(place, figure, sides, selector), place.line


def _make_limit(
    place: Place, figure: Figure, sides: Mapping[Side, int], selector: Selector
) -> Limit:
    if "exact" in sides and len(sides) > 1:
        raise place.fail(f"it has {figure} beside max_{figure} or min_{figure}. Keep one.")
    try:
        return Limit(
            figure=figure,
            least=sides.get("least", sides.get("exact")),
            most=sides.get("most", sides.get("exact")),
            **selector._asdict(),
        )
    except ContractError as error:
        raise place.fail(str(error)) from error


def read_selector(place: Place, table: Mapping[str, Any]) -> Selector:
    """Which collectives a table of a file limits."""

    def read(key: str, allowed: Iterable[str] = ()) -> tuple[str, ...]:
        return place.at(key).as_names(table[key], allowed) if key in table else ()

    return Selector(
        module=place.at("module").as_name(table["module"]) if "module" in table else None,
        phases=tuple(map(Phase, read("phase", Phase))),
        axes=read("axis"),
        kinds=tuple(map(CollectiveKind, read("kind", CollectiveKind))),
        causes=tuple(map(CauseKind, read("cause", CauseKind))),
    )


def _read_number(place: Place, figure: Figure, value: Any) -> int:
    return place.as_size(value) if figure.is_size else place.as_count(value)
