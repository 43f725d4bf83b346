"""Figures of the page's modules in the recording that it is compared with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import asdict, astuple, replace

from shardscope.record import Recording
from shardscope.record.layer_names import fold_layers
from shardscope.record.traffic import (
    choose_busiest,
    sum_traffic,
)
from shardscope.report.compare.facts import CleanNames, clean_names, name_paths
from shardscope.report.html.module_rows import ModuleTree, make_modules
from shardscope.report.html.page import (
    Communication,
    EarlierCollectives,
    EarlierCurve,
    EarlierRecording,
    Page,
)
from shardscope.report.html.page_index import NOWHERE
from shardscope.report.html.page_modules import EarlierModules, GoneModules, Modules
from shardscope.report.model.module_tree import NO_MODULE, ModuleNode
from shardscope.report.model.select import infer_modules
from shardscope.report.model.traffic_totals import fold_ranks

_Selected = TypeVar("_Selected", bound=Struct)


class _Figures(Struct, frozen=True):
    """Figures of a module, including its children."""

    count: int = 0
    wire_bytes: int = 0
    parameters: int = 0
    local_bytes: int = 0
    peak_bytes: int = 0


def make_earlier(
    modules: Modules, recording: Recording, against: Recording
) -> EarlierModules | None:
    """Find the page's modules in the earlier recording `against`; None if it has no modules.

    Names are compared without the prefixes of wrappers. Modules that only `against` has are listed
    below the nearest ancestor that the page has.
    """
    before_names, after_names = clean_names(against, recording)
    against = infer_modules(against)
    tree = ModuleTree(against, fold_ranks(against))
    earlier = make_modules(against, tree)
    if not earlier.path:
        return None
    all_figures = [_read_figures(earlier, at, node) for at, node in enumerate(tree.nodes)]
    earlier_positions = _index_names(earlier, before_names)
    names = [_clean(path, after_names) for path in modules.path]
    figures = [
        all_figures[earlier_positions[name]] if name in earlier_positions else _Figures()
        for name in names
    ]
    columns = zip(*map(astuple, figures), strict=True)
    return EarlierModules(
        recorded=earlier.recorded,
        is_new=tuple(name not in earlier_positions for name in names),
        **dict(zip(_Figures.__struct_fields__, columns, strict=True)),
        gone=tuple(
            GoneModules(
                parent=parent,
                name=name_paths([earlier.path[position] for position in gone]),
                paths=tuple(_clean(earlier.path[position], before_names) for position in gone),
                num_modules=len(gone),
                **asdict(_add(all_figures[position] for position in gone)),
            )
            for parent, gone in _list_gone(
                earlier, before_names, _index_names(modules, after_names)
            )
        ),
    )


def _clean(path: str, names: CleanNames) -> str:
    return path if path == NO_MODULE else names.clean(path)


def _index_names(modules: Modules, names: CleanNames) -> dict[str, int]:
    positions: dict[str, int] = {}
    for position, path in enumerate(modules.path):
        positions.setdefault(_clean(path, names), position)
    return positions


def _read_figures(modules: Modules, position: int, node: ModuleNode) -> _Figures:
    """Return a module's figures; those of collectives are of the rank that sends most."""
    busiest = choose_busiest(sum_traffic(traffic.values()) for traffic in node.total)
    return _Figures(
        busiest.count,
        busiest.wire_bytes,
        modules.total_parameters[position],
        modules.total_local_bytes[position],
        modules.total_peak_bytes[position],
    )


def _list_gone(
    earlier: Modules, names: CleanNames, positions: dict[str, int]
) -> Iterator[tuple[int, list[int]]]:
    """Yield the topmost modules that are missing from the page, by parent and folded name."""
    nearest: list[int] = []  # for each earlier module, its nearest ancestor on the page or itself
    groups: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for position, path in enumerate(earlier.path):
        parent = earlier.parent[position]
        above = NOWHERE if parent == NOWHERE else nearest[parent]
        name = _clean(path, names)
        nearest.append(positions.get(name, above))
        is_topmost = parent == NOWHERE or _clean(earlier.path[parent], names) in positions
        if name not in positions and is_topmost:
            groups[above, fold_layers(name)].append(position)
    for (parent, _), gone in groups.items():
        yield parent, gone


def _add(figures: Iterable[_Figures]) -> _Figures:
    return _Figures(*map(sum, zip(*map(astuple, figures), strict=True)))


def make_earlier_recording(
    page: Page, earlier_page: Page, recording: Recording, against: Recording
) -> EarlierRecording:
    """Make what the page sums of `against`, whose own page is `earlier_page`."""
    before_names, after_names = clean_names(against, recording)
    paths = {_clean(path, after_names): path for path in reversed(page.modules.path)}
    cleaned = [_clean(path, before_names) for path in earlier_page.modules.path]
    return EarlierRecording(
        modules=tuple(paths.get(name, name) for name in cleaned),
        communication=_make_collectives(earlier_page.communication),
        memory=tuple(_select_fields(EarlierCurve, curve) for curve in earlier_page.memory),
    )


def _make_collectives(communication: Communication | None) -> EarlierCollectives | None:
    if communication is None or not communication.traffic.count:
        return None
    traffic = communication.traffic
    without_lines = replace(traffic, source=(NOWHERE,) * len(traffic.source))
    return _select_fields(EarlierCollectives, replace(communication, traffic=without_lines))


def _select_fields(kind: type[_Selected], record: Struct) -> _Selected:
    """Make a record of some fields of another."""
    return kind(**{name: getattr(record, name) for name in kind.__struct_fields__})
