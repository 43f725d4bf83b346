"""`record_contract(recording)` and `write_contract`: a recording's figures as a contract file.

Repeated layers share a pattern. A file that exists keeps its comments, its order and the limits
that the user added.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import tomlkit
from msgspec.structs import replace
from tomlkit.items import Array
from tomlkit.toml_document import TOMLDocument

from shardscope.contract.check import is_measurable
from shardscope.contract.collective_totals import Facet, Traffic, read_traffic
from shardscope.contract.limits import (
    ANY,
    BOUNDS,
    CEILINGS,
    COMM_FIGURES,
    SELECTORS,
    UNASKED,
    CauseKind,
    Contract,
    Figure,
    Limit,
    Selector,
    is_in_table,
)
from shardscope.contract.tensor_types import find_tensors, list_type_limits, name_types
from shardscope.contract.toml_reader import (
    TomlLocation,
    has_limits,
    parse_contract,
    read_selector,
    read_text,
)
from shardscope.contract.totals import measure_total
from shardscope.errors import ContractError
from shardscope.record import Phase, Recording, Severity, write_file
from shardscope.record.patterns import find_patterns
from shardscope.record.units import parse_size, round_size_up, write_size

Grain = Literal["module", "axis", "total"]
"""How fine limits on collectives are; the total is always limited too."""

_UNMEASURED = 2**63 - 1  # until it is measured
_TOTALS = (
    Figure.PEAK_MEMORY,
    Figure.GRAPH_BREAKS,
    Figure.RECOMPILES,
    Figure.SKIPPED_FUNCTIONS,
    Figure.UNCOVERED_OPS,
    Figure.FALLBACKS,
    Figure.GAPS,
)
_SEVERITIES = (Severity.ERROR, Severity.WARNING)


def record_contract(
    *recordings: Recording,
    by: Grain = "module",
    slack: float = 0.0,
    previous: Contract | None = None,
) -> Contract:
    """Make a contract from the figures of recordings.

    Counts are exact; bytes may decrease.

    Args:
        *recordings: One recording for each instrument that ran.
        by: How limits on collectives are grouped: "module", "axis" or "total".
        slack: The fraction by which bytes may increase: 0.05 for 5 %.
        previous: A contract whose limits are kept, with the new figures, unless they match nothing
            any more.

    Examples:
        >>> contract = record_contract(load("step.json.gz"), slack=0.05)
    """
    if not 0 <= slack <= 100:
        raise ContractError(f"A slack of {slack:g} is not a fraction. Give one such as 0.05.")
    traffics = [traffic for traffic in map(read_traffic, recordings) if traffic is not None]
    if any(traffic.is_lossy for traffic in traffics):
        raise ContractError(
            "Records of this run were lost, so its figures are too low for a contract; "
            "`shardscope show` lists what was lost. Record the run again."
        )
    known = () if previous is None else previous.limits
    fresh = [*_list_totals(), *list_type_limits(recordings), *_list_comm(traffics, by)]
    named = set(map(_limit_key, known))
    all_limits = [*known, *(limit for limit in fresh if _limit_key(limit) not in named)]
    measured = (_measure(limit, recordings, traffics, slack) for limit in all_limits)
    return Contract(tuple(limit for new_limits in measured for limit in new_limits))


def _limit_key(limit: Limit) -> object:
    return limit.figure, limit.selector, limit.severity, limit.rule, limit.tensor


def _list_totals() -> Iterator[Limit]:
    yield from (Limit(figure=figure, most=_UNMEASURED) for figure in _TOTALS)
    for severity in _SEVERITIES:
        yield Limit(figure=Figure.FINDINGS, severity=severity, most=_UNMEASURED)
    yield Limit(figure=Figure.COUNT, causes=(CauseKind.UNASKED,), most=_UNMEASURED)


def _list_comm(traffics: Sequence[Traffic], by: Grain) -> Iterator[Limit]:
    selectors: dict[Selector, None] = {}
    for traffic in traffics:
        selectors[Selector()] = None
        if by != "total":
            selectors |= dict.fromkeys(_list_axes(traffic, is_outside_modules=by == "module"))
        if by == "module":
            selectors |= dict.fromkeys(_list_modules(traffic))
    for selector in selectors:
        yield Limit(figure=Figure.COUNT, least=0, most=0, **selector._asdict())
        yield Limit(figure=Figure.BYTES, most=_UNMEASURED, **selector._asdict())


def _list_axes(traffic: Traffic, *, is_outside_modules: bool) -> list[Selector]:
    """A selector for each axis, phase and kind; optionally only of collectives in no module."""
    facets = dict.fromkeys(
        _select(facet)
        for owner, facet in traffic.owned()
        if owner is None or not is_outside_modules
    )
    return sorted(facets, key=_sort_key)


def _list_modules(traffic: Traffic) -> list[Selector]:
    """Selectors of the collectives of modules, identical layers as one, in the model's order."""
    # A module may issue the same for several causes, which a contract does not distinguish.
    owners: dict[Selector, dict[str, None]] = defaultdict(dict)
    for owner, facet in traffic.owned():
        if owner is not None:
            owners[_select(facet)][owner] = None
    selectors = [
        selector._replace(module=pattern)
        for selector, names in owners.items()
        for pattern in find_patterns(names, partial(_compare, traffic, selector))
    ]
    order = traffic.names.order
    return sorted(
        selectors, key=lambda selector: (order[_first(selector, traffic)], *_sort_key(selector))
    )


def _first(selector: Selector, traffic: Traffic) -> str:
    assert selector.module is not None
    return traffic.names.match(selector.module)[0]


def _compare(traffic: Traffic, selector: Selector, pattern: str) -> object:
    """The figures that all modules matching the pattern have, or None if they differ."""
    selector = selector._replace(module=pattern)
    counts = traffic.read(selector, Figure.COUNT)
    sizes = traffic.read(selector, Figure.BYTES)
    figures_by_module: dict[str | None, list[object]] = defaultdict(list)
    for count, size in zip(counts, sizes, strict=True):
        figures_by_module[count.module].append((count.value, size.value))
    # Ranks of other pipeline stages have other layers, which may still be identical.
    distinct = {frozenset(figures) for figures in figures_by_module.values()}
    return next(iter(distinct)) if len(distinct) == 1 else None


def _select(facet: Facet) -> Selector:
    return Selector(None, (facet.phase,), (facet.axis,), (facet.kind,))


def _sort_key(selector: Selector) -> tuple[object, ...]:
    phases = list(Phase)
    return selector.axes, [phases.index(phase) for phase in selector.phases], selector.kinds


def _measure(
    limit: Limit, recordings: Sequence[Recording], traffics: Sequence[Traffic], slack: float
) -> Iterator[Limit]:
    """The limit with the measured numbers, or nothing if it matches nothing.

    A previous limit that no recording measured stays as it was.
    """
    if limit.figure is Figure.TYPES:
        yield from _measure_types(limit, recordings)
        return
    spans = list(
        _comm_ranges(limit, traffics) if limit.is_on_comm else _total_range(limit, recordings)
    )
    if spans:
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        yield _with_numbers(limit, low, high, slack)
    elif limit.most != _UNMEASURED and not _is_outdated(limit, traffics):
        yield limit


def _measure_types(limit: Limit, recordings: Sequence[Recording]) -> Iterator[Limit]:
    tensors = find_tensors(limit, recordings)
    if tensors:
        yield replace(limit, types=name_types(tensors[0]))
    elif not any(recording.types for recording in recordings):
        yield limit


def _total_range(limit: Limit, recordings: Sequence[Recording]) -> Iterator[tuple[int, int]]:
    totals = measure_total(limit, recordings)
    if not any(total.flaw for total in totals):
        yield from ((total.value, total.value) for total in totals)


def _comm_ranges(limit: Limit, traffics: Iterable[Traffic]) -> Iterator[tuple[int, int]]:
    for traffic in traffics:
        if is_measurable(limit, traffic) and traffic.has_module_and_axes(limit.selector):
            values = [reading.value for reading in traffic.read(limit.selector, limit.figure)]
            if values:
                yield min(values), max(values)


def _is_outdated(limit: Limit, traffics: Sequence[Traffic]) -> bool:
    """Whether collectives were recorded, and the limit matches none of them any more."""
    return limit.is_on_comm and any(is_measurable(limit, traffic) for traffic in traffics)


def _with_numbers(limit: Limit, low: int, high: int, slack: float) -> Limit:
    """The same kind of limit with new numbers."""
    if limit.figure.is_size and slack:
        low, high = int(low * (1 - min(slack, 1))), round_size_up(high, slack)
    return replace(
        limit,
        least=None if limit.least is None else low,
        most=None if limit.most is None else high,
    )


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
    if before and has_limits(before):
        parse_contract(before)  # raises, so that an invalid file is not overwritten
    document = tomlkit.parse(before) if before else _begin()
    if "contract" not in document:
        document.add("contract", tomlkit.table())
    table = document["contract"]
    assert isinstance(table, MutableMapping)
    _set_values(table, _list_ceilings(contract), owned=(*CEILINGS, UNASKED))
    types = {limit.tensor: limit.types for limit in contract.limits if limit.tensor}
    _set_types(table, types)
    _set_findings(table, [limit for limit in contract.limits if limit.figure is Figure.FINDINGS])
    _set_comm(table, filter(is_in_table, contract.limits))
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
        if not is_in_table(limit) and limit.figure not in (Figure.FINDINGS, Figure.TYPES)
    }


def _write_value(limit: Limit, bound: int | None) -> str | int:
    assert bound is not None
    return write_size(bound) if limit.figure.is_size else bound


def _set_values(table: Table, values: Values, *, owned: Iterable[str]) -> None:
    """Set the values, and remove other `owned` keys; equal values stay as written."""
    for key in [key for key in table if key in owned and key not in values]:
        del table[key]
    for key, value in values.items():
        if key not in table or _read(table[key]) != _read(value):
            table[key] = value


def _read(value: Any) -> object:
    """The number of bytes if the value is a size, else the value."""
    unwrapped = _unwrap(value)
    size = parse_size(unwrapped) if isinstance(unwrapped, str) else None
    return unwrapped if size is None else size


def _set_findings(table: Table, limits: list[Limit]) -> None:
    """Write a number if all findings are limited together, else a table of severities and rules."""
    unconditional = [limit.most for limit in limits if limit.severity is None and not limit.rule]
    if not limits or (
        len(limits) == 1 and unconditional and not isinstance(table.get("findings"), dict)
    ):
        values: Values = {"findings": _write_value(limits[0], unconditional[0])} if limits else {}
        _set_values(table, values, owned=("findings",))
        return
    if not isinstance(table.get("findings"), MutableMapping):
        table.pop("findings", None)
        _add_section(table, "findings")
    findings = table["findings"]
    numbers = {limit: _write_value(limit, limit.most) for limit in limits}
    severities = {str(limit.severity or ANY): numbers[limit] for limit in limits if not limit.rule}
    _set_values(findings, severities, owned=[key for key in findings if key != "rules"])
    _set_rules(findings, {limit.rule: numbers[limit] for limit in limits if limit.rule})


def _set_types(table: Table, types: Mapping[str, str]) -> None:
    if not types:
        table.pop("types", None)
        return
    if "types" not in table:
        _add_section(table, "types")
    _set_values(table["types"], dict(types), owned=list(table["types"]))


def _set_rules(findings: Table, rules: Values) -> None:
    if not rules:
        findings.pop("rules", None)
        return
    if "rules" not in findings:
        findings["rules"] = tomlkit.inline_table()
    _set_values(findings["rules"], rules, owned=list(findings["rules"]))


def _add_section(table: Table, key: str) -> None:
    section = tomlkit.table()
    section.trivia.indent = "\n"
    table[key] = section


def _list_tables(limits: Iterable[Limit]) -> Iterator[tuple[Selector, Values]]:
    """The tables to write: consecutive limits on the same collectives share a table."""
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
class _UnwrittenLimits:
    """Limits that are still to be written."""

    def __init__(self, limits: Iterable[Limit]) -> None:
        self._limits: dict[tuple[Selector, Figure], list[tuple[int, Limit]]] = defaultdict(list)
        for index, limit in enumerate(limits):
            self._limits[limit.selector, limit.figure].append((index, limit))

    def take(self, selector: Selector, figures: Iterable[Figure]) -> Values:
        """Remove the first limit on each figure, and return their keys and values."""
        queues = (self._limits.get((selector, figure)) for figure in figures)
        limits = [queue.pop(0)[1] for queue in queues if queue]
        return {key: value for limit in limits for key, value in _list_bounds(limit)}

    def remaining(self) -> Iterator[Limit]:
        """The remaining limits, in their order."""
        indexed = (item for queue in self._limits.values() for item in queue)
        yield from (limit for _, limit in sorted(indexed, key=lambda item: item[0]))


def _set_comm(table: Table, limits: Iterable[Limit]) -> None:
    """Update existing tables, remove those without a limit, and append new ones."""
    comm = table.get("comm", [])
    unwritten = _UnwrittenLimits(limits)
    for index in reversed(
        [
            position
            for position, comm_table in enumerate(comm)
            if not _update_table(comm_table, unwritten)
        ]
    ):
        del comm[index]
    for comm_table in comm:
        new_figures = [figure for figure in COMM_FIGURES if figure not in _figures(comm_table)]
        comm_table.update(unwritten.take(_read_selector(comm_table), new_figures))
    if not comm:
        table.pop("comm", None)
        comm = tomlkit.aot()
    for selector, values in _list_tables(unwritten.remaining()):
        comm.append(_make_table(selector, values, is_inline=isinstance(comm, Array)))
    if comm and "comm" not in table:
        table["comm"] = comm


def _update_table(table: Table, unwritten: _UnwrittenLimits) -> bool:
    """Update the numbers of a table; False if no limit remains for it."""
    values = unwritten.take(_read_selector(table), _figures(table))
    if values:
        _set_values(table, values, owned=BOUNDS)
    return bool(values)


def _read_selector(table: Table) -> Selector:
    return read_selector(TomlLocation("", {}), {key: _unwrap(table[key]) for key in table})


def _make_table(selector: Selector, values: Values, *, is_inline: bool) -> Table:
    table = tomlkit.inline_table() if is_inline else tomlkit.table()
    if not is_inline:
        table.trivia.indent = "\n"  # an empty line before it
    for key, field in SELECTORS.items():
        selected = getattr(selector, field)
        if isinstance(selected, tuple):
            names = [str(value) for value in selected]
            selected = (names[0] if len(names) == 1 else names) if names else None
        if selected is not None:
            table[key] = selected
    for bound, value in values.items():
        table[bound] = value
    return table


def _unwrap(value: Any) -> Any:
    return value.unwrap() if hasattr(value, "unwrap") else value
