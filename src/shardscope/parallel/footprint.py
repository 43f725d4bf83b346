"""What a rank's program makes in memory, by which of its storages are alive when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, fx

from shardscope._torch.functional_collectives import WAIT
from shardscope._torch.programs import expression_of, flatten
from shardscope.parallel.costs import Hints, size_hint

__all__ = ["Footprint", "measure"]


@final
@dataclass(frozen=True)
class Footprint:
    """Bytes of storages that the program makes; what it is given is not among them."""

    kept_bytes: int  # of the results that are counted apart
    intermediate_bytes: int  # the most of all else at once
    peak_bytes: int  # the most of all at once
    peak_node: fx.Node | None


def measure(graph: fx.Graph, hints: Hints, *, kept: Iterable[Any] = ()) -> Footprint:
    """Walk through a graph whose nodes know their values.

    `kept` are nodes to count apart, such as gradients. What is returned is held to the end, all
    else as long as a later node uses it.
    """
    walk = _Walk(hints)
    for position, node in enumerate(graph.nodes):
        walk.visit(position, node)
    for node in kept:
        for one in walk.held.get(node, ()):
            one.is_kept = True
    return _add_up(walk.storages, list(graph.nodes))


@final
@dataclass
class _Storage:
    """What one node made, and others may look at."""

    num_bytes: int
    born: int
    last_use: int
    is_kept: bool = False
    thing: Any = None  # kept alive, so that its id stays its own


@final
@dataclass
class _Walk:
    hints: Hints
    storages: list[_Storage] = field(default_factory=list)
    held: dict[Any, list[_Storage]] = field(default_factory=dict)  # by node
    _known: dict[int, _Storage | None] = field(default_factory=dict)  # None: given to the program

    def visit(self, position: int, node: fx.Node) -> None:
        for used in node.all_input_nodes:
            for one in self.held[used]:
                one.last_use = position
        if node.target is WAIT:  # torch's tensors without data are new ones, real ones are not
            self.held[node] = self.held[node.all_input_nodes[0]]
            self._know_as(node, self.held[node])
            return
        is_given = node.op in ("placeholder", "get_attr")
        self.held[node] = list(self._find(node, position, is_given=is_given))

    def _find(self, node: fx.Node, position: int, *, is_given: bool) -> Iterator[_Storage]:
        for tensor in _tensors(node):
            thing = tensor.untyped_storage()
            if id(thing) not in self._known:
                num_bytes = size_hint(expression_of(thing.nbytes()), self.hints)
                made = _Storage(num_bytes, position, position, thing=thing)
                self._known[id(thing)] = None if is_given else made
                self.storages += [] if is_given else [made]
            found = self._known[id(thing)]
            if found is not None:
                yield found

    def _know_as(self, node: fx.Node, held: list[_Storage]) -> None:
        for tensor, one in zip(_tensors(node), held, strict=False):
            self._known[id(tensor.untyped_storage())] = one


def _tensors(node: fx.Node) -> list[Tensor]:
    leaves = flatten(node.meta.get("val"))[0]
    return [one for one in leaves if isinstance(one, Tensor)]


def _add_up(storages: list[_Storage], nodes: list[fx.Node]) -> Footprint:
    changes = [[0, 0] for _ in range(len(nodes) + 1)]  # intermediate and kept bytes
    for one in storages:
        changes[one.born][one.is_kept] += one.num_bytes
        changes[one.last_use + 1][one.is_kept] -= one.num_bytes
    now, kept, most, peak, at = 0, 0, 0, 0, 0
    for position, (of_others, of_kept) in enumerate(changes):
        now, kept = now + of_others, kept + of_kept
        most = max(most, now)
        if now + kept > peak:
            peak, at = now + kept, position
    whole = sum(one.num_bytes for one in storages if one.is_kept)
    return Footprint(whole, most, peak, nodes[at] if peak else None)
