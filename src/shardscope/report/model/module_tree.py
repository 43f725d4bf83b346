"""The module tree with each module's collectives, and repeated layers folded into one node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from itertools import groupby
from typing import final

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record import Module, Parameter, Recording
from shardscope.record.layer_names import is_layer_number
from shardscope.record.recording import name_axis
from shardscope.record.traffic import (
    TrafficTotals,
    choose_busiest,
    count_traffic,
    sum_traffic,
)
from shardscope.report.model.traffic_totals import (
    Facet,
    IdenticalRanks,
    Spread,
    spread,
)

_MAX_DEPTH = 64  # deeper names are not split, so that recursion is bounded
NO_MODULE = "outside any module"

# For each set of identical ranks, in their order.
Traffic = tuple[dict[Facet, TrafficTotals], ...]


class ModuleNode(Struct, frozen=True, kw_only=True):
    """A module, or `repeat` adjacent identical modules; numbers are per module."""

    label: str
    path: str
    types: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    own: Traffic
    total: Traffic  # including children
    children: tuple[ModuleNode, ...] = ()
    repeat: int = 1
    last_label: str = ""  # of a repeated node

    def count(self, **facets: str) -> Spread:
        """Count the collectives of a rank, optionally of one phase, kind or axis."""
        return self._spread("count", facets)

    def input_bytes(self) -> Spread:
        """Sum the input bytes of a rank."""
        return self._spread("input_bytes", {})

    def wire_bytes(self) -> Spread:
        """Sum the bytes that a rank sent."""
        return self._spread("wire_bytes", {})

    def own_totals(self) -> TrafficTotals:
        """Return the traffic of the module itself on its busiest rank."""
        return choose_busiest(sum_traffic(traffic.values()) for traffic in self.own)

    def _spread(self, field: str, facets: dict[str, str]) -> Spread:
        return spread(
            sum(
                getattr(totals, field)
                for facet, totals in traffic.items()
                if all(getattr(facet, name) == value for name, value in facets.items())
            )
            for traffic in self.total
        )


def build_tree(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> tuple[ModuleNode, ...]:
    """Build the root and, if there are such collectives, a node for calls outside any module."""
    root, nowhere = _Branch(len(rank_sets)), _Branch(len(rank_sets))
    for module in recording.modules:
        root.at(module.name).add_module(module)
    for index, rank_set in enumerate(rank_sets):
        for call in rank_set.calls:
            facet = Facet(call.phase, call.kind, name_axis(call, recording.run.world_size))
            branch = nowhere if call.owner is None else root.at(call.owner)
            branch.own[index][facet] += count_traffic(call)
    nodes = [root.freeze("", "")] if recording.modules or root.is_used() else []
    if nowhere.is_used():
        nodes.append(nowhere.freeze(NO_MODULE, NO_MODULE))
    return tuple(nodes)


@final
class _Branch:
    """A mutable node, used while the tree is built."""

    def __init__(self, num_rank_sets: int) -> None:
        self.own = tuple(
            defaultdict[Facet, TrafficTotals](TrafficTotals) for _ in range(num_rank_sets)
        )
        self.types: dict[str, None] = {}
        self.parameters: list[Parameter] = []
        self.children: dict[str, _Branch] = {}

    def at(self, name: str) -> _Branch:
        branch = self
        for label in name.split(".", _MAX_DEPTH) if name else ():
            child = branch.children.get(label)
            if child is None:  # a branch of a thousand different ranks is slow to create
                child = branch.children[label] = _Branch(len(self.own))
            branch = child
        return branch

    def add_module(self, module: Module) -> None:
        self.types[module.type] = None
        self.parameters.extend(module.parameters)

    def is_used(self) -> bool:
        return bool(self.children) or any(self.own)

    def freeze(self, label: str, path: str) -> ModuleNode:
        children = tuple(
            child.freeze(name, f"{path}.{name}" if path else name)
            for name, child in self.children.items()
        )
        return ModuleNode(
            label=label,
            path=path,
            types=tuple(self.types),
            parameters=tuple(self.parameters),
            own=tuple(dict(traffic) for traffic in self.own),
            total=_add_children(self.own, children),
            children=children,
        )


def _add_children(
    own: tuple[defaultdict[Facet, TrafficTotals], ...], children: tuple[ModuleNode, ...]
) -> Traffic:
    totals = tuple(defaultdict(TrafficTotals, traffic) for traffic in own)
    for child in children:
        for total, traffic in zip(totals, child.total, strict=True):
            for facet, child_total in traffic.items():
                total[facet] += child_total
    return tuple(dict(total) for total in totals)


def fold_repeated_layers(node: ModuleNode) -> ModuleNode:
    """Fold runs of adjacent numbered children that differ only in their number."""
    return _fold(node, number_contents(node))


def _fold(node: ModuleNode, numbers: dict[int, int]) -> ModuleNode:
    children: list[ModuleNode] = []
    for run in find_runs(node, numbers):
        last = run[-1].label if len(run) > 1 else ""
        first = replace(run[0], repeat=len(run), last_label=last)
        children.append(_fold(first, numbers))
    return replace(node, children=tuple(children))


def find_runs(node: ModuleNode, numbers: dict[int, int]) -> Iterator[list[ModuleNode]]:
    """Yield runs of adjacent children that would be folded into one."""

    def group_key(child: ModuleNode) -> tuple[str, int]:
        return "" if is_layer_number(child.label) else child.label, numbers[id(child)]

    for _, run in groupby(node.children, key=group_key):
        yield list(run)


def number_contents(
    root: ModuleNode, *, also: Callable[[ModuleNode], Hashable] = lambda _: None
) -> dict[int, int]:
    """Number nodes by content: nodes that differ only in their label have the same number.

    The result is by id() of a node. `also` returns what else has to be equal. Children are compared
    by their numbers, so that each node is visited once, at any depth.
    """
    numbers: dict[int, int] = {}
    known: dict[Hashable, int] = {}

    def visit(node: ModuleNode) -> int:
        children = tuple((child.label, visit(child)) for child in node.children)
        own = tuple(frozenset(traffic.items()) for traffic in node.own)
        facts = tuple(map(facts_of, node.parameters))
        content = (node.types, facts, own, children, also(node))
        return numbers.setdefault(id(node), known.setdefault(content, len(known)))

    visit(root)
    return numbers


def facts_of(parameter: Parameter) -> Hashable:
    """Return what has to be equal for parameters of identical layers: all but full names."""
    return (
        parameter.name,
        parameter.shape,
        parameter.local_shape,
        parameter.dtype,
        parameter.placements,
        parameter.axes,
        parameter.fsdp_group is None,
    )
