"""Two recordings compared, area by area; each area has a file of its own here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from shardscope.record import Recording
from shardscope.report.compare.changes import Area, Change, Changes
from shardscope.report.compare.fold import fold_layers
from shardscope.report.compare.pair import Pair
from shardscope.report.compare.sections import SECTIONS

__all__ = ["compare"]

_BY_SIZE = (Area.COLLECTIVES, Area.BYTES, Area.MEMORY)  # the largest change first
_ORDER = {area: index for index, area in enumerate(Area)}


def compare(
    before: Recording,
    after: Recording,
    *,
    titles: tuple[str, str] = ("before", "after"),
    is_folded: bool = True,
) -> Changes:
    """What was added, is gone or changed; `is_folded` makes one row of layers that are alike."""
    pair = Pair(before, after)
    sections = [one for one in SECTIONS if one.is_known(before) and one.is_known(after)]
    changes = [change for one in sections for change in one.compare(pair)]
    totals = chain.from_iterable(one.total(pair) for one in sections)
    return Changes(
        before=titles[0],
        after=titles[1],
        totals=tuple(sorted(totals, key=lambda one: _ORDER[one.area])),
        rows=_sort(fold_layers(changes) if is_folded else changes),
        notes=tuple(_list_notes(pair)),
        modules=pair.modules,
    )


def _sort(changes: Iterable[Change]) -> tuple[Change, ...]:
    def place(change: Change) -> tuple[float, ...]:
        is_part = change.path is not None
        size = abs(change.delta) * change.repeat if is_part and change.area in _BY_SIZE else 0
        return _ORDER[change.area], is_part, -size

    return tuple(sorted(changes, key=place))


def _list_notes(pair: Pair) -> Iterator[str]:
    known = [[one.is_known(side) for one in SECTIONS] for side in pair.both]
    if any(one.has_ranks and all(sides) for one, *sides in zip(SECTIONS, *known, strict=True)):
        yield from filter(None, [pair.note_ranks()])
    checks = [
        (*one.run.instruments, *(f"no {check}" for check in one.run.skipped_checks))
        for one in pair.both
    ]
    if set(checks[0]) != set(checks[1]):
        named = "; ".join(", ".join(one) or "not recorded" for one in checks)
        yield f"findings come from different checks ({named})"
    passes = [one.run.num_forwards for one in pair.both if one.collectives]
    if len(set(passes)) > 1:
        words = " and ".join("not counted" if one is None else f"{one:,}" for one in passes)
        yield f"collectives are of different numbers of forward passes ({words})"
    for index, word in enumerate(("first", "second")):
        alone = [
            one.name
            for position, one in enumerate(SECTIONS)
            if known[index][position] and not known[1 - index][position]
        ]
        if alone:
            yield f"only the {word} recording has {_list_words(alone)}: not compared"
        if any(gap.is_loss for gap in pair.both[index].gaps):
            yield f"records of the {word} recording were lost: differences may come from that"


def _list_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
