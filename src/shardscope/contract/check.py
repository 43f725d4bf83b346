"""`check(contract, recording)`: every limit that is violated, with its evidence and a remedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, final

from shardscope.contract.collective_totals import (
    Facet,
    IssuedCollective,
    Reading,
    Traffic,
    facet_of,
    matches,
    read_traffic,
)
from shardscope.contract.limits import (
    BreachKind,
    CauseKind,
    Contract,
    Evidence,
    Figure,
    Limit,
    Violation,
)
from shardscope.contract.tensor_types import check_types
from shardscope.contract.totals import Total, measure_total
from shardscope.contract.violation_text import describe_bound, describe_limit, describe_value
from shardscope.record import Recording, Source, compress_ranks
from shardscope.record.layer_names import fold_layers


class _EvidenceKey(NamedTuple):
    """What distinguishes two lines of evidence; repeated layers share a line."""

    shape: str | None
    facet: Facet
    reason: str
    source: Source | None


@final
class EvidenceFinder:
    """Lists what counts towards a figure of a recording."""

    def __init__(self, contract: Contract, traffic: Traffic) -> None:
        self._contract = contract
        self._traffic = traffic

    def explain(self, limit: Limit, reading: Reading) -> tuple[Evidence, ...]:
        """The collectives that count, grouped: first those that no limit names, then by size."""
        groups: dict[_EvidenceKey, list[IssuedCollective]] = defaultdict(list)
        for collective in self._traffic.list_collectives(reading, limit.selector):
            shape = collective.module and fold_layers(collective.module)
            groups[
                _EvidenceKey(shape, facet_of(collective), collective.reason, collective.source)
            ].append(collective)
        ranked = [
            (self._is_named(key, collectives), _describe(limit, key, collectives))
            for key, collectives in groups.items()
        ]
        ranked.sort(key=lambda item: (item[0], -item[1].num_bytes))
        return tuple(evidence for _, evidence in ranked)

    def _is_named(self, key: _EvidenceKey, collectives: list[IssuedCollective]) -> bool:
        """Whether limits name the very modules that issued them; other collectives may be new."""
        return all((collective.module, key.facet) in self._named for collective in collectives)

    @cached_property
    def _named(self) -> set[tuple[str | None, Facet]]:
        facets = {facet for _, facet in self._traffic.owned()}
        return {
            (module, facet)
            for limit in filter(_is_precise, self._contract.limits)
            for facet in facets
            if matches(limit.selector, facet)
            for module in _name(limit, self._traffic)
        }


def _is_precise(limit: Limit) -> bool:
    """Whether a limit selects by phase, axis and kind, as `contract record` writes limits."""
    return bool(limit.phases and limit.axes and limit.kinds)


def _name(limit: Limit, traffic: Traffic) -> tuple[str | None, ...]:
    """The modules that a limit names; None (outside of modules) if it names none."""
    return (None,) if limit.module is None else traffic.names.match(limit.module)


def _describe(limit: Limit, key: _EvidenceKey, collectives: list[IssuedCollective]) -> Evidence:
    # The bytes that the limit is on; for a count, the bytes on the wire, which cost time.
    figure = Figure.WIRE_BYTES if limit.figure is Figure.COUNT else limit.figure
    size_index = (Figure.BYTES, Figure.OUTPUT_BYTES, Figure.WIRE_BYTES).index(figure)
    return Evidence(
        what=f"{key.facet.kind}[{key.facet.axis}], {key.facet.phase}",
        cause=key.reason,
        module=collectives[0].module
        if len({collective.module for collective in collectives}) == 1
        else key.shape,
        count=len(collectives),
        num_bytes=sum(collective.sizes[size_index] for collective in collectives),
        source=key.source,
    )


_VERBS = {
    Figure.PEAK_MEMORY: "memory",
    Figure.GRAPH_BREAKS: "explain",
    Figure.RECOMPILES: "explain",
    Figure.SKIPPED_FUNCTIONS: "explain",
    Figure.UNCOVERED_OPS: "coverage",
    Figure.MISSING_OPS: "coverage",
    Figure.WRONG_OPS: "coverage",
    Figure.REPLICATED_OPS: "coverage",
    Figure.FALLBACKS: "parallelize",
}
_RAISE = "If the change is intended, update the limit."
_REMEDIES = {
    Figure.PEAK_MEMORY: "Reduce the peak: shard or recompute the largest tensors there.",
    Figure.GRAPH_BREAKS: "Change the lines that break, or leave them out of what is compiled.",
    Figure.RECOMPILES: "Keep the values in the failed guards constant, or mark them as dynamic.",
    Figure.SKIPPED_FUNCTIONS: "Rewrite the code that the compiler skipped.",
    Figure.FALLBACKS: "Give the ops placements that have a sharding rule.",
    Figure.FINDINGS: "Follow the findings: shardscope show prints each with a remedy.",
    Figure.GAPS: "Find out what was not understood: shardscope show prints it.",
}
_UNASKED = "Give the op inputs with placements it can use, or redistribute where it costs least."


def advise(limit: Limit, kind: BreachKind, evidence: Sequence[Evidence]) -> str:
    """The remedy that would bring the figure back within the limit."""
    if kind is BreachKind.TOO_LITTLE:
        return f"Find out which collective is gone: a reduction may be missing. {_RAISE}"
    if evidence and evidence[0].remedy:
        return evidence[0].remedy
    if limit.is_on_comm:
        is_unasked = any(item.cause.startswith("implicit ") for item in evidence[:1])
        return _UNASKED if is_unasked or CauseKind.UNASKED in limit.causes else _RAISE
    return _REMEDIES.get(limit.figure, "Replace the ops, or keep their inputs replicated.")


def describe_remedy(limit: Limit) -> str:
    """A sentence with the command that measures the figure."""
    verb = _VERBS.get(limit.figure, "trace")
    return (
        f"Run `shardscope {verb} TARGET -o {verb}.json` and give {verb}.json to the check as well, "
        "or remove the limit."
    )


def suggest_names(noun: str, known: Sequence[str]) -> str:
    """A sentence that suggests existing names."""
    if not known:
        return f"The recording has no {noun} at all. Remove the limit, or record again."
    names = ", ".join(repr(name) for name in known)
    return f"Correct the {noun}: there is {names}."


_MAX_EVIDENCE = 3


def check(contract: Contract, *recordings: Recording) -> tuple[Violation, ...]:
    """Check recordings against a contract, and return the limits that are exceeded.

    A limit on something that no recording measured is a violation, too.

    Args:
        contract: The limits.
        *recordings: One recording for each instrument that ran.

    Examples:
        >>> for violation in check(read_contract("shardscope.toml"), load("step.json.gz")):
        ...     print(violation.title, violation.expected, violation.actual)
    """
    traffics = [traffic for traffic in map(read_traffic, recordings) if traffic is not None]
    sources = [(traffic, EvidenceFinder(contract, traffic)) for traffic in traffics]
    return tuple(
        violation
        for limit in contract.limits
        for violation in _check_limit(limit, recordings, sources)
    )


def _check_limit(
    limit: Limit,
    recordings: Sequence[Recording],
    sources: Iterable[tuple[Traffic, EvidenceFinder]],
) -> Iterator[Violation]:
    if limit.figure is Figure.TYPES:
        return check_types(limit, recordings)
    if limit.is_on_comm:
        return _check_comm(limit, sources)
    return _check_total(limit, measure_total(limit, recordings))


def _check_total(limit: Limit, totals: Sequence[Total]) -> Iterator[Violation]:
    """The violation of a limit on a total by the worst value; not measured is a violation too."""
    assert limit.most is not None
    worst = max(totals, key=lambda total: total.value, default=None)
    incomplete = next((total for total in totals if total.flaw), None)
    if worst is not None and worst.value > limit.most:
        yield Violation(
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
    elif incomplete is not None:
        yield _not_measured(limit, f"not everything was observed: {incomplete.flaw}")


def _check_comm(
    limit: Limit, sources: Iterable[tuple[Traffic, EvidenceFinder]]
) -> Iterator[Violation]:
    measurable = [
        (traffic, evidence_finder)
        for traffic, evidence_finder in sources
        if is_measurable(limit, traffic)
    ]
    matching = [
        (traffic, evidence_finder)
        for traffic, evidence_finder in measurable
        if traffic.has_module_and_axes(limit.selector)
    ]
    if not measurable:
        yield _not_measured(limit, "no recording has it")
    elif not matching:
        yield _no_match(limit, measurable[0][0])
    for traffic, evidence_finder in matching:
        yield from _check_readings(limit, traffic, evidence_finder)


def is_measurable(limit: Limit, traffic: Traffic) -> bool:
    """Whether the figure is known: of a parallel program only counts and input bytes are."""
    is_simple = limit.figure in (Figure.COUNT, Figure.BYTES) and not limit.causes
    return traffic.is_traced or is_simple


def _check_readings(
    limit: Limit, traffic: Traffic, evidence_finder: EvidenceFinder
) -> Iterator[Violation]:
    readings = traffic.read(limit.selector, limit.figure)
    if not readings:
        yield _not_measured(limit, "no rank that was recorded has it")
    too_high = [
        reading for reading in readings if limit.most is not None and reading.value > limit.most
    ]
    too_low = [
        reading for reading in readings if limit.least is not None and reading.value < limit.least
    ]
    too_high.sort(key=lambda reading: -reading.value)
    too_low.sort(key=lambda reading: reading.value)
    for kind, violating in ((BreachKind.TOO_MUCH, too_high), (BreachKind.TOO_LITTLE, too_low)):
        if violating:
            yield _make_comm_violation(limit, traffic, evidence_finder, kind, violating)
    if traffic.is_lossy and limit.most is not None and not too_high and not too_low:
        yield _not_measured(limit, "records were lost, so the true figure is higher")


def _make_comm_violation(
    limit: Limit,
    traffic: Traffic,
    evidence_finder: EvidenceFinder,
    kind: BreachKind,
    readings: Sequence[Reading],
) -> Violation:
    worst = readings[0]
    evidence = evidence_finder.explain(limit, worst)
    return Violation(
        limit=limit,
        kind=kind,
        title=describe_limit(limit),
        expected=describe_bound(limit),
        actual=describe_value(limit, worst.value),
        value=worst.value,
        modules=tuple(
            dict.fromkeys(reading.module for reading in readings if reading.module is not None)
        ),
        ranks=compress_ranks(worst.ranks) if traffic.is_traced else (),
        evidence=evidence[:_MAX_EVIDENCE],
        remedy=advise(limit, kind, evidence),
    )


def _no_match(limit: Limit, traffic: Traffic) -> Violation:
    unknown = [axis for axis in limit.axes if axis not in traffic.axes]
    noun, name = ("axis", unknown[0]) if unknown else ("module", limit.module or "")
    known = traffic.axes if unknown else traffic.names.suggest(name)
    return Violation(
        limit=limit,
        kind=BreachKind.NOTHING_FITS,
        title=describe_limit(limit),
        expected=describe_bound(limit),
        actual=f"no {noun} matches {name!r}",
        remedy=suggest_names(noun, known),
    )


def _not_measured(limit: Limit, fact: str) -> Violation:
    return Violation(
        limit=limit,
        kind=BreachKind.NOT_MEASURED,
        title=describe_limit(limit),
        expected=describe_bound(limit),
        actual=f"not measured: {fact}",
        remedy=describe_remedy(limit),
    )
