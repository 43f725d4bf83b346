"""What ranks hold in two recordings: every parameter and buffer, and what was done to modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import final

from shardscope.record import (
    Mark,
    Module,
    Parameter,
    RankSpan,
    Recording,
    compress_ranks,
    expand_ranks,
    format_ranks,
)
from shardscope.report.compare.changes import Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import Fact, match_facts
from shardscope.report.compare.names import CleanNames
from shardscope.report.units import format_bytes, sum_known

__all__ = ["Holdings", "compare_holdings", "total_holdings"]

# By clean module name and parameter, what is known of it.
_Aspects = dict[str, str]
_Table = dict[tuple[str, str], _Aspects]


@final
class Holdings:
    """Parameters of one recording, as those ranks hold them that are compared."""

    def __init__(self, recording: Recording, names: CleanNames, common: tuple[int, ...]) -> None:
        self._names = names
        self._ranks = frozenset(common)
        self._selected: dict[tuple[RankSpan, ...], tuple[int, ...]] = {}
        self.modules = recording.modules
        self.is_audited = any(
            one.live_name is not None for module in self.modules for one in module.parameters
        )
        self._forms: dict[str, list[Module]] = defaultdict(list)
        for module in self.modules:
            self._forms[names.clean(module.name)].append(module)

    def list_types(self) -> Iterator[Fact]:
        """The class of each module."""
        for name, forms in self._forms.items():
            yield Fact(module=name, what="class", value=forms[0].type, unit=Unit.WORDS)

    def list_marks(self) -> Iterator[Fact]:
        """What was done to each module."""
        for name, forms in self._forms.items():
            for mark in forms[0].marks:
                what = mark.kind.replace("_", " ")
                yield Fact(module=name, what=what, value=_describe_mark(mark), unit=Unit.WORDS)

    def list_parameters(self, *, is_audited: bool) -> _Table:
        """All aspects of all parameters; an audit's only if both recordings have them."""
        table: _Table = {}
        for name, forms in self._forms.items():
            known: dict[str, list[tuple[Module, Parameter]]] = defaultdict(list)
            for module in forms:
                for one in module.parameters:
                    known[one.name].append((module, one))
            for parameter, held in known.items():
                table[name, parameter] = self._describe(held, is_audited)
        return table

    def _describe(self, held: list[tuple[Module, Parameter]], is_audited: bool) -> _Aspects:
        aspects = [_list_aspects(one, self._names, is_audited) for _, one in held]
        if len(held) == 1:
            return aspects[0]
        # Ranks hold it in several forms; those that are not compared are left out if they can be.
        ranks = [self._select(module.ranks) for module, _ in held]
        some = [index for index, mine in enumerate(ranks) if mine] or [0]
        return {
            aspect: _join([(ranks[index], aspects[index][aspect]) for index in some])
            for aspect in aspects[0]
        }

    def _select(self, spans: tuple[RankSpan, ...]) -> tuple[int, ...]:
        if spans not in self._selected:  # most modules are held by the same ranks
            mine = tuple(rank for rank in expand_ranks(spans) if rank in self._ranks)
            self._selected[spans] = mine
        return self._selected[spans]


def compare_holdings(before: Holdings, after: Holdings) -> Iterator[Change]:
    """Parameters that were added or are gone in one row, others with what changed of them."""
    for change in match_facts(Area.PLACEMENTS, before.list_types(), after.list_types()):
        if change.before is not None and change.after is not None:
            yield change  # a module that is gone takes its parameters along, which have rows
    yield from match_facts(Area.PLACEMENTS, before.list_marks(), after.list_marks())
    is_audited = before.is_audited and after.is_audited
    first = before.list_parameters(is_audited=is_audited)
    second = after.list_parameters(is_audited=is_audited)
    yield from match_facts(Area.PLACEMENTS, _list_facts(first, second), _list_facts(second, first))


def total_holdings(before: Holdings, after: Holdings) -> AreaTotal:
    """Bytes of parameters on one rank."""
    words = [_summarize(one.modules) for one in (before, after)]
    return AreaTotal(area=Area.PLACEMENTS, before=words[0], after=words[1])


def _summarize(modules: Sequence[Module]) -> str:
    held: dict[str, int | None] = {}
    for module in modules:
        for one in module.parameters:
            if not one.is_buffer:
                held.setdefault(one.alias_group or f"{module.name}.{one.name}", one.local_bytes)
    if not held:
        return "no parameters"
    size = sum_known(held.values())
    return "sizes not recorded" if size is None else f"{format_bytes(size)} a rank"


def _list_facts(mine: _Table, other: _Table) -> Iterator[Fact]:
    """A fact for each aspect of what both have; one for all of what the other has not."""
    for (module, name), aspects in mine.items():
        if (module, name) not in other:
            words = ", ".join(aspects[one] for one in _SUMMARY)
            yield Fact(module=module, what=name, value=words, unit=Unit.WORDS)
            continue
        for aspect, value in aspects.items():
            what = f"{name}: {aspect}"
            yield Fact(module=module, what=what, value=value, unit=Unit.WORDS)


_SUMMARY = ("shape", "dtype", "placement")


def _list_aspects(one: Parameter, names: CleanNames, is_audited: bool) -> _Aspects:
    aspects = {
        "placement": _describe_placement(one),
        "shape": _format_shape(one.shape),
        "shape on a rank": _format_shape(one.local_shape),
        "dtype": one.dtype,
        "trainable": "yes" if one.is_trainable else "no",
    }
    if is_audited:
        aspects |= {
            "rule": one.rule or "none",
            "FSDP group": _name_other(one.fsdp_group, names),
            "tied to": _name_other(one.alias_group, names),
        }
    return aspects


def _name_other(name: str | None, names: CleanNames) -> str:
    return "none" if name is None else names.clean(name) or "the root"


def _describe_placement(one: Parameter) -> str:
    if not one.placements:
        return "flat" if one.fsdp_group is not None else "plain"
    axes = one.axes or ("",) * len(one.placements)
    placed = zip(axes, one.placements, strict=False)
    return ", ".join(f"{axis}: {placement}" if axis else placement for axis, placement in placed)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _describe_mark(mark: Mark) -> str:
    over = f"over {' × '.join(mark.axes)}" if mark.axes else ""
    return " ".join(filter(None, [mark.detail, over])) or "yes"


def _join(values: list[tuple[tuple[int, ...], str]]) -> str:
    """One value where ranks agree; else each with its ranks."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for mine, value in values:
        ranks[value].extend(mine)
    if len(ranks) == 1:
        return next(iter(ranks))
    return ", ".join(
        f"{value} (rank {format_ranks(compress_ranks(sorted(mine)))})"
        for value, mine in ranks.items()
    )
