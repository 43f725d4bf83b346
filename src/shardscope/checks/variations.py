"""What to change where a program decides, and on which ranks.

`Plan` reads the decisions of a run without changes. A rank's own data may make it decide otherwise
than the others: each such decision is changed on one rank, together with the ranks that have the
same data, or that get the value from the same collective.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from shardscope.hang import name_ranks
from shardscope.launch.decision_log import BATCH
from shardscope.launch.decisions import Change, ChangeKind, Decisions, Pass, Site, SiteKind
from shardscope.record import Source

_MIN_VALUES = 16  # that are different, of data by which ranks with the same data are recognized
_MAX_LENGTHS = 3  # of sequences in a batch that are varied
_MAX_ENTRIES = 8  # of a batch that are left out, one after the other
_MAX_FROZEN = 3  # parts of a model
_K, _S = ChangeKind, SiteKind
# After these a run is not what it was: they come last in it.
_LASTING = {_K.FROZEN, _K.NAN, _K.END, _K.LATER, _K.RAISED, _K.DELIVERED, _K.WITHOUT}
_VALUES = {"bool": (_K.OPPOSITE,), "int": (_K.OPPOSITE,), "float": (_K.NAN, _K.LARGE, _K.ZERO)}
_LENGTHS = {_K.SHORTER, _K.LONGER, _K.FEWER_ROWS, _K.NO_ROWS}


@final
@dataclass(frozen=True)
class PlannedVariation:
    """A change, at whichever pass of its site comes next, and the words that follow "if".

    With `is_repeated`, it is made at all passes of an iteration. `is_in_model` says that the model
    runs there, or its batch is made.
    """

    site: Site
    kind: ChangeKind
    ranks: tuple[int, ...]
    condition: str
    detail: str = ""
    is_repeated: bool = False
    is_in_model: bool = False

    @property
    def is_lasting(self) -> bool:
        """Whether what follows in the run is changed too."""
        return self.kind in _LASTING and self.site.kind is not _S.VALUE

    @property
    def is_of_lengths(self) -> bool:
        """Whether it changes how many samples there are, or how long they are."""
        return self.kind in _LENGTHS and self.site.kind in (_S.BATCH, _S.INPUT)

    @property
    def group(self) -> tuple[ChangeKind, tuple[int, ...]] | None:
        """What variations have in common that can be tried together; None if this one cannot."""
        is_number = self.site.kind is _S.VALUE and self.kind is not _K.OPPOSITE
        return (self.kind, self.ranks) if is_number else None

    @property
    def source(self) -> Source | None:
        """The line of the site."""
        return self.site.source

    def at(self, passed: Pass) -> Change:
        """The change at a pass of the site, or at all of its iteration."""
        return Change(
            site=self.site,
            number=passed.number,
            kind=self.kind,
            ranks=self.ranks,
            detail=self.detail,
            is_repeated=self.is_repeated,
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
        self._has_batches = any(site.kind is _S.BATCH for site in self._passes)

    def list_variations(self) -> Iterator[PlannedVariation]:
        """All variations."""
        for site, by_rank in self._passes.items():
            rank = max(by_rank)  # rank 0 often does more than others
            passes = by_rank[rank]
            ranks = self._find_ranks(site, passes, rank)
            if not ranks:
                continue
            for kind, detail, condition in self._list_changes(site, passes, by_rank):
                if kind is _K.RAISED:  # whatever the data
                    ranks = (rank,)
                elif kind is _K.FROZEN:
                    ranks = tuple(sorted(self._decisions))
                words = condition.format(ranks=name_ranks(ranks), s="s" * (len(ranks) == 1))
                planned = PlannedVariation(
                    site, kind, ranks, words, detail, is_in_model=passes[0].is_in_model
                )
                yield planned
                if site.kind in (_S.VALUE, _S.ROWS) and _is_repeated(passes):
                    words = f"{words}, each time in a step"
                    yield dataclasses.replace(planned, condition=words, is_repeated=True)

    def find_pass(self, variation: PlannedVariation, first: int) -> Pass | None:
        """The first pass of a variation's site in this iteration or later; None if there is none.

        One that is followed by another pass is preferred: up to there, what follows is compared.
        """
        passes = self._list_passes(variation)
        later = [passed for passed in passes if passed.iteration >= first]
        if variation.is_repeated:
            return next(iter(later), None)
        followed = (p for p, after in itertools.pairwise(later) if after.iteration > p.iteration)
        return next(followed, next(iter(later), None))

    def is_early(self, variation: PlannedVariation) -> bool:
        """Whether the program comes to the site before its first iteration only."""
        return all(passed.iteration == 0 for passed in self._list_passes(variation))

    def _list_passes(self, variation: PlannedVariation) -> list[Pass]:
        """The passes of a variation's site on the last of its ranks that comes there."""
        by_rank = self._passes[variation.site]
        return next((by_rank[rank] for rank in reversed(variation.ranks) if rank in by_rank), [])

    @property
    def num_iterations(self) -> int:
        """How many iterations all ranks have begun."""
        counts = (
            max((passed.iteration for passed in own.passes), default=0)
            for own in self._decisions.values()
        )
        return min(counts, default=0) + 1

    def _list_changes(
        self, site: Site, passes: Sequence[Pass], by_rank: Mapping[int, Sequence[Pass]]
    ) -> Iterator[tuple[ChangeKind, str, str]]:
        """The kinds of change at a site, with details and conditions in which {ranks} is open."""
        first, place = passes[0], site.place
        is_handled = any(passed.is_handled for passed in passes)
        match site.kind:
            case _S.VALUE:
                for kind in _VALUES.get(first.dtype, ()):
                    value = _name_value(kind, first)
                    yield kind, "", f"{site.what} at {place} is {value} on {{ranks}}"
            case _S.ROWS:
                yield _K.NO_ROWS, "", f"{site.what} at {place} returns nothing on {{ranks}}"
                yield _K.ALL_ROWS, "", f"{site.what} at {place} returns everything on {{ranks}}"
            case _S.BATCH:
                yield from _list_batch_changes(site, passes)
            case _S.INPUT:
                if not self._has_batches:
                    yield _K.SHORTER, "", "the sequences of {ranks} are shorter"
                    yield _K.SAME_ROWS, "", "all samples of {ranks} are the same"
                    yield _K.NAN, "", "the batch of {ranks} contains NaN"
                for part in itertools.islice(first.detail, _MAX_FROZEN):
                    yield _K.FROZEN, part, f"{part} of {site.what} is frozen on all ranks"
            case _S.CLOCK:
                yield _K.LATER, "", f"the clock of {{ranks}} is ahead of the others' ({place})"
            case _S.SIGNAL:
                yield _K.DELIVERED, "", f"only {{ranks}} get{{s}} {site.what}"
            case _S.FILE if is_handled:
                yield _K.RAISED, "", f"{site.what} fails on {{ranks}} ({place})"
            case _S.EXISTS:
                answer = "does not exist" if first.value else "exists"
                yield _K.OPPOSITE, "", f"the file of {site.what} {answer} on {{ranks}} ({place})"
            case _S.SEED if _differs(by_rank):
                yield _K.OTHER, "", f"{{ranks}} draw{{s}} other random numbers ({place})"
            case _S.OVERFLOW:
                yield _K.OPPOSITE, "", "gradients overflow on {ranks}, whose step is skipped"
        if site.kind is _S.INPUT and is_handled:
            yield _K.RAISED, "", "{ranks} run{s} out of memory in the call of the model"

    def _find_ranks(self, site: Site, passes: Sequence[Pass], rank: int) -> tuple[int, ...]:
        """The ranks that see what `rank` sees; none if it sees nothing of its own."""
        if site.kind in (_S.VALUE, _S.ROWS, _S.OVERFLOW):
            if any(passed.ranks is None for passed in passes):
                return ()
            sharing = [(passed.ranks or (rank,), passed.sources) for passed in passes]
            members, sources = min(sharing, key=lambda pair: len(pair[0]))
        elif site.kind is _S.BATCH:
            members, sources = (rank,), passes[0].sources
        elif site.kind is _S.INPUT:
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
    """Whether two ranks have the same data or random numbers.

    Data of few different values may be equal by chance: then the random numbers have to be, too.
    """
    if source.startswith(BATCH):
        return source in first.batches and source in second.batches
    own, other = getattr(first, source), getattr(second, source)
    last = min(len(own), len(other)) - 1
    if last < 0 or own[last] != other[last]:
        return False
    is_meaningful = source != "data" or min(first.num_values, second.num_values) >= _MIN_VALUES
    return is_meaningful or _has_same(first, second, "random")


def _list_batch_changes(
    site: Site, passes: Sequence[Pass]
) -> Iterator[tuple[ChangeKind, str, str]]:
    where = f"({site.place})"
    if any(passed.has_samples for passed in passes):
        yield _K.SHORTER_SAMPLES, "", f"the samples of {{ranks}} are shorter {where}"
        yield _K.LONGER_SAMPLES, "", f"the samples of {{ranks}} are longer {where}"
        num_lengths = 0
    else:
        num_lengths = int(max((passed.value or 0 for passed in passes), default=0))
    # Where a batch has sequences of several lengths, those of each by themselves.
    for which in [""] if num_lengths == 1 else map(str, range(min(num_lengths, _MAX_LENGTHS))):
        name = f" of length {int(which) + 1} of {num_lengths}" if which else ""
        yield _K.SHORTER, which, f"the sequences{name} of {{ranks}} are shorter {where}"
        yield _K.LONGER, which, f"the sequences{name} of {{ranks}} are longer {where}"
    yield _K.FEWER_ROWS, "", f"the batch of {{ranks}} has fewer samples {where}"
    yield _K.SAME_ROWS, "", f"all samples in the batch of {{ranks}} are the same {where}"
    yield _K.NO_ROWS, "", f"the batch of {{ranks}} is empty {where}"
    entries = dict.fromkeys(entry for passed in passes for entry in passed.detail)
    for entry in itertools.islice(entries, _MAX_ENTRIES):
        yield _K.WITHOUT, entry, f"the batch of {{ranks}} has no {entry} {where}"
    if any(passed.has_strings for passed in passes):
        yield _K.OTHER, "", f"the strings in the batch of {{ranks}} are others {where}"
    yield _K.NAN, "", f"the batch of {{ranks}} contains NaN {where}"
    if "iterable" in site.what:  # others have as many batches as they say
        yield _K.END, "", f"the data of {{ranks}} ends earlier {where}"
    if any(passed.is_handled for passed in passes):
        yield _K.RAISED, "", f"a sample of {{ranks}} cannot be read {where}"


def _is_repeated(passes: Iterable[Pass]) -> bool:
    """Whether a rank comes to a site several times in an iteration."""
    return any(first.iteration == second.iteration for first, second in itertools.pairwise(passes))


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
    variations: Sequence[PlannedVariation], plan: Plan
) -> tuple[list[PlannedVariation], list[Change]]:
    """As many variations as one run can try, with their changes, in the order in which it does.

    Each has an iteration of its own, apart from numbers that are read. What a program does before
    its first iteration is varied alone.
    """
    early = next(filter(plan.is_early, variations), None)
    if early is not None and plan.num_iterations > 1:
        passed = plan.find_pass(early, 0)
        if passed is not None:
            return [early], [early.at(passed)]
    chosen: list[PlannedVariation] = []
    changes: list[Change] = []
    iteration, group = min(1, plan.num_iterations - 1), None
    last: Pass | None = None
    for variation in sorted(variations, key=lambda v: (v.is_lasting, str(v.group))):
        is_together = group is not None and variation.group == group and last is not None
        passed = plan.find_pass(variation, last.iteration if is_together and last else iteration)
        if passed is None:
            continue
        chosen.append(variation)
        changes.append(variation.at(passed))
        group, last = variation.group, passed
        # The model is called after its batch is taken: what follows in the step counts as the next.
        is_of_batch = variation.site.kind in (_S.BATCH, _S.INPUT)
        iteration = max(iteration, passed.iteration + (2 if is_of_batch else 1))
        if variation.is_lasting:
            break
    return chosen, changes
