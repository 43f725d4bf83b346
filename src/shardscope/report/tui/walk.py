"""Where one is in a recording: the place, the filter, the order, the matches of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from msgspec.structs import replace

from shardscope.record import Collective, Finding, Gap, Recording
from shardscope.report.fold import build_tree
from shardscope.report.problems import describe_checks, sort_findings
from shardscope.report.traffic import fold_ranks
from shardscope.report.tui.call_list import SORTS, CallList, Filter
from shardscope.report.tui.details import Details
from shardscope.report.tui.outline import Chain, Outline, Place

__all__ = ["Walk"]


@final
class Walk:
    """What the panes show, without a screen; they ask for it and draw it."""

    def __init__(self, recording: Recording) -> None:
        self._roots = build_tree(recording, fold_ranks(recording))
        self._is_folded = True
        self._match = 0
        self._sort = "order"
        self._is_reversed = False
        self._filter = Filter()
        self._term = ""
        self.outline = Outline(self._roots)
        self.calls = CallList(recording)
        self.details = Details(recording)
        self.problems: list[Finding | Gap] = [*sort_findings(recording), *recording.gaps]
        self.checks = f"No findings ({describe_checks(recording)})."
        self.is_traced = "trace" in recording.run.instruments
        self.place: Place | None = None
        self.matches: list[Chain] = []

    @property
    def is_filtered(self) -> bool:
        """Whether some collectives are kept back."""
        return bool(self._filter.words)

    @property
    def words(self) -> str:
        """How collectives are chosen and sorted: `phase backward · by order`."""
        chosen = f"{self._filter.words} · " if self.is_filtered else ""
        return f"{chosen}{'reversed ' if self._is_reversed else ''}by {self._sort}"

    def list_calls(self) -> Sequence[Collective]:
        """Those of the place that the filter keeps."""
        if self.place is None:
            return ()
        return self.calls.choose(
            self.place, self._filter, sort=self._sort, is_reversed=self._is_reversed
        )

    def filter_next(self, facet: str) -> None:
        """Keep the next value of a facet; after the last, all."""
        values = [None, *self.calls.choices[facet]]
        now = values.index(getattr(self._filter, facet))
        self._filter = replace(self._filter, **{facet: values[(now + 1) % len(values)]})

    def clear_filter(self) -> None:
        """Keep all."""
        self._filter = Filter()

    def sort_next(self) -> None:
        """Sort by the next column."""
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]

    def turn_round(self) -> None:
        """Sort the other way."""
        self._is_reversed = not self._is_reversed

    def fold(self) -> Chain | None:
        """Fold layers that are alike, or show each; where the place is then."""
        path = self.place.paths[0] if self.place is not None else ""
        self._is_folded = not self._is_folded
        self.outline = Outline(self._roots, is_folded=self._is_folded)
        self.search(self._term)
        return self.outline.find(path)

    def search(self, term: str) -> None:
        """Find places by name or class."""
        self._term = term
        self._match = 0
        self.matches = self.outline.search(term)

    def move_match(self, by: int) -> None:
        """To the next match, or the one before; after the last comes the first."""
        self._match = (self._match + by) % max(1, len(self.matches))

    @property
    def match(self) -> Chain | None:
        """Where the search has led."""
        return self.matches[self._match] if self.matches else None

    @property
    def match_words(self) -> str:
        """`2 of 12`; nothing if nothing is searched for."""
        if not self._term.strip():
            return ""
        found = f"{self._match + 1:,} of {len(self.matches):,}"
        return found if self.matches else f"no {self._term}"

    def find_place(self, thing: Collective | Finding | Gap) -> Chain | None:
        """Where a collective belongs, or the first module or tensor that a finding names."""
        if isinstance(thing, Gap):
            return None
        if isinstance(thing, Collective):
            return None if thing.owner is None else self.outline.find(thing.owner)
        return self.outline.find(thing.subject.partition(" (×")[0].partition(", ")[0])
