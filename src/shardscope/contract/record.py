"""`record_contract(recording)`: a recording's figures as a contract, with repeated layers as
patterns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from glob import escape
from itertools import groupby
from typing import Literal

from msgspec.structs import replace

from shardscope.contract.check import is_measurable
from shardscope.contract.collective_totals import Facet, Traffic, read_traffic
from shardscope.contract.limits import CauseKind, Contract, Figure, Limit, Selector
from shardscope.contract.totals import measure_total
from shardscope.errors import ContractError
from shardscope.record import Phase, Recording, Severity
from shardscope.record.layer_names import fold_layers, is_layer_number
from shardscope.record.units import round_size_up

Parts = tuple[str, ...]
GroupKey = Callable[[str], object]
"""What all modules that a pattern fits have in common, or None if they differ."""


def fold_names(names: Iterable[str], group_key: GroupKey) -> list[str]:
    """The fewest patterns for the names; all modules that a pattern matches have the same key."""
    by_shape: dict[str, list[Parts]] = defaultdict(list)
    for name in names:
        by_shape[fold_layers(name)].append(tuple(name.split(".")))
    return [
        ".".join(parts)
        for same_shape in by_shape.values()
        for parts in _fold(same_shape, 0, group_key)
    ]


def _fold(names: list[Parts], start: int, group_key: GroupKey) -> list[Parts]:
    """Patterns for names that differ only in layer numbers, and not in the parts before `start`."""
    first = names[0]
    starred = _escape(first[:start]) + tuple(
        "*" if is_layer_number(part) else escape(part) for part in first[start:]
    )
    if len(names) == 1:
        return [_escape(first)]
    if group_key(".".join(starred)) is not None:
        return [starred]
    position = next(
        index for index in range(start, len(first)) if len({name[index] for name in names}) > 1
    )
    return list(_fold_numbered(names, position, group_key))


def _fold_numbered(names: list[Parts], index: int, group_key: GroupKey) -> Iterator[Parts]:
    """Patterns by layer number; consecutive numbers with the same key become a range."""
    buckets: dict[str, list[Parts]] = defaultdict(list)
    for name in names:
        buckets[name[index]].append(name)
    numbers = sorted(buckets, key=int)
    folded = {number: _fold(buckets[number], index + 1, group_key) for number in numbers}

    def kind(item: tuple[int, str]) -> object:
        position, number = item
        tails = [parts[index + 1 :] for parts in folded[number]]
        # Consecutive numbers have the same distance to their positions.
        return (
            int(number) - position,
            tails,
            [group_key(".".join(pattern)) for pattern in folded[number]],
        )

    for _, run in groupby(enumerate(numbers), key=kind):
        yield from _join([number for _, number in run], folded, index, group_key)


def _join(
    numbers: list[str], folded: dict[str, list[Parts]], index: int, group_key: GroupKey
) -> Iterator[Parts]:
    number_range = f"[{numbers[0]}-{numbers[-1]}]"
    joined = [
        (*pattern[:index], number_range, *pattern[index + 1 :]) for pattern in folded[numbers[0]]
    ]
    if len(numbers) > 1 and all(group_key(".".join(pattern)) is not None for pattern in joined):
        yield from joined
    else:
        yield from (pattern for number in numbers for pattern in folded[number])


def _escape(parts: Parts) -> Parts:
    return tuple(map(escape, parts))


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
    fresh = [*_list_totals(), *_list_comm(traffics, by)]
    named = set(map(_limit_key, known))
    all_limits = [*known, *(limit for limit in fresh if _limit_key(limit) not in named)]
    measured = (_measure(limit, recordings, traffics, slack) for limit in all_limits)
    return Contract(tuple(limit for new_limits in measured for limit in new_limits))


def _limit_key(limit: Limit) -> object:
    return limit.figure, limit.selector, limit.severity, limit.rule


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
        for pattern in fold_names(names, partial(_compare, traffic, selector))
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
    spans = list(
        _comm_ranges(limit, traffics) if limit.is_on_comm else _total_range(limit, recordings)
    )
    if spans:
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        yield _with_numbers(limit, low, high, slack)
    elif limit.most != _UNMEASURED and not _is_outdated(limit, traffics):
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
