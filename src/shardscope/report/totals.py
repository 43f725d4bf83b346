"""Sums by kind, mesh axis and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import Phase
from shardscope.report.fold import Traffic
from shardscope.report.layout import ByWidth, format_bar, make_table, make_text
from shardscope.report.traffic import Facet, Tally, add_up
from shardscope.report.units import Spread, format_bytes, format_count, format_spread, spread

__all__ = ["render_totals"]

_WIDE = 100
_PHASES = [str(phase) for phase in Phase]

# The facets that name a row, and one tally per rank class.
Sums = list[tuple[tuple[str, ...], list[Tally]]]


def render_totals(totals: Traffic, facets: Sequence[str]) -> RenderableType:
    """A row for each combination of the facets (`kind`, `axis`, `phase`) that occurs."""
    sums = _sum_by(totals, facets)
    whole = [add_up(traffic.values()) for traffic in totals]
    min_width = _WIDE if len(facets) > 2 else 0
    return ByWidth(lambda width: _make_table(sums, whole, facets, has_share=width >= min_width))


def _sum_by(totals: Traffic, facets: Sequence[str]) -> Sums:
    sums: dict[tuple[str, ...], list[Tally]] = defaultdict(lambda: [Tally()] * len(totals))
    for index, traffic in enumerate(totals):
        for facet, one in traffic.items():
            sums[_read(facet, facets)][index] += one
    return sorted(sums.items(), key=lambda item: [_sort_key(name) for name in item[0]])


def _read(facet: Facet, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(getattr(facet, name)) for name in names)


def _sort_key(name: str) -> tuple[int, str]:
    # Phases in the order they happen, all else by the alphabet.
    return (_PHASES.index(name), "") if name in _PHASES else (-1, name)


def _make_table(
    sums: Sums, whole: list[Tally], facets: Sequence[str], *, has_share: bool
) -> RenderableType:
    sent = _spread(whole, "wire_bytes").high
    rows: list[list[Text | str]] = []
    previous: tuple[str, ...] = ()
    for names, tallies in sums:
        bar = [format_bar(_spread(tallies, "wire_bytes").high, sent)] if has_share else []
        rows.append([*_blank_repeats(names, previous), *_format_tallies(tallies), *bar])
        previous = names
    if len(sums) > 1:
        rows.append(["total", *("" for _ in facets[1:]), *_format_tallies(whole)])
    headers = [*facets, "count", "put in", "got out", "on wire", *(["share"] if has_share else [])]
    return make_table(headers, rows, num_names=len(facets))


def _blank_repeats(names: tuple[str, ...], previous: tuple[str, ...]) -> Iterator[Text]:
    for index, name in enumerate(names):
        is_last = index == len(names) - 1
        is_repeat = not is_last and names[: index + 1] == previous[: index + 1]
        yield Text() if is_repeat else make_text(name, width=40)


def _format_tallies(tallies: list[Tally]) -> Iterator[str]:
    yield format_spread(_spread(tallies, "count"), format_count)
    for field in ("input_bytes", "output_bytes", "wire_bytes"):
        yield format_spread(_spread(tallies, field), format_bytes)


def _spread(tallies: list[Tally], field: str) -> Spread:
    return spread(getattr(one, field) for one in tallies)
