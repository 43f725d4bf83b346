"""The module tree with what each module said, and repeated layers folded into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from itertools import groupby
from typing import final

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record import Module, Parameter, Recording
from shardscope.report.traffic import Facet, RankClass, Tally, name_axis, tally
from shardscope.report.units import Spread, spread

__all__ = [
    "NO_MODULE",
    "ModuleNode",
    "Traffic",
    "build_tree",
    "facts_of",
    "find_runs",
    "fold_repeated_layers",
    "number_contents",
]

_MAX_DEPTH = 64  # names nested deeper stay in one piece, so that recursion is bounded
NO_MODULE = "outside any module"

# Per rank class, in the classes' order.
Traffic = tuple[dict[Facet, Tally], ...]


class ModuleNode(Struct, frozen=True, kw_only=True):
    """One module, or several adjacent ones that are alike (`repeat`), each with these figures."""

    label: str
    path: str
    types: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    own: Traffic
    total: Traffic  # with its children's
    children: tuple[ModuleNode, ...] = ()
    repeat: int = 1
    last_label: str = ""  # of a repeated node

    def count(self, **facets: str) -> Spread:
        """How many collectives a rank issued in it, of the phase, kind or axis asked for."""
        return self._spread("count", facets)

    def input_bytes(self) -> Spread:
        """Input bytes of a rank."""
        return self._spread("input_bytes", {})

    def wire_bytes(self) -> Spread:
        """What a rank sent."""
        return self._spread("wire_bytes", {})

    def own_tally(self) -> Tally:
        """What its busiest rank said for the module itself."""
        sums = (sum(traffic.values(), Tally()) for traffic in self.own)
        return max(sums, key=lambda one: (one.wire_bytes, one.count), default=Tally())

    def _spread(self, field: str, facets: dict[str, str]) -> Spread:
        return spread(
            sum(
                getattr(one, field)
                for facet, one in traffic.items()
                if all(getattr(facet, name) == value for name, value in facets.items())
            )
            for traffic in self.total
        )


def build_tree(recording: Recording, classes: tuple[RankClass, ...]) -> tuple[ModuleNode, ...]:
    """The root and, if anything was said there, a node for what belongs to no module."""
    root, nowhere = _Branch(len(classes)), _Branch(len(classes))
    for module in recording.modules:
        root.at(module.name).add_module(module)
    for index, one in enumerate(classes):
        for call in one.calls:
            facet = Facet(call.phase, call.kind, name_axis(call, recording.run.world_size))
            branch = nowhere if call.owner is None else root.at(call.owner)
            branch.own[index][facet] += tally(call)
    nodes = [root.freeze("", "")] if recording.modules or root.is_used() else []
    if nowhere.is_used():
        nodes.append(nowhere.freeze(NO_MODULE, NO_MODULE))
    return tuple(nodes)


@final
class _Branch:
    """A node while it grows."""

    def __init__(self, num_classes: int) -> None:
        self.own = tuple(defaultdict[Facet, Tally](Tally) for _ in range(num_classes))
        self.types: dict[str, None] = {}
        self.parameters: list[Parameter] = []
        self.children: dict[str, _Branch] = {}

    def at(self, name: str) -> _Branch:
        branch = self
        for label in name.split(".", _MAX_DEPTH) if name else ():
            branch = branch.children.setdefault(label, _Branch(len(self.own)))
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
    own: tuple[defaultdict[Facet, Tally], ...], children: tuple[ModuleNode, ...]
) -> Traffic:
    totals = tuple(defaultdict(Tally, traffic) for traffic in own)
    for child in children:
        for total, traffic in zip(totals, child.total, strict=True):
            for facet, one in traffic.items():
                total[facet] += one
    return tuple(dict(total) for total in totals)


def fold_repeated_layers(node: ModuleNode) -> ModuleNode:
    """Fold runs of adjacent numbered children that are alike but for their number."""
    return _fold(node, number_contents(node))


def _fold(node: ModuleNode, numbers: dict[int, int]) -> ModuleNode:
    children: list[ModuleNode] = []
    for alike in find_runs(node, numbers):
        last = alike[-1].label if len(alike) > 1 else ""
        first = replace(alike[0], repeat=len(alike), last_label=last)
        children.append(_fold(first, numbers))
    return replace(node, children=tuple(children))


def find_runs(node: ModuleNode, numbers: dict[int, int]) -> Iterator[list[ModuleNode]]:
    """The children, those that would fold into one together."""

    def likeness(child: ModuleNode) -> tuple[str, int]:
        is_numbered = child.label.isascii() and child.label.isdigit()
        return "" if is_numbered else child.label, numbers[id(child)]

    for _, run in groupby(node.children, key=likeness):
        yield list(run)


def number_contents(
    root: ModuleNode, *, also: Callable[[ModuleNode], Hashable] = lambda _: None
) -> dict[int, int]:
    """A number for each node, by its id(): the same for those that differ in their label alone.

    `also` is what else has to be equal. Children count by their numbers, so that each node is
    looked at once, however deep it lies.
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
    """What is equal for parameters of layers that are alike: all but full names."""
    return (
        parameter.name,
        parameter.shape,
        parameter.local_shape,
        parameter.dtype,
        parameter.placements,
        parameter.axes,
        parameter.fsdp_group is None,
    )
