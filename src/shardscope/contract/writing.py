"""`shardscope.toml`: writing a contract, and writing it again with comments and order kept."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, final

import tomlkit
from tomlkit.items import Array
from tomlkit.toml_document import TOMLDocument

from shardscope.contract.keys import ANY, BOUNDS, CEILINGS, SELECTORS, UNASKED
from shardscope.contract.limits import (
    COMM_FIGURES,
    Contract,
    Figure,
    Limit,
    Selector,
    is_in_table,
)
from shardscope.contract.place import Place
from shardscope.contract.reading import parse_contract, read_selector, read_text
from shardscope.contract.sizes import parse_size, write_size
from shardscope.record import write_file

__all__ = ["render_contract", "write_contract"]

_HEADING = "Limits for this program. Check them with: shardscope contract check RECORDING"

Table = MutableMapping[str, Any]
Values = dict[str, str | int]


def write_contract(
    contract: Contract, path: str | os.PathLike[str], *, force: bool = False
) -> Path:
    """Write a contract to a file.

    Args:
        contract: The limits.
        path: A TOML file.
        force: Change a file that exists; its comments and order are kept.

    Examples:
        >>> write_contract(contract, "shardscope.toml")
    """
    before = ""
    if force and os.path.isfile(path):
        before = read_text(path)
    return write_file(render_contract(contract, before=before).encode(), path, force=force)


def render_contract(contract: Contract, *, before: str = "") -> str:
    """Render a contract as TOML.

    Args:
        contract: The limits.
        before: The text of a contract whose comments and order are kept.

    Examples:
        >>> print(render_contract(contract))
    """
    if before:
        parse_contract(before)  # what cannot be read is not written over by mistake
    document = tomlkit.parse(before) if before else _begin()
    table = document["contract"]
    assert isinstance(table, MutableMapping)
    _put(table, _list_ceilings(contract), owned=(*CEILINGS, UNASKED))
    _put_findings(table, [one for one in contract.limits if one.figure is Figure.FINDINGS])
    _put_comm(table, filter(is_in_table, contract.limits))
    return tomlkit.dumps(document)


def _begin() -> TOMLDocument:
    document = tomlkit.document()
    document.add(tomlkit.comment(_HEADING))
    document.add("contract", tomlkit.table())
    return document


def _list_ceilings(contract: Contract) -> Values:
    return {
        UNASKED if limit.is_on_unasked else str(limit.figure): _write_value(limit, limit.most)
        for limit in contract.limits
        if not is_in_table(limit) and limit.figure is not Figure.FINDINGS
    }


def _write_value(limit: Limit, bound: int | None) -> str | int:
    assert bound is not None
    return write_size(bound) if limit.figure.is_size else bound


def _put(table: Table, values: Values, *, owned: Iterable[str]) -> None:
    """Set those values, and drop what else the keys held; what says the same already stays."""
    for key in [key for key in table if key in owned and key not in values]:
        del table[key]
    for key, value in values.items():
        if key not in table or _read(table[key]) != _read(value):
            table[key] = value


def _read(value: Any) -> object:
    """The number that a value stands for, or the value."""
    plain = _plain(value)
    size = parse_size(plain) if isinstance(plain, str) else None
    return plain if size is None else size


def _put_findings(table: Table, limits: list[Limit]) -> None:
    """A number where all findings are limited together, else a table of severities and rules."""
    whole = [one.most for one in limits if one.severity is None and not one.rule]
    if not limits or (len(limits) == 1 and whole and not isinstance(table.get("findings"), dict)):
        values: Values = {"findings": _write_value(limits[0], whole[0])} if limits else {}
        _put(table, values, owned=("findings",))
        return
    if not isinstance(table.get("findings"), MutableMapping):
        table.pop("findings", None)
        _add_section(table, "findings")
    findings = table["findings"]
    numbers = {one: _write_value(one, one.most) for one in limits}
    severities = {str(one.severity or ANY): numbers[one] for one in limits if not one.rule}
    _put(findings, severities, owned=[key for key in findings if key != "rules"])
    _put_rules(findings, {one.rule: numbers[one] for one in limits if one.rule})


def _put_rules(findings: Table, rules: Values) -> None:
    if not rules:
        findings.pop("rules", None)
        return
    if "rules" not in findings:
        findings["rules"] = tomlkit.inline_table()
    _put(findings["rules"], rules, owned=list(findings["rules"]))


def _add_section(table: Table, key: str) -> None:
    section = tomlkit.table()
    section.trivia.indent = "\n"
    table[key] = section


def _list_tables(limits: Iterable[Limit]) -> Iterator[tuple[Selector, Values]]:
    """Limits on the same collectives that follow each other share a table."""
    current: Selector | None = None
    values: Values = {}
    for limit in limits:
        if limit.selector != current or limit.figure in _figures(values):
            if current is not None:
                yield current, values
            current, values = limit.selector, {}
        values |= dict(_list_bounds(limit))
    if current is not None:
        yield current, values


def _figures(table: Iterable[str]) -> list[Figure]:
    return list(dict.fromkeys(BOUNDS[key].figure for key in table if key in BOUNDS))


def _list_bounds(limit: Limit) -> Iterator[tuple[str, str | int]]:
    if limit.is_exact:
        yield str(limit.figure), _write_value(limit, limit.most)
        return
    for prefix, bound in (("min_", limit.least), ("max_", limit.most)):
        if bound is not None:
            yield f"{prefix}{limit.figure}", _write_value(limit, bound)


@final
class _Left:
    """Limits that are still to be written."""

    def __init__(self, limits: Iterable[Limit]) -> None:
        self._piles: dict[tuple[Selector, Figure], list[tuple[int, Limit]]] = defaultdict(list)
        for index, limit in enumerate(limits):
            self._piles[limit.selector, limit.figure].append((index, limit))

    def take(self, selector: Selector, figures: Iterable[Figure]) -> Values:
        """The first on each of the figures, as a table has them; they are not left any more."""
        piles = (self._piles.get((selector, figure)) for figure in figures)
        limits = [pile.pop(0)[1] for pile in piles if pile]
        return {key: value for limit in limits for key, value in _list_bounds(limit)}

    def rest(self) -> Iterator[Limit]:
        """All that are left, in their order."""
        indexed = (item for pile in self._piles.values() for item in pile)
        yield from (limit for _, limit in sorted(indexed, key=lambda item: item[0]))


def _put_comm(table: Table, limits: Iterable[Limit]) -> None:
    """Tables that are there get their numbers; those that are not wanted go, new ones follow."""
    comm = table.get("comm", [])
    left = _Left(limits)
    for index in reversed([at for at, one in enumerate(comm) if not _renew(one, left)]):
        del comm[index]
    for one in comm:
        new = [figure for figure in COMM_FIGURES if figure not in _figures(one)]
        one.update(left.take(_read_selector(one), new))
    if not comm:
        table.pop("comm", None)
        comm = tomlkit.aot()
    for selector, values in _list_tables(left.rest()):
        comm.append(_make_table(selector, values, is_inline=isinstance(comm, Array)))
    if comm and "comm" not in table:
        table["comm"] = comm


def _renew(table: Table, left: _Left) -> bool:
    """Give a table today's numbers of what it limits; nothing may be left of that."""
    values = left.take(_read_selector(table), _figures(table))
    if values:
        _put(table, values, owned=BOUNDS)
    return bool(values)


def _read_selector(table: Table) -> Selector:
    return read_selector(Place("", {}), {key: _plain(table[key]) for key in table})


def _make_table(selector: Selector, values: Values, *, is_inline: bool) -> Table:
    made = tomlkit.inline_table() if is_inline else tomlkit.table()
    if not is_inline:
        made.trivia.indent = "\n"  # an empty line before it
    for key, field in SELECTORS.items():
        wanted = getattr(selector, field)
        if isinstance(wanted, tuple):
            names = [str(one) for one in wanted]
            wanted = (names[0] if len(names) == 1 else names) if names else None
        if wanted is not None:
            made[key] = wanted
    for bound, value in values.items():
        made[bound] = value
    return made


def _plain(value: Any) -> Any:
    return value.unwrap() if hasattr(value, "unwrap") else value
