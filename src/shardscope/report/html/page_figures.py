"""The page's figures of all views, by which it is compared with another page."""

from __future__ import annotations

from msgspec import Struct


class Figure(Struct, frozen=True, kw_only=True):
    """A number of a view that can be compared with that of another page."""

    view: str
    group: str  # what is counted: `bytes sent per rank (ring estimate)`
    label: str  # `all_gather[tp]`
    unit: str  # bytes or count
    value: int
    follows: tuple[str, ...] = ()  # facets by which its parts in `FigureParts` can be selected


class FigureParts(Struct, frozen=True, kw_only=True):
    """What figures are sums of, in columns.

    A part is selected if any of its modules and of its phases is; without ranks it concerns all of
    them. `modules` is empty if there are too many for a page.
    """

    figure: tuple[int, ...] = ()  # position of the figure
    modules: tuple[tuple[int, ...], ...] = ()
    axis: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()  # joined by spaces
    ranks: tuple[str, ...] = ()
    value: tuple[int, ...] = ()
