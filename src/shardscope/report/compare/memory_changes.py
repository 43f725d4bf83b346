"""Compares what ranks hold: memory, parameters with their placements, and how modules are wrapped;
matches the ranks of two recordings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

from msgspec.structs import replace

from shardscope.record import (
    Mark,
    MemoryProfile,
    Module,
    Parameter,
    RankSpan,
    Recording,
    compress_ranks,
    expand_ranks,
    format_ranks,
)
from shardscope.record.units import format_bytes, plural
from shardscope.report.compare.changes import AT_PEAK, NO_MODULE, Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import CleanNames, Fact, match_facts
from shardscope.report.model.memory_peaks import find_worst, most_bytes
from shardscope.report.model.traffic_totals import sum_known


def list_common_ranks(before: Recording, after: Recording) -> tuple[int, ...]:
    """List ranks in both recordings; none if world sizes differ, as ranks do not correspond."""
    if before.run.world_size != after.run.world_size:
        return ()
    if before.run.ranks == after.run.ranks:
        return expand_ranks(before.run.ranks)
    return tuple(sorted({*expand_ranks(before.run.ranks)} & {*expand_ranks(after.run.ranks)}))


_CHOSEN_RANKS = "of each, the rank that sends most, or that needs most memory, is compared"


def note_ranks(before: Recording, after: Recording, common: tuple[int, ...]) -> str:
    """Describe which ranks were compared, unless that is obvious."""
    sizes = [before.run.world_size, after.run.world_size]
    if sizes[0] != sizes[1]:
        worlds = " and ".join(plural(size, "rank") for size in sizes)
        return f"the worlds have {worlds}: {_CHOSEN_RANKS}"
    if not common:
        return f"the recordings have no rank in common: {_CHOSEN_RANKS}"
    if before.run.ranks != after.run.ranks:
        return f"only ranks that both recordings have are compared: {_name(common)}"
    return ""


def join_ranks(changes: Mapping[Iterable[int], Iterable[Change]]) -> list[Change]:
    """Join equal changes of several ranks; the result names the ranks unless all have it."""
    ranks: dict[Change, list[int]] = {}
    every: list[int] = []
    for own_ranks, rank_changes in changes.items():
        every.extend(own_ranks)
        for change in rank_changes:
            ranks.setdefault(change, []).extend(own_ranks)
    return [
        change if len(change_ranks) == len(every) else _add_ranks(change, change_ranks)
        for change, change_ranks in ranks.items()
    ]


def _add_ranks(change: Change, ranks: list[int]) -> Change:
    word, names = "rank" if len(ranks) == 1 else "ranks", _name(ranks)
    return replace(change, what=f"{change.what}, {word} {names}", ranks=names)


def _name(ranks: Iterable[int]) -> str:
    return format_ranks(compress_ranks(sorted(ranks)))


Profiles = Sequence[MemoryProfile]


def compare_memory(
    before: Profiles, after: Profiles, common: tuple[int, ...], names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Compare peaks of common ranks, and modules of the rank that needs most memory."""
    first, second = find_worst(before), find_worst(after)
    by_rank = [{profile.rank: profile for profile in profiles} for profiles in (before, after)]
    ranks = [rank for rank in common if all(rank in profiles for profiles in by_rank)]
    pairs = {(rank,): (by_rank[0][rank], by_rank[1][rank]) for rank in ranks}
    yield from join_ranks(
        {
            pair_ranks: list(_compare_totals(*pair))
            for pair_ranks, pair in (pairs or {(0,): (first, second)}).items()
        }
    )
    yield from match_facts(
        Area.MEMORY, _list_holdings(first, names[0]), _list_holdings(second, names[1])
    )


def total_memory(before: Profiles, after: Profiles) -> AreaTotal:
    """Format the highest peak of each recording."""
    peaks = [format_bytes(most_bytes(find_worst(profiles))) for profiles in (before, after)]
    return AreaTotal(area=Area.MEMORY, before=peaks[0], after=peaks[1])


_TOTALS = {
    "peak": "peak_bytes",
    "peak of the first step": "first_peak_bytes",
    "reserved by the allocator": "reserved_bytes",
    "needed on a device": "needed_bytes",
}


def _compare_totals(before: MemoryProfile, after: MemoryProfile) -> Iterator[Change]:
    """Compare the values that both recordings have."""
    known = {
        label: field
        for label, field in _TOTALS.items()
        if getattr(before, field) is not None and getattr(after, field) is not None
    }
    facts = (list(_list_totals(profile, known)) for profile in (before, after))
    yield from match_facts(Area.MEMORY, *facts)


def _list_totals(profile: MemoryProfile, fields: Mapping[str, str]) -> Iterator[Fact]:
    sizes = {label: getattr(profile, field) for label, field in fields.items()}
    kinds: Counter[str] = Counter()
    for use in profile.at_peak:
        kinds[f"{_format_kind(use.kind)}{AT_PEAK}"] += use.num_bytes
    for label, size in (sizes | kinds).items():
        yield Fact(what=label, value=size, unit=Unit.BYTES, badness=size)
    if profile.device_bytes is not None and profile.needed_bytes is not None:
        fits = profile.needed_bytes <= profile.device_bytes
        words = "fits" if fits else "does not fit"
        label = f"on a device of {format_bytes(profile.device_bytes)}"
        yield Fact(what=label, value=words, unit=Unit.WORDS, badness=float(not fits))


def _list_holdings(profile: MemoryProfile, names: CleanNames) -> Iterator[Fact]:
    sizes: Counter[tuple[str, str]] = Counter()
    for use in profile.at_peak:
        module = NO_MODULE if use.module is None else names.clean(use.module)
        sizes[module, f"{_format_kind(use.kind)}{AT_PEAK}"] += use.num_bytes
    for (module, label), size in sizes.items():
        if size:
            yield Fact(module=module, what=label, value=size, unit=Unit.BYTES, badness=size)


def _format_kind(kind: str) -> str:
    return kind.replace("_", " ")


# Aspects of a parameter, by clean module name and parameter name.
_Aspects = dict[str, str]
_Table = dict[tuple[str, str], _Aspects]


@final
class Holdings:
    """The parameters of one recording, as held by the ranks that are compared."""

    def __init__(self, recording: Recording, names: CleanNames, common: tuple[int, ...]) -> None:
        self._names = names
        self._ranks = frozenset(common)
        self._selected: dict[tuple[RankSpan, ...], tuple[int, ...]] = {}
        self.modules = recording.modules
        self.is_audited = any(
            parameter.live_name is not None
            for module in self.modules
            for parameter in module.parameters
        )
        self._forms: dict[str, list[Module]] = defaultdict(list)
        for module in self.modules:
            self._forms[names.clean(module.name)].append(module)

    def list_types(self) -> Iterator[Fact]:
        """List the class of each module."""
        for name, forms in self._forms.items():
            yield Fact(module=name, what="class", value=forms[0].type, unit=Unit.WORDS)

    def list_marks(self) -> Iterator[Fact]:
        """List the parallelism applied to each module."""
        for name, forms in self._forms.items():
            for mark in forms[0].marks:
                kind = mark.kind.replace("_", " ")
                yield Fact(module=name, what=kind, value=_describe_mark(mark), unit=Unit.WORDS)

    def list_parameters(self, *, is_audited: bool) -> _Table:
        """List all aspects of all parameters; those of an audit only if `is_audited`."""
        table: _Table = {}
        for name, forms in self._forms.items():
            known: dict[str, list[tuple[Module, Parameter]]] = defaultdict(list)
            for module in forms:
                for form in module.parameters:
                    known[form.name].append((module, form))
            for parameter, forms_of_parameter in known.items():
                table[name, parameter] = self._describe(forms_of_parameter, is_audited)
        return table

    def _describe(self, placed_forms: list[tuple[Module, Parameter]], is_audited: bool) -> _Aspects:
        aspects = [
            _list_aspects(parameter, self._names, is_audited) for _, parameter in placed_forms
        ]
        if len(placed_forms) == 1:
            return aspects[0]
        # Ranks hold it in different forms; forms of ranks that are not compared are left out if
        # possible.
        ranks = [self._select(module.ranks) for module, _ in placed_forms]
        indices = [index for index, compared_ranks in enumerate(ranks) if compared_ranks] or [0]
        return {
            aspect: _join([(ranks[index], aspects[index][aspect]) for index in indices])
            for aspect in aspects[0]
        }

    def _select(self, spans: tuple[RankSpan, ...]) -> tuple[int, ...]:
        if spans not in self._selected:  # most modules are held by the same ranks
            compared_ranks = tuple(rank for rank in expand_ranks(spans) if rank in self._ranks)
            self._selected[spans] = compared_ranks
        return self._selected[spans]


def compare_holdings(before: Holdings, after: Holdings) -> Iterator[Change]:
    """Compare parameters: one row for an added or removed parameter, else one per aspect."""
    for change in match_facts(Area.PLACEMENTS, before.list_types(), after.list_types()):
        if change.before is not None and change.after is not None:
            yield change  # the parameters of a removed module have rows of their own
    yield from match_facts(Area.PLACEMENTS, before.list_marks(), after.list_marks())
    is_audited = before.is_audited and after.is_audited
    first = before.list_parameters(is_audited=is_audited)
    second = after.list_parameters(is_audited=is_audited)
    yield from match_facts(Area.PLACEMENTS, _list_facts(first, second), _list_facts(second, first))


def total_holdings(before: Holdings, after: Holdings) -> AreaTotal:
    """Sum the bytes of parameters on one rank."""
    words = [_summarize(holdings.modules) for holdings in (before, after)]
    return AreaTotal(area=Area.PLACEMENTS, before=words[0], after=words[1])


def _summarize(modules: Sequence[Module]) -> str:
    sizes: dict[str, int | None] = {}
    for module in modules:
        for parameter in module.parameters:
            if not parameter.is_buffer:
                sizes.setdefault(
                    parameter.alias_group or f"{module.name}.{parameter.name}",
                    parameter.local_bytes,
                )
    if not sizes:
        return "no parameters"
    size = sum_known(sizes.values())
    return "sizes not recorded" if size is None else f"{format_bytes(size)} a rank"


def _list_facts(table: _Table, opposite_table: _Table) -> Iterator[Fact]:
    """List each aspect of parameters in both tables, and one summary for those in `table` alone."""
    for (module, name), aspects in table.items():
        if (module, name) not in opposite_table:
            words = ", ".join(aspects[aspect] for aspect in _SUMMARY)
            yield Fact(module=module, what=name, value=words, unit=Unit.WORDS)
            continue
        for aspect, value in aspects.items():
            label = f"{name}: {aspect}"
            yield Fact(module=module, what=label, value=value, unit=Unit.WORDS)


_SUMMARY = ("shape", "dtype", "placement")


def _list_aspects(parameter: Parameter, names: CleanNames, is_audited: bool) -> _Aspects:
    aspects = {
        "placement": _describe_placement(parameter),
        "shape": _format_shape(parameter.shape),
        "shape on a rank": _format_shape(parameter.local_shape),
        "dtype": parameter.dtype,
        "trainable": "yes" if parameter.is_trainable else "no",
    }
    if is_audited:
        aspects |= {
            "rule": parameter.rule or "none",
            "FSDP group": _clean_name(parameter.fsdp_group, names),
            "tied to": _clean_name(parameter.alias_group, names),
        }
    return aspects


def _clean_name(name: str | None, names: CleanNames) -> str:
    return "none" if name is None else names.clean(name) or "the root"


def _describe_placement(parameter: Parameter) -> str:
    if not parameter.placements:
        return "flat" if parameter.fsdp_group is not None else "plain"
    axes = parameter.axes or ("",) * len(parameter.placements)
    placed = zip(axes, parameter.placements, strict=False)
    return ", ".join(f"{axis}: {placement}" if axis else placement for axis, placement in placed)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _describe_mark(mark: Mark) -> str:
    over = f"over {' × '.join(mark.axes)}" if mark.axes else ""
    return ", ".join(filter(None, [f"{mark.detail} {over}".strip(), *mark.options])) or "yes"


def _join(values: list[tuple[tuple[int, ...], str]]) -> str:
    """Return the value if all ranks agree, else each value with its ranks."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for holders, value in values:
        ranks[value].extend(holders)
    if len(ranks) == 1:
        return next(iter(ranks))
    return ", ".join(
        f"{value} (rank {format_ranks(compress_ranks(sorted(holders)))})"
        for value, holders in ranks.items()
    )
