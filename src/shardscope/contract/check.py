"""`check(contract, recording)`: every limit that does not hold, and all there is to say of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardscope.contract.breach import Breach, BreachKind
from shardscope.contract.evidence import Witness
from shardscope.contract.limits import Contract, Figure, Limit
from shardscope.contract.remedies import advise, say_what_to_run, suggest_names
from shardscope.contract.traffic import Reading, Traffic, read_traffic
from shardscope.contract.wholes import Whole, measure_whole
from shardscope.contract.words import describe_bound, describe_limit, describe_value
from shardscope.record import Recording, compress_ranks

__all__ = ["check", "is_measurable"]

_MAX_EVIDENCE = 3


def check(contract: Contract, *recordings: Recording) -> tuple[Breach, ...]:
    """Check recordings against a contract, and return the limits that are exceeded.

    A limit on something that no recording measured is a breach, too.

    Args:
        contract: The limits.
        *recordings: One recording for each instrument that ran.

    Examples:
        >>> for breach in check(read_contract("shardscope.toml"), load("step.json.gz")):
        ...     print(breach.title, breach.expected, breach.actual)
    """
    traffics = [one for one in map(read_traffic, recordings) if one is not None]
    seen = [(traffic, Witness(contract, traffic)) for traffic in traffics]
    return tuple(
        breach
        for limit in contract.limits
        for breach in (
            _check_comm(limit, seen)
            if limit.is_on_comm
            else _check_whole(limit, measure_whole(limit, recordings))
        )
    )


def _check_whole(limit: Limit, wholes: Sequence[Whole]) -> Iterator[Breach]:
    """The worst there is; one that could not be measured is as bad as one that is too much."""
    assert limit.most is not None
    worst = max(wholes, key=lambda one: one.value, default=None)
    flawed = next((one for one in wholes if one.flaw), None)
    if worst is not None and worst.value > limit.most:
        yield Breach(
            limit=limit,
            kind=BreachKind.TOO_MUCH,
            title=describe_limit(limit),
            expected=describe_bound(limit),
            actual=f"{describe_value(limit, worst.value)} {worst.where}".rstrip(),
            value=worst.value,
            ranks=worst.ranks,
            evidence=worst.evidence[:_MAX_EVIDENCE],
            remedy=advise(limit, BreachKind.TOO_MUCH, worst.evidence),
        )
    elif worst is None:
        yield _not_measured(limit, "no recording has it")
    elif flawed is not None:
        yield _not_measured(limit, f"not everything was observed: {flawed.flaw}")


def _check_comm(limit: Limit, seen: Iterable[tuple[Traffic, Witness]]) -> Iterator[Breach]:
    able = [(traffic, witness) for traffic, witness in seen if is_measurable(limit, traffic)]
    fitting = [(traffic, witness) for traffic, witness in able if traffic.has_what(limit.selector)]
    if not able:
        yield _not_measured(limit, "no recording has it")
    elif not fitting:
        yield _nothing_fits(limit, able[0][0])
    for traffic, witness in fitting:
        yield from _check_readings(limit, traffic, witness)


def is_measurable(limit: Limit, traffic: Traffic) -> bool:
    """Of a program that was cut, what a rank puts in is known, and neither more bytes nor kinds."""
    is_simple = limit.figure in (Figure.COUNT, Figure.BYTES) and not limit.causes
    return traffic.is_traced or is_simple


def _check_readings(limit: Limit, traffic: Traffic, witness: Witness) -> Iterator[Breach]:
    readings = traffic.read(limit.selector, limit.figure)
    if not readings:
        yield _not_measured(limit, "no rank that was recorded has it")
    over = [one for one in readings if limit.most is not None and one.value > limit.most]
    under = [one for one in readings if limit.least is not None and one.value < limit.least]
    over.sort(key=lambda one: -one.value)
    under.sort(key=lambda one: one.value)
    for kind, found in ((BreachKind.TOO_MUCH, over), (BreachKind.TOO_LITTLE, under)):
        if found:
            yield _breach_of_comm(limit, traffic, witness, kind, found)
    if traffic.is_lossy and limit.most is not None and not over and not under:
        yield _not_measured(limit, "records were lost, so the true figure is higher")


def _breach_of_comm(
    limit: Limit, traffic: Traffic, witness: Witness, kind: BreachKind, found: Sequence[Reading]
) -> Breach:
    worst = found[0]
    evidence = witness.testify(limit, worst)
    return Breach(
        limit=limit,
        kind=kind,
        title=describe_limit(limit),
        expected=describe_bound(limit),
        actual=describe_value(limit, worst.value),
        value=worst.value,
        modules=tuple(dict.fromkeys(one.module for one in found if one.module is not None)),
        ranks=compress_ranks(worst.ranks) if traffic.is_traced else (),
        evidence=evidence[:_MAX_EVIDENCE],
        remedy=advise(limit, kind, evidence),
    )


def _nothing_fits(limit: Limit, traffic: Traffic) -> Breach:
    unknown = [axis for axis in limit.axes if axis not in traffic.axes]
    noun, name = ("axis", unknown[0]) if unknown else ("module", limit.module or "")
    known = traffic.axes if unknown else traffic.names.suggest(name)
    return Breach(
        limit=limit,
        kind=BreachKind.NOTHING_FITS,
        title=describe_limit(limit),
        expected=describe_bound(limit),
        actual=f"no {noun} matches {name!r}",
        remedy=suggest_names(noun, known),
    )


def _not_measured(limit: Limit, fact: str) -> Breach:
    return Breach(
        limit=limit,
        kind=BreachKind.NOT_MEASURED,
        title=describe_limit(limit),
        expected=describe_bound(limit),
        actual=f"not measured: {fact}",
        remedy=say_what_to_run(limit),
    )
