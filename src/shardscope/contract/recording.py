"""`record_contract(recording)`: today's numbers as the contract."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from msgspec.structs import replace

from shardscope.contract.check import is_measurable
from shardscope.contract.folding import fold_names
from shardscope.contract.limits import CauseKind, Contract, Figure, Limit, Selector
from shardscope.contract.sizes import round_up
from shardscope.contract.traffic import Facet, Traffic, read_traffic
from shardscope.contract.wholes import measure_whole
from shardscope.errors import ContractError
from shardscope.record import Phase, Recording, Severity

__all__ = ["Grain", "record_contract"]

Grain = Literal["module", "axis", "total"]
"""How fine limits on collectives are; the total is always limited too."""

_ANY = 2**63 - 1  # until it is measured
_WHOLES = (
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
    traffics = [one for one in map(read_traffic, recordings) if one is not None]
    if any(traffic.is_lossy for traffic in traffics):
        raise ContractError(
            "Records of this run were lost, so its figures are too low for a contract; "
            "`shardscope show` lists what was lost. Record the run again."
        )
    known = () if previous is None else previous.limits
    fresh = [*_list_wholes(), *_list_comm(traffics, by)]
    named = set(map(_identify, known))
    wanted = [*known, *(limit for limit in fresh if _identify(limit) not in named)]
    measured = (_measure(limit, recordings, traffics, slack) for limit in wanted)
    return Contract(tuple(limit for some in measured for limit in some))


def _identify(limit: Limit) -> object:
    return limit.figure, limit.selector, limit.severity, limit.rule


def _list_wholes() -> Iterator[Limit]:
    yield from (Limit(figure=figure, most=_ANY) for figure in _WHOLES)
    for severity in _SEVERITIES:
        yield Limit(figure=Figure.FINDINGS, severity=severity, most=_ANY)
    yield Limit(figure=Figure.COUNT, causes=(CauseKind.UNASKED,), most=_ANY)


def _list_comm(traffics: Sequence[Traffic], by: Grain) -> Iterator[Limit]:
    selectors: dict[Selector, None] = {}
    for traffic in traffics:
        selectors[Selector()] = None
        if by != "total":
            selectors |= dict.fromkeys(_list_axes(traffic, is_homeless=by == "module"))
        if by == "module":
            selectors |= dict.fromkeys(_list_modules(traffic))
    for selector in selectors:
        yield Limit(figure=Figure.COUNT, least=0, most=0, **selector._asdict())
        yield Limit(figure=Figure.BYTES, most=_ANY, **selector._asdict())


def _list_axes(traffic: Traffic, *, is_homeless: bool) -> list[Selector]:
    """What was said along each axis, or only such as belongs to no module too."""
    facets = dict.fromkeys(
        _select(facet) for owner, facet in traffic.owned() if owner is None or not is_homeless
    )
    return sorted(facets, key=_place)


def _list_modules(traffic: Traffic) -> list[Selector]:
    """What modules said themselves, those that are alike as one, in the model's order."""
    # One module may have several causes for the same, which a contract does not keep apart.
    owners: dict[Selector, dict[str, None]] = defaultdict(dict)
    for owner, facet in traffic.owned():
        if owner is not None:
            owners[_select(facet)][owner] = None
    found = [
        selector._replace(module=pattern)
        for selector, names in owners.items()
        for pattern in fold_names(names, partial(_compare, traffic, selector))
    ]
    order = traffic.names.order
    return sorted(found, key=lambda one: (order[_first(one, traffic)], *_place(one)))


def _first(selector: Selector, traffic: Traffic) -> str:
    assert selector.module is not None
    return traffic.names.fit(selector.module)[0]


def _compare(traffic: Traffic, selector: Selector, pattern: str) -> object:
    """What every module that the pattern fits says, or None if they differ."""
    selector = selector._replace(module=pattern)
    counts = traffic.read(selector, Figure.COUNT)
    sizes = traffic.read(selector, Figure.BYTES)
    said: dict[str | None, list[object]] = defaultdict(list)
    for count, size in zip(counts, sizes, strict=True):
        said[count.module].append((count.value, size.value))
    # Ranks of other stages have other layers, which may be alike all the same.
    alike = {frozenset(one) for one in said.values()}
    return next(iter(alike)) if len(alike) == 1 else None


def _select(facet: Facet) -> Selector:
    return Selector(None, (facet.phase,), (facet.axis,), (facet.kind,))


def _place(selector: Selector) -> tuple[object, ...]:
    phases = list(Phase)
    return selector.axes, [phases.index(phase) for phase in selector.phases], selector.kinds


def _measure(
    limit: Limit, recordings: Sequence[Recording], traffics: Sequence[Traffic], slack: float
) -> Iterator[Limit]:
    """The limit with today's numbers, or none if it fits nothing.

    What nobody looked at stays as it was, if it was there before.
    """
    spans = list(
        _span_comm(limit, traffics) if limit.is_on_comm else _span_whole(limit, recordings)
    )
    if spans:
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        yield _restate(limit, low, high, slack)
    elif limit.most != _ANY and not _is_outdated(limit, traffics):
        yield limit


def _span_whole(limit: Limit, recordings: Sequence[Recording]) -> Iterator[tuple[int, int]]:
    wholes = measure_whole(limit, recordings)
    if not any(one.flaw for one in wholes):
        yield from ((one.value, one.value) for one in wholes)


def _span_comm(limit: Limit, traffics: Iterable[Traffic]) -> Iterator[tuple[int, int]]:
    for traffic in traffics:
        if is_measurable(limit, traffic) and traffic.has_what(limit.selector):
            values = [one.value for one in traffic.read(limit.selector, limit.figure)]
            if values:
                yield min(values), max(values)


def _is_outdated(limit: Limit, traffics: Sequence[Traffic]) -> bool:
    """Whether somebody looked, and what it names is not there any more."""
    return limit.is_on_comm and any(is_measurable(limit, traffic) for traffic in traffics)


def _restate(limit: Limit, low: int, high: int, slack: float) -> Limit:
    """The same kind of limit on other numbers; exact where they all agree, if it was before."""
    if limit.figure.is_size and slack:
        low, high = int(low * (1 - min(slack, 1))), round_up(high, slack)
    return replace(
        limit,
        least=None if limit.least is None else low,
        most=None if limit.most is None else high,
    )
