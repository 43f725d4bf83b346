"""Modules in the order of a walk from the root: where each stands, and what lies below it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import final

from shardscope.record import Recording
from shardscope.report.fold import ModuleNode, build_tree, find_runs, number_contents
from shardscope.report.page.index import NOWHERE, Index
from shardscope.report.page.views.subjects import Subjects
from shardscope.report.traffic import RankClass

__all__ = ["ModuleTree"]


@final
class ModuleTree:
    """Nodes by their positions; a node's parent always stands before it."""

    def __init__(self, recording: Recording, classes: tuple[RankClass, ...]) -> None:
        self.nodes: list[ModuleNode] = []
        self.parents: list[int] = []
        self._positions: dict[int, int] = {}  # by id() of a node, all of which `nodes` keeps
        self._roots = build_tree(recording, classes)
        for root in self._roots:
            self._walk(root, NOWHERE)
        self.index = Index(self._name_all(recording), nowhere=self._find_nowhere())
        model = next((module.type for module in recording.modules if not module.name), "")
        self.subjects = Subjects((node.path for node in self.nodes), self.index, model=model)

    def _walk(self, node: ModuleNode, parent: int) -> None:
        position = self._positions[id(node)] = len(self.nodes)
        self.nodes.append(node)
        self.parents.append(parent)
        for child in node.children:
            self._walk(child, position)

    def _find_nowhere(self) -> int:
        """Where that stands which belongs to no module; it comes last, and the root has no path."""
        has_one = bool(self._roots) and bool(self._roots[-1].path)
        return self._positions[id(self._roots[-1])] if has_one else NOWHERE

    def _name_all(self, recording: Recording) -> Iterator[tuple[str, int]]:
        end = self._find_nowhere()
        positions: dict[str, int] = {}
        for position, node in enumerate(self.nodes if end == NOWHERE else self.nodes[:end]):
            positions.setdefault(node.path, position)
        yield from positions.items()
        for module in recording.modules:
            if module.name in positions:
                yield from ((alias, positions[module.name]) for alias in module.aliases)

    def find_ends(self) -> list[int]:
        """For each node the position after the last one below it."""
        ends = list(range(1, len(self.nodes) + 1))
        for position, parent in self._from_below():
            ends[parent] = max(ends[parent], ends[position])
        return ends

    def add_up(self, own: Mapping[int, int]) -> list[int]:
        """For each node what it and all below it have, given what each has itself."""
        totals = [own.get(position, 0) for position in range(len(self.nodes))]
        for position, parent in self._from_below():
            totals[parent] += totals[position]
        return totals

    def _from_below(self) -> Iterator[tuple[int, int]]:
        """Nodes that have a parent, with it; children before their parents."""
        for position in range(len(self.nodes) - 1, -1, -1):
            if self.parents[position] != NOWHERE:
                yield position, self.parents[position]

    def find_alike(self, also: Callable[[int], Hashable]) -> tuple[list[int], list[int]]:
        """For each node the first of those it folds into one with, and how many that first has.

        `also` tells what else, of the node at a position, has to be the same.
        """
        alike, repeat = list(range(len(self.nodes))), [1] * len(self.nodes)
        numbers: dict[int, int] = {}
        for root in self._roots:
            numbers |= number_contents(root, also=lambda node: also(self._positions[id(node)]))
        for node in self.nodes:
            for run in find_runs(node, numbers):
                first = self._positions[id(run[0])]
                repeat[first] = len(run)
                for child in run:
                    alike[self._positions[id(child)]] = first
        return alike, repeat
