"""Writes traffic.cases.json: pages, and sums of their recordings' collectives as Python makes them.

The TypeScript tests compare them with the sums of a page's rows, with and without a selection.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from shardscope.record import (
    Collective,
    Phase,
    RankSpan,
    Recording,
    describe_cause,
    expand_ranks,
    load,
)
from shardscope.record.patterns import matches_inside
from shardscope.record.recording import name_axis
from shardscope.record.traffic import (
    TrafficTotals,
    choose_busiest,
    count_traffic,
    find_busiest,
    sum_traffic,
)
from shardscope.report.html.html import build_page, sanitize_page
from shardscope.report.html.page import Modules
from shardscope.report.model.module_tree import ModuleNode, build_tree
from shardscope.report.model.traffic_totals import (
    Facet,
    IdenticalRanks,
    fold_ranks,
)
from shardscope.report.text.communication import describe_kinds, gather_reasons

_ROOT = Path(__file__).resolve().parents[1]
_RECORDINGS = ("tests/golden/recording_v2.json", "examples/recordings/moe.json.gz")
_RECORDINGS += ("examples/recordings/vision.json.gz", "examples/recordings/llama.json.gz")
_PHASES = tuple(Phase)

IsSelected = Callable[[Collective], bool]


def write_cases() -> str:
    """A case for each recording, and one whose three ranks differ."""
    recordings = {name: load(_ROOT / name) for name in _RECORDINGS}
    recordings["ranks that differ"] = make_uneven(recordings[_RECORDINGS[-1]])
    cases = [_make_case(name, recording) for name, recording in recordings.items()]
    return json.dumps(cases, indent=None, ensure_ascii=False, sort_keys=True) + "\n"


def make_uneven(recording: Recording) -> Recording:
    """Three ranks: the recording's, one that issues half as many, and one with larger gradients."""
    calls = recording.collectives
    half = [replace(call, rank=1) for call in calls if call.order % 2]
    larger = [
        replace(call, rank=2, wire_bytes=call.wire_bytes * 3, input_bytes=call.input_bytes + 1)
        if call.phase is Phase.BACKWARD
        else replace(call, rank=2)
        for call in calls[: len(calls) * 3 // 4]
    ]
    return replace(
        recording,
        run=replace(recording.run, ranks=(RankSpan(0, 3),)),
        collectives=(*calls, *half, *larger),
    )


def _make_case(name: str, recording: Recording) -> dict[str, Any]:
    page = build_page(recording)
    keys = ("modules", "sources", "communication")
    selections = [({}, None, lambda call: True), *_list_selections(recording)]
    return {
        "name": name,
        "page": {key: msgspec.to_builtins(getattr(page, key)) for key in keys},
        "expected": [
            {"params": params, **sum_up(recording, rank, is_selected)}
            for params, rank, is_selected in selections
        ],
    }


def _list_selections(
    recording: Recording,
) -> Iterator[tuple[dict[str, str], int | None, IsSelected]]:
    """Parameters of an address, the selected rank, and whether they select a collective."""
    calls, world_size = recording.collectives, recording.run.world_size
    middle = calls[len(calls) // 2]
    axis = name_axis(middle, world_size)
    cause = describe_cause(middle.cause)
    yield {"axis": axis}, None, lambda call: name_axis(call, world_size) == axis
    yield (
        {"kind": middle.kind, "phase": middle.phase},
        None,
        lambda call: (call.kind, call.phase) == (middle.kind, middle.phase),
    )
    yield {"cause": cause}, None, lambda call: describe_cause(call.cause) == cause
    yield {"dtype": middle.dtype}, None, lambda call: call.dtype == middle.dtype
    yield {"rank": str(middle.rank)}, middle.rank, lambda call: True
    low, high = len(calls) // 5, len(calls) // 2
    yield {"range": f"{low}-{high}"}, None, lambda call: low <= call.order <= high
    for source in {call.source for call in calls[:1] if call.source}:
        place = (source.file, source.line)
        yield (
            {"line": f"{place[0]}:{place[1]}"},
            None,
            lambda call, place=place: (
                call.source is not None and (call.source.file, call.source.line) == place
            ),
        )
    has_layers = any((call.owner or "").startswith("layers.") for call in calls)
    for pattern in (middle.owner, "layers.*" if has_layers else "*"):
        if pattern:
            yield (
                {"m": pattern},
                None,
                lambda call, pattern=pattern: (
                    call.owner is not None and matches_inside(pattern, call.owner)
                ),
            )


def sum_up(
    recording: Recording,
    rank: int | None = None,
    is_selected: IsSelected = lambda call: True,
) -> dict[str, Any]:
    """Sums of the selected collectives: of all, by rank, axis, kind and phase, cause and module."""
    chosen = tuple(
        IdenticalRanks(
            rank_set.ranks,
            tuple(filter(is_selected, rank_set.calls))
            if rank is None or rank in expand_ranks(rank_set.ranks)
            else (),
        )
        for rank_set in fold_ranks(recording)
    )
    totals = [sum_traffic(map(count_traffic, rank_set.calls)) for rank_set in chosen]
    return {
        "total": _figures(choose_busiest(totals)),
        "ranks": [_figures(total) for total in totals],
        "facets": sorted(_sum_facets(recording, chosen)),
        "causes": [
            [reason.words, reason.label, *_figures(reason.busiest)]
            for reason in gather_reasons(recording, chosen)
        ],
        "modules": {
            _sanitize(node.path): figures
            for root in build_tree(recording, chosen)
            for node in _walk(root)
            if (figures := _measure(node))
        },
    }


def _sanitize(path: str) -> str:
    """The path as the page has it, with control characters escaped."""
    return sanitize_page(Modules(path=(path,))).path[0]


def _figures(totals: TrafficTotals) -> list[int]:
    return [totals.count, totals.input_bytes, totals.wire_bytes]


def _sum_facets(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> Iterator[list[object]]:
    sums: dict[Facet, list[TrafficTotals]] = defaultdict(list)
    for rank_set in rank_sets:
        of_ranks: dict[Facet, TrafficTotals] = defaultdict(TrafficTotals)
        for call in rank_set.calls:
            axis = name_axis(call, recording.run.world_size)
            of_ranks[Facet(call.phase, call.kind, axis)] += count_traffic(call)
        for facet, total in of_ranks.items():
            sums[facet].append(total)
    for facet, totals in sums.items():
        yield [facet.axis, facet.kind, facet.phase, *_figures(choose_busiest(totals))]


def _walk(node: ModuleNode) -> Iterator[ModuleNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _measure(node: ModuleNode) -> dict[str, Any] | None:
    """Figures of the rank that sends most for the module, or None if none issues a collective."""
    totals = [sum_traffic(traffic.values()) for traffic in node.total]
    busy = [total for total in totals if total.count]
    if not busy:
        return None
    busiest = find_busiest(totals)
    return {
        "total": _figures(totals[busiest]),
        "phase_counts": _by_phase(node.total[busiest], "count"),
        "phase_bytes": _by_phase(node.total[busiest], "wire_bytes"),
        "own_counts": _by_phase(node.own[busiest], "count"),
        "own_bytes": _by_phase(node.own[busiest], "wire_bytes"),
        "what": describe_kinds(node),
        "is_uneven": any(_figures(total) != _figures(busy[0]) for total in busy),
    }


def _by_phase(traffic: dict[Facet, TrafficTotals], figure: str) -> list[int]:
    return [
        sum(getattr(totals, figure) for facet, totals in traffic.items() if facet.phase is phase)
        for phase in _PHASES
    ]


if __name__ == "__main__":
    print(write_cases(), end="")
