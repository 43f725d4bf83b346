"""Facts of two recordings matched by name, with identical layers folded into one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import final

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record import Recording, Source
from shardscope.record.layer_names import (
    fold_layers,
    fold_layers_in_text,
    join_layers,
    join_layers_in_texts,
)
from shardscope.report.compare.changes import Area, Change, Unit, Value

# Prefixes of wrappers as they appear in recorded names; torch itself is not used here.
_WRAPPERS = re.compile(
    r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)"
)
_DATA_PARALLEL = "module"  # DDP's name for the wrapped model


@final
class CleanNames:
    """The names of one recording, without the prefixes that wrappers add."""

    def __init__(self, names: set[str], *, is_data_parallel: bool) -> None:
        self._is_data_parallel = is_data_parallel
        self._clean: dict[str, str] = {}
        self.names = tuple(sorted({self.clean(name) for name in names}))

    def clean(self, name: str) -> str:
        """Return a module's or tensor's name as it is in the unwrapped model."""
        cleaned = self._clean.get(name)
        if cleaned is None:
            cleaned = self._clean[name] = self._strip(name)
        return cleaned

    def _strip(self, name: str) -> str:
        name = _unwrap(name)
        if not self._is_data_parallel:
            return name
        return "" if name == _DATA_PARALLEL else name.removeprefix(f"{_DATA_PARALLEL}.")


def clean_names(before: Recording, after: Recording) -> tuple[CleanNames, CleanNames]:
    """Make the clean names of both recordings."""
    names = (_list_names(before), _list_names(after))
    parts = [{_unwrap(name).split(".")[0] for name in side_names} - {""} for side_names in names]
    # A user's own module may be named `module`; DDP's contains all modules and is in one recording
    # only.
    first, second = (
        own_parts == {_DATA_PARALLEL} and _DATA_PARALLEL not in opposite_parts
        for own_parts, opposite_parts in (parts, parts[::-1])
    )
    return (
        CleanNames(names[0], is_data_parallel=first),
        CleanNames(names[1], is_data_parallel=second),
    )


def _list_names(recording: Recording) -> set[str]:
    owners = {call.owner for call in recording.collectives if call.owner is not None}
    return owners | {module.name for module in recording.modules}


def _unwrap(name: str) -> str:
    cleaned = _WRAPPERS.sub("", name)
    return name if cleaned == name else cleaned.removeprefix(".")


_MAX_RUNS = 4  # runs of layer numbers that are named


def fold_changes(changes: Sequence[Change]) -> list[Change]:
    """Join changes that differ only in layer numbers, at the position of the first of them."""
    groups: dict[object, list[Change]] = {}
    for index, change in enumerate(changes):
        key = (
            _group_key(change) if change.path and fold_layers(change.path) != change.path else index
        )
        groups.setdefault(key, []).append(change)
    return [_join(group) for group in groups.values()]


def name_paths(paths: Sequence[str]) -> str:
    """Name several modules that differ only in layer numbers by one path."""
    return join_layers(paths, _name_numbers)


def _group_key(change: Change) -> tuple[object, ...]:
    texts = (change.what, change.before, change.after)
    path = fold_layers(change.path or "")
    return (change.area, change.unit, change.is_worse, path, *map(_fold_value, texts))


def _fold_value(value: Value | None) -> object:
    return fold_layers_in_text(value) if isinstance(value, str) else value


def _join(group: Sequence[Change]) -> Change:
    first = group[0]
    if len(group) == 1:
        return first
    return replace(
        first,
        path=name_paths([change.path or "" for change in group]),
        what=join_layers_in_texts([change.what for change in group], _name_numbers),
        before=_join_values([change.before for change in group]),
        after=_join_values([change.after for change in group]),
        modules=tuple(name for change in group for name in change.modules),
        repeat=len(group),
    )


def _join_values(values: Sequence[Value | None]) -> Value | None:
    texts = [value for value in values if isinstance(value, str)]
    return join_layers_in_texts(texts, _name_numbers) if texts else values[0]


def _name_numbers(numbers: Sequence[int]) -> str:
    """`{0…31}`, `{0,4,9}`, `{0…30,…}` where there are too many runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    named = [_name_run(run) for run in runs[:_MAX_RUNS]]
    return f"{{{','.join([*named, *['…'][: len(runs) > _MAX_RUNS]])}}}"


def _name_run(run: Sequence[int]) -> str:
    if len(run) > 2:
        return f"{run[0]}…{run[-1]}"
    return ",".join(map(str, run))


class Fact(Struct, frozen=True, kw_only=True, gc=False):
    """A value of one recording that is looked up in the other recording.

    Facts match if module and `key` are equal; `key` is `what`, unless that contains something that
    may change, such as a line number. `modules` need not be equal. A larger `badness` is worse.
    """

    what: str
    value: Value
    unit: Unit = Unit.COUNT
    module: str | None = None
    modules: tuple[str, ...] = ()  # if the fact is about several modules
    key: Hashable = None
    badness: float | None = None
    because: str = ""
    source: Source | None = None
    axis: str = ""  # of the collectives that it is about, if it is about any
    kind: str = ""
    phase: str = ""


# Facts with equal keys are matched in order: the first with the first, and so on.
_Keyed = dict[tuple[Hashable, int], Fact]


def match_facts(area: Area, before: Iterable[Fact], after: Iterable[Fact]) -> Iterator[Change]:
    """List facts that only one side has or whose values differ, in the order of the second."""
    first, second = _by_key(before), _by_key(after)
    for key, fact in second.items():
        known = first.get(key)
        if known is None or known.value != fact.value:
            yield _make_change(area, known, fact)
    for key, fact in first.items():
        if key not in second:
            yield _make_change(area, fact, None)


def _by_key(facts: Iterable[Fact]) -> _Keyed:
    seen: Counter[Hashable] = Counter()
    keyed: _Keyed = {}
    for fact in facts:
        key = (fact.module, fact.what if fact.key is None else fact.key)
        keyed[key, seen[key]] = fact
        seen[key] += 1
    return keyed


def _make_change(area: Area, before: Fact | None, after: Fact | None) -> Change:
    fact = before if after is None else after
    assert fact is not None
    own = () if fact.module is None else (fact.module,)
    return Change(
        area=area,
        what=fact.what,
        before=None if before is None else before.value,
        after=None if after is None else after.value,
        unit=fact.unit,
        path=_name_examples(fact.modules) if fact.module is None else fact.module,
        modules=fact.modules or own,
        is_worse=_is_worse(before, after),
        because=fact.because,
        source=None if after is None else after.source,
        axis=fact.axis,
        kind=fact.kind,
        phase=fact.phase,
    )


def _name_examples(modules: tuple[str, ...]) -> str | None:
    """Name the modules: by one path if they differ only in numbers, else by the first of them."""
    if not modules:
        return None
    siblings = [name for name in modules if fold_layers(name) == fold_layers(modules[0])]
    more = len(modules) - len(siblings)
    return name_paths(siblings) + (f" and {more:,} more" if more else "")


def _is_worse(before: Fact | None, after: Fact | None) -> bool | None:
    """Whether badness grew; a missing fact has no badness."""
    badness = [0.0 if fact is None else fact.badness for fact in (before, after)]
    if badness[0] is None or badness[1] is None or badness[0] == badness[1]:
        return None
    return badness[1] > badness[0]
