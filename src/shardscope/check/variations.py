"""What to change where a program decides, and on which ranks.

`plan_variations` reads the decisions of a run without changes. A rank's own data may make it decide
otherwise than the others: each such decision is changed on one rank, together with the ranks that
have the same data, or get the value from the same collective.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from shardscope.hang import name_ranks
from shardscope.launch.decisions import Change, ChangeKind, Decisions, Pass, Site, SiteKind
from shardscope.record import Source

_MAX_ENTRIES = 8  # of a batch that are left out, one after the other
_K = ChangeKind
# After these a run is not what it was: they come last in it.
_LASTING = {_K.NAN, _K.END, _K.LATER, _K.RAISED, _K.DELIVERED}
_VALUES = {"bool": (_K.OPPOSITE,), "int": (_K.OPPOSITE,), "float": (_K.NAN, _K.LARGE, _K.ZERO)}


@final
@dataclass(frozen=True)
class PlannedVariation:
    """A change, at whichever pass of its site comes next, and the words that follow "if"."""

    site: Site
    kind: ChangeKind
    ranks: tuple[int, ...]
    condition: str
    detail: str = ""

    @property
    def is_lasting(self) -> bool:
        """Whether what follows in the run is changed too."""
        return self.kind in _LASTING and self.site.kind is not SiteKind.VALUE

    @property
    def source(self) -> Source | None:
        """The line of the site."""
        return self.site.source

    def at(self, number: int) -> Change:
        """The change at a pass of the site."""
        return Change(
            site=self.site, number=number, kind=self.kind, ranks=self.ranks, detail=self.detail
        )


@final
class Plan:
    """The variations of a program whose ranks have decided as `decisions` say."""

    def __init__(self, decisions: Mapping[int, Decisions]) -> None:
        self._decisions = decisions
        self._passes: dict[Site, dict[int, list[Pass]]] = defaultdict(lambda: defaultdict(list))
        for rank, own in decisions.items():
            for passed in own.passes:
                self._passes[own.sites[passed.site]][rank].append(passed)
        self._has_batches = any(site.kind is SiteKind.BATCH for site in self._passes)

    def list_variations(self) -> Iterator[PlannedVariation]:
        """All variations, those of values first."""
        for site, by_rank in self._passes.items():
            rank = max(by_rank)  # rank 0 often does more than others
            for kind, detail, condition in self._list_changes(site, by_rank[rank], by_rank):
                ranks = self._find_ranks(site, by_rank[rank], rank)
                if ranks:
                    words = condition.format(ranks=name_ranks(ranks))
                    yield PlannedVariation(site, kind, ranks, words, detail)

    def find_pass(self, variation: PlannedVariation, first_step: int) -> Pass | None:
        """The first pass of a variation's site in this step or later; None if there is none."""
        passes = self._passes[variation.site][variation.ranks[-1]]
        later = [passed for passed in passes if passed.step >= first_step]
        # What follows is compared up to the next pass, in a later step.
        followed = (p for p, after in itertools.pairwise(later) if after.step > p.step)
        return next(followed, next(iter(later), None))

    def _list_changes(
        self, site: Site, passes: Sequence[Pass], by_rank: Mapping[int, Sequence[Pass]]
    ) -> Iterator[tuple[ChangeKind, str, str]]:
        """The kinds of change at a site, with details and conditions in which {ranks} is open."""
        first, place = passes[0], site.place
        is_handled = any(passed.is_handled for passed in passes)
        match site.kind:
            case SiteKind.VALUE:
                for kind in _VALUES.get(first.dtype, ()):
                    yield (
                        kind,
                        "",
                        f"{site.what} at {place} is {_name_value(kind, first)} on {{ranks}}",
                    )
            case SiteKind.ROWS:
                yield _K.NO_ROWS, "", f"{site.what} at {place} selects nothing on {{ranks}}"
            case SiteKind.BATCH:
                yield from _list_batch_changes(site, passes)
            case SiteKind.INPUT if not self._has_batches:
                yield _K.SAME_ROWS, "", "all samples of {ranks} are the same"
                yield _K.NAN, "", "the batch of {ranks} contains NaN"
            case SiteKind.CLOCK:
                yield (
                    _K.LATER,
                    "",
                    f"the clock of {{ranks}} is ahead of that of the others ({place})",
                )
            case SiteKind.SIGNAL:
                yield _K.DELIVERED, "", f"{{ranks}} alone gets {site.what}"
            case SiteKind.FILE if is_handled:
                yield _K.RAISED, "", f"{site.what} fails on {{ranks}} ({place})"
            case SiteKind.SEED if _differs(by_rank):
                yield _K.OTHER, "", f"{{ranks}} draws other random numbers ({site.what} at {place})"
            case SiteKind.OVERFLOW:
                yield _K.OPPOSITE, "", "gradients overflow on {ranks}, whose step is skipped"
        if site.kind is SiteKind.INPUT and is_handled:
            yield _K.RAISED, "", "{ranks} runs out of memory in the call of the model"

    def _find_ranks(self, site: Site, passes: Sequence[Pass], rank: int) -> tuple[int, ...]:
        """The ranks that see what `rank` sees; none if it sees nothing of its own."""
        if site.kind in (SiteKind.VALUE, SiteKind.ROWS, SiteKind.OVERFLOW):
            if any(passed.ranks is None for passed in passes):
                return ()
            sharing = [(passed.ranks or (rank,), passed.sources) for passed in passes]
            members, sources = min(sharing, key=lambda pair: len(pair[0]))
        elif site.kind in (SiteKind.BATCH, SiteKind.INPUT):
            members, sources = (rank,), ("data", "random")
        else:
            return (rank,)
        same = {peer for member in members for peer in self._list_same(member, sources)}
        return tuple(sorted(same))

    def _list_same(self, rank: int, sources: Sequence[str]) -> list[int]:
        """The ranks with the same data, or random numbers, as a rank."""
        own = self._decisions.get(rank)
        if own is None:
            return []
        return [
            peer
            for peer, other in self._decisions.items()
            if peer == rank or all(_has_same(own, other, source) for source in sources)
        ]


def _has_same(first: Decisions, second: Decisions, source: str) -> bool:
    own, other = getattr(first, source), getattr(second, source)
    last = min(len(own), len(other)) - 1
    return last >= 0 and own[last] == other[last]


def _list_batch_changes(
    site: Site, passes: Sequence[Pass]
) -> Iterator[tuple[ChangeKind, str, str]]:
    entries = list(dict.fromkeys(entry for passed in passes for entry in passed.detail))
    for entry in entries[:_MAX_ENTRIES]:
        yield _K.WITHOUT, entry, f"the batch of {{ranks}} has no entry {entry!r} ({site.place})"
    yield _K.SAME_ROWS, "", f"all samples in the batch of {{ranks}} are the same ({site.place})"
    yield _K.NO_ROWS, "", f"the batch of {{ranks}} is empty ({site.place})"
    yield _K.NAN, "", f"the batch of {{ranks}} contains NaN ({site.place})"
    if "iterable" in site.what:
        yield _K.END, "", f"the data of {{ranks}} ends earlier ({site.place})"
    if any(passed.is_handled for passed in passes):
        yield _K.RAISED, "", f"a sample of {{ranks}} cannot be read ({site.place})"


def _name_value(kind: ChangeKind, passed: Pass) -> str:
    if passed.dtype == "bool":
        return str(not passed.value)
    if kind is _K.OPPOSITE:
        return "0" if passed.value else "1"
    return {_K.NAN: "NaN", _K.LARGE: "very large", _K.ZERO: "0"}[kind]


def _differs(by_rank: Mapping[int, Sequence[Pass]]) -> bool:
    """Whether ranks have other values at a site."""
    return len({tuple(passed.value for passed in passes) for passes in by_rank.values()}) > 1


def schedule(
    variations: Sequence[PlannedVariation], plan: Plan, num_steps: int
) -> tuple[list[PlannedVariation], list[Change]]:
    """As many variations as one run can try, each in a step of its own, with their changes."""
    chosen: list[PlannedVariation] = []
    changes: list[Change] = []
    step = min(1, num_steps - 1)
    for variation in sorted(variations, key=lambda v: v.is_lasting):
        passed = plan.find_pass(variation, 0 if variation.site.kind is SiteKind.SEED else step)
        if passed is None:
            continue
        chosen.append(variation)
        changes.append(variation.at(passed.number))
        step = max(step, passed.step + 1)
        if variation.is_lasting:
            break
    return chosen, changes
