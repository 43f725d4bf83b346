"""Facts of one recording, and what becomes of them in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

from msgspec import Struct

from shardscope.report.compare.changes import Area, Change, Unit, Value
from shardscope.report.compare.fold import fold_path, name_paths

__all__ = ["Fact", "match_facts"]


class Fact(Struct, frozen=True, kw_only=True, gc=False):
    """Something that can be looked up in the other recording.

    There it has the same module and `key`, which is `what` unless that has something in it that
    may change, as the number of a line. `modules` may be others there. `badness` grows with what
    people do not want.
    """

    what: str
    value: Value
    unit: Unit = Unit.COUNT
    module: str | None = None
    modules: tuple[str, ...] = ()  # where there are several
    key: Hashable = None
    badness: float | None = None
    because: str = ""


# Facts may have the same key: the first is compared with the first, and so on.
_Keyed = dict[tuple[Hashable, int], Fact]


def match_facts(area: Area, before: Iterable[Fact], after: Iterable[Fact]) -> Iterator[Change]:
    """A change for each fact that only one has, or that has another value; the second's order."""
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
        path=_name_some(fact.modules) if fact.module is None else fact.module,
        modules=fact.modules or own,
        is_worse=_is_worse(before, after),
        because=fact.because,
    )


def _name_some(modules: tuple[str, ...]) -> str | None:
    """The modules as one name: all of them if they are alike but for numbers, else the first."""
    if not modules:
        return None
    alike = [name for name in modules if fold_path(name) == fold_path(modules[0])]
    more = len(modules) - len(alike)
    return name_paths(alike) + (f" and {more:,} more" if more else "")


def _is_worse(before: Fact | None, after: Fact | None) -> bool | None:
    """What is not there is as bad as nothing."""
    badness = [0.0 if fact is None else fact.badness for fact in (before, after)]
    if badness[0] is None or badness[1] is None or badness[0] == badness[1]:
        return None
    return badness[1] > badness[0]
