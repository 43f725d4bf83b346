"""The module tree × phases, in columns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from shardscope.record import Mark, Module, Recording
from shardscope.report.fold import ModuleNode
from shardscope.report.holdings import sum_holdings
from shardscope.report.memory import most_bytes
from shardscope.report.page.index import NOWHERE
from shardscope.report.page.modules import Modules
from shardscope.report.page.views.module_figures import (
    PHASES,
    Held,
    gather_parameters,
    measure,
    measure_traffic,
)
from shardscope.report.page.views.module_tree import ModuleTree
from shardscope.report.tree import describe_kinds

__all__ = ["make_modules"]


def make_modules(recording: Recording, tree: ModuleTree) -> Modules:
    """All that is known of each module."""
    nodes = tree.nodes
    findings, marks = _count_findings(recording, tree), _describe_marks(recording.modules)
    # A layer in which something was found must not vanish among those that are fine.
    alike, repeat = tree.find_alike(lambda at: (findings[at], marks.get(nodes[at].path)))
    said, held = [measure_traffic(node) for node in nodes], _add_parameters(recording, tree)
    return Modules(
        recorded=tuple(_list_recorded(recording)),
        phases=tuple(map(str, PHASES)),
        path=tuple(node.path for node in nodes),
        label=tuple(map(_label, nodes)),
        type=tuple("|".join(node.types) for node in nodes),
        parent=tuple(tree.parents),
        end=tuple(tree.find_ends()),
        alike=tuple(alike),
        repeat=tuple(repeat),
        what=tuple(map(describe_kinds, nodes)),
        is_uneven=tuple(one.is_uneven for one in said),
        own_count=tuple(one.own_count for one in said),
        total_count=tuple(one.total_count for one in said),
        total_input_bytes=tuple(one.total.input_bytes for one in said),
        own_wire_bytes=tuple(one.own.wire_bytes for one in said),
        total_wire_bytes=tuple(one.total_wire_bytes for one in said),
        total_parameters=tuple(one.num_elements for one in held),
        total_parameter_bytes=tuple(one.global_bytes for one in held),
        total_local_bytes=tuple(one.local_bytes for one in held),
        total_peak_bytes=tuple(tree.add_up(_find_peak(recording, tree))),
        marks=tuple(marks.get(node.path, "") for node in nodes),
        num_findings=tuple(tree.add_up(findings)),
    )


def _list_recorded(recording: Recording) -> Iterator[str]:
    """The groups of columns that have figures, where a zero is a figure too."""
    instruments = recording.run.instruments
    if recording.collectives or "trace" in instruments:
        yield "wire"
    held = sum_holdings(recording)
    if held is not None:
        yield "parameters"
        if held.local_bytes is not None:
            yield "local"
    if recording.memory:
        yield "peak"
    if instruments or recording.findings:
        yield "findings"


def _label(node: ModuleNode) -> str:
    return node.label if node.path else "|".join(node.types) or "model"


def _count_findings(recording: Recording, tree: ModuleTree) -> Counter[int]:
    return Counter(at for one in recording.findings for at in tree.subjects.find(one.subject))


def _find_peak(recording: Recording, tree: ModuleTree) -> Counter[int]:
    """What modules held at the peak of the rank that needs most."""
    held: Counter[int] = Counter()
    for profile in sorted(recording.memory, key=most_bytes)[-1:]:
        for use in profile.at_peak:
            held[tree.index.module(use.module)] += use.num_bytes
    return held


def _describe_marks(modules: Sequence[Module]) -> dict[str, str]:
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for module in modules:
        found[module.name] |= dict.fromkeys(map(_describe_mark, module.marks))
    return {name: ", ".join(words) for name, words in found.items()}


def _describe_mark(mark: Mark) -> str:
    over = f" over {' × '.join(mark.axes)}" if mark.axes else ""
    return f"{mark.kind}{f' ({mark.detail})' if mark.detail else ''}{over}"


def _add_parameters(recording: Recording, tree: ModuleTree) -> list[Held]:
    """Tied ones are summed apart: each counts once in whatever holds several of them."""
    parameters = gather_parameters(recording.modules)
    sums = [Held()] * len(tree.nodes)
    tied: list[dict[str, Held]] = [{} for _ in tree.nodes]
    for position in range(len(tree.nodes) - 1, -1, -1):
        parent = tree.parents[position]
        for one in parameters.get(tree.nodes[position].path, ()):
            if one.alias_group is None:
                sums[position] = sums[position].plus(measure(one))
            else:
                tied[position][one.alias_group] = measure(one)
        if parent != NOWHERE:
            sums[parent] = sums[parent].plus(sums[position])
            tied[parent] |= tied[position]
    for position, once in enumerate(tied):
        for held in once.values():
            sums[position] = sums[position].plus(held)
    return sums
