"""Collectives of a trace or a parallel program, summed by rank, module and the keys that a limit
may select.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple, final

from msgspec import Struct

from shardscope.contract.limits import COMM_FIGURES, CauseKind, Figure, Selector
from shardscope.record import (
    BucketReduce,
    Call,
    Cause,
    Collective,
    CollectiveKind,
    Compiled,
    FullyShard,
    Phase,
    PlacedKind,
    RankSpan,
    Recording,
    Redistribute,
    Source,
    SpmdCall,
    describe_cause,
    expand_ranks,
    name_axis,
)
from shardscope.record.layer_names import fold_layers
from shardscope.record.patterns import NameTree

_STATE_KINDS = (PlacedKind.PARAMETER, PlacedKind.BUFFER)


class IssuedCollective(Struct, frozen=True, gc=False):
    """A collective of a rank; `sizes` are its input, output and wire bytes."""

    rank: int
    module: str | None
    phase: Phase
    axis: str
    kind: CollectiveKind
    cause: Cause | str | None
    sizes: tuple[int, int, int]
    source: Source | None

    @property
    def reason(self) -> str:
        """Why it was issued, as text."""
        return self.cause if isinstance(self.cause, str) else describe_cause(self.cause)


def has_trace(recording: Recording) -> bool:
    """Whether collectives were traced; old recordings without an instrument are traces."""
    instruments = recording.run.instruments
    return "trace" in instruments or bool(recording.collectives) or not instruments


def list_collectives(recording: Recording) -> Sequence[IssuedCollective] | None:
    """All collectives, or None if they were not recorded."""
    if has_trace(recording):
        world_size = recording.run.world_size
        return [_read(call, world_size) for call in recording.collectives]
    if not recording.parallel:
        return None
    # All ranks of a program issue the same collectives; each program counts as a rank.
    return [
        IssuedCollective(
            index,
            inserted.module,
            inserted.phase,
            inserted.axis,
            inserted.kind,
            inserted.cause,
            (inserted.size_bytes, 0, 0),
            inserted.source,
        )
        for index, program in enumerate(recording.parallel)
        for inserted in program.inserted
    ]


def list_parameter_modules(recording: Recording) -> list[str]:
    """The modules of parallel programs that have parameters or buffers."""
    names = (
        value.name
        for program in recording.parallel
        for value in program.placed
        if value.kind in _STATE_KINDS
    )
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def ranks_of(recording: Recording) -> tuple[int, ...]:
    """The ranks that `list_collectives` covers, including those without collectives."""
    if has_trace(recording):
        return tuple(dict.fromkeys(expand_ranks(recording.run.ranks)))
    return tuple(range(len(recording.parallel)))


def _read(call: Collective, world_size: int) -> IssuedCollective:
    return IssuedCollective(
        call.rank,
        call.owner,
        call.phase,
        name_axis(call, world_size),
        call.kind,
        call.cause,
        (call.input_bytes, call.output_bytes, call.wire_bytes),
        call.source,
    )


def classify_cause(cause: Cause | str | None) -> tuple[CauseKind, ...]:
    """The names that a contract has for the cause."""
    match cause:
        case Redistribute(is_implicit=True):
            return (CauseKind.REDISTRIBUTE, CauseKind.UNASKED)
        case Redistribute():
            return (CauseKind.REDISTRIBUTE,)
        case FullyShard():
            return (CauseKind.FULLY_SHARD,)
        case BucketReduce():
            return (CauseKind.DDP_BUCKET,)
        case Call():
            return (CauseKind.CALL,)
        case Compiled():
            return (CauseKind.COMPILED,)
        case SpmdCall():
            return (CauseKind.SPMD_TYPES,)
    return (CauseKind.UNKNOWN,)


TrafficTotals = tuple[
    int, int, int, int
]  # count, and bytes put in, sent and got out, as COMM_FIGURES
_ZERO: TrafficTotals = (0, 0, 0, 0)


class Facet(NamedTuple):
    """The properties of a collective that a limit may select, besides its module."""

    phase: Phase
    axis: str
    kind: CollectiveKind
    causes: tuple[CauseKind, ...]


class Reading(NamedTuple):
    """A figure in a module (in all modules, if None) on identical ranks."""

    module: str | None
    ranks: tuple[int, ...]
    value: int


# Sums of identical ranks, by module; None is the total.
_Sums = dict[str | None, TrafficTotals]
# Totals of each module's own collectives, by facet.
_Own = dict[Facet, dict[str | None, TrafficTotals]]


@final
class Traffic:
    """The collectives of a recording; ranks that issued the same ones are grouped."""

    def __init__(self, recording: Recording, collectives: Sequence[IssuedCollective]) -> None:
        self.recording = recording
        self._collectives_by_rank: dict[int, list[IssuedCollective]] = {
            rank: [] for rank in ranks_of(recording)
        }
        for collective in collectives:
            self._collectives_by_rank.setdefault(collective.rank, []).append(collective)
        self._classes = list(_fold_ranks(self._collectives_by_rank))
        owners = dict.fromkeys(owner for owner, _ in self.owned() if owner is not None)
        self.names = ModuleIndex(recording, [*owners, *list_parameter_modules(recording)])
        self.axes = _list_axes(recording, collectives)
        self._sums: dict[Selector, list[_Sums]] = {}
        self._collectives_by_module: dict[
            int, dict[str | None, list[IssuedCollective]]
        ] = {}  # of ranks that were asked for
        self._module_ranks: dict[str, list[RankSpan]] = defaultdict(list)
        for module in recording.modules:
            self._module_ranks[module.name].extend(module.ranks)

    @property
    def is_traced(self) -> bool:
        """Whether every figure of a collective is known; in a parallel program fewer are."""
        return has_trace(self.recording)

    @property
    def is_lossy(self) -> bool:
        """Whether records were lost."""
        return any(gap.is_loss for gap in self.recording.gaps)

    def owned(self) -> Iterator[tuple[str | None, Facet]]:
        """Modules with the facets of their own collectives, each pair once."""
        yield from dict.fromkeys(
            (owner, facet)
            for _, totals_by_facet in self._classes
            for facet, totals in totals_by_facet.items()
            for owner in totals
        )

    def has_module_and_axes(self, selector: Selector) -> bool:
        """Whether the selector's module and axes exist."""
        has_module = selector.module is None or bool(self.names.match(selector.module))
        return has_module and all(axis in self.axes for axis in selector.axes)

    def read(self, selector: Selector, figure: Figure) -> list[Reading]:
        """The figure for each module that matches, on each group of ranks that has it."""
        figure_index = COMM_FIGURES.index(figure)
        modules = (None,) if selector.module is None else self.names.match(selector.module)
        selected, unselected = (
            self._sums_for(selector._replace(module=None)),
            self._sums_for(Selector()),
        )
        return [
            Reading(module, ranks, sums.get(module, _ZERO)[figure_index])
            for module in modules
            for (ranks, _), sums, all_sums in zip(self._classes, selected, unselected, strict=True)
            if module is None or module in all_sums or self._has_module(module, ranks)
        ]

    def list_collectives(self, reading: Reading, selector: Selector) -> list[IssuedCollective]:
        """The selected collectives of the first rank of a reading."""
        rank = reading.ranks[0]
        if rank not in self._collectives_by_module:
            self._collectives_by_module[rank] = _sort_by_module(self._collectives_by_rank[rank])
        collectives = self._collectives_by_module[rank].get(reading.module, ())
        return [collective for collective in collectives if matches(selector, facet_of(collective))]

    def _sums_for(self, selector: Selector) -> list[_Sums]:
        if selector not in self._sums:
            self._sums[selector] = [_sum_by_module(own, selector) for _, own in self._classes]
        return self._sums[selector]

    def _has_module(self, module: str, ranks: tuple[int, ...]) -> bool:
        """Whether one of the ranks has the module: pipeline stages have different modules."""
        if not self.is_traced:
            return True
        spans = [
            range(span.first, span.first + span.count * span.step, span.step)
            for span in self._module_ranks.get(module, ())
        ]
        return any(rank in span for span in spans for rank in ranks)


def read_traffic(recording: Recording) -> Traffic | None:
    """The collectives of a recording, or None if they were not recorded."""
    collectives = list_collectives(recording)
    return None if collectives is None else Traffic(recording, collectives)


def matches(selector: Selector, facet: Facet) -> bool:
    """Whether the selector selects a collective with this facet, in any module."""
    return (
        (not selector.phases or facet.phase in selector.phases)
        and (not selector.axes or facet.axis in selector.axes)
        and (not selector.kinds or facet.kind in selector.kinds)
        and (not selector.causes or any(cause in selector.causes for cause in facet.causes))
    )


def facet_of(collective: IssuedCollective) -> Facet:
    """The facet of a collective."""
    return Facet(
        collective.phase, collective.axis, collective.kind, classify_cause(collective.cause)
    )


def _sort_by_module(
    collectives: Sequence[IssuedCollective],
) -> dict[str | None, list[IssuedCollective]]:
    """The collectives of each module, including those of its submodules; None has all."""
    by_module: dict[str | None, list[IssuedCollective]] = defaultdict(list)
    for collective in collectives:
        for module in _modules_of(collective.module):
            by_module[module].append(collective)
    return by_module


def _modules_of(owner: str | None) -> tuple[str | None, ...]:
    return (None,) if owner is None else (None, *_ancestors(owner))


def _fold_ranks(
    by_rank: dict[int, list[IssuedCollective]],
) -> Iterator[tuple[tuple[int, ...], _Own]]:
    groups: dict[frozenset[object], tuple[list[int], _Own]] = {}
    for rank, collectives in sorted(by_rank.items()):
        own: _Own = defaultdict(dict)
        for collective in collectives:
            input_bytes, output_bytes, wire_bytes = collective.sizes
            totals = own[facet_of(collective)]
            before = totals.get(collective.module, _ZERO)
            totals[collective.module] = _add(before, (1, input_bytes, wire_bytes, output_bytes))
        group_key = frozenset(
            (facet, *item) for facet, module_totals in own.items() for item in module_totals.items()
        )
        groups.setdefault(group_key, ([], own))[0].append(rank)
    for ranks, own in groups.values():
        yield tuple(ranks), own


def _sum_by_module(own: _Own, selector: Selector) -> _Sums:
    sums: _Sums = {}
    for facet, totals in own.items():
        if not matches(selector, facet):
            continue
        for owner, total in totals.items():
            for module in _modules_of(owner):
                sums[module] = _add(sums.get(module, _ZERO), total)
    return sums


def _add(first: TrafficTotals, second: TrafficTotals) -> TrafficTotals:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2], first[3] + second[3]


def _list_axes(recording: Recording, collectives: Sequence[IssuedCollective]) -> tuple[str, ...]:
    named = [axis.name for axis in recording.run.axes]
    named += [axis.name for program in recording.parallel for axis in program.axes]
    named += [group.axis for group in recording.groups if group.axis is not None]
    return tuple(dict.fromkeys([*named, *(collective.axis for collective in collectives)]))


_MAX_COMPARED = 2_000  # names that are compared with a mistyped pattern


@final
class ModuleIndex:
    """Modules by name: recorded modules, modules that issued collectives, and their parents."""

    def __init__(self, recording: Recording, owners: Iterable[str]) -> None:
        issuing = dict.fromkeys(ancestor for owner in owners for ancestor in _ancestors(owner))
        names = dict.fromkeys(module.name for module in recording.modules) | issuing
        self.order = {name: index for index, name in enumerate(names)}
        self._tree = NameTree()
        for module in recording.modules:
            # An alias is the shared module, unless a module was recorded under that name.
            for alias in module.aliases:
                self._tree.add(alias, stands_for=module.name)
        for name in names:
            self._tree.add(name, stands_for=name)
        self._matches: dict[str, tuple[str, ...]] = {}

    def match(self, pattern: str) -> tuple[str, ...]:
        """The names that the pattern matches, in the model's order."""
        if pattern not in self._matches:
            names = self._tree.find(pattern)
            self._matches[pattern] = tuple(sorted(names, key=self.order.__getitem__))
        return self._matches[pattern]

    def suggest(self, pattern: str) -> tuple[str, ...]:
        """Similar patterns that match modules, or else a few existing ones."""
        folded = list(dict.fromkeys(map(fold_layers, self.order)))[:_MAX_COMPARED]
        near = get_close_matches(fold_layers(pattern), [name for name in folded if name], n=3)
        return tuple(near or [name for name in folded if name][:3])


@lru_cache(maxsize=65536)
def _ancestors(name: str) -> tuple[str, ...]:
    """The names of the root, of every module that contains this one, and its own."""
    ends = [index for index, char in enumerate(name) if char == "."]
    return ("", *(name[:end] for end in ends), *([name] if name else []))
