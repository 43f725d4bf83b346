"""Which nodes of a graph are ops of their own, which belong to others, and which switch modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

from torch import fx

from shardscope._torch.graph_nodes import SET_GRAD_ENABLED
from shardscope._torch.graph_switches import (
    EXITS,
    SETTERS,
    closes_level,
    is_level_machinery,
    opens_level,
    unwraps,
)

__all__ = ["Switches", "is_call", "serves_level", "split_into_steps"]

_ENTERS = frozenset(EXITS.values())


def is_call(node: fx.Node) -> bool:
    """Whether the node runs something."""
    return node.op in ("call_function", "call_method", "call_module")


def split_into_steps(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    """The calls of a graph. Those inside of one vmap or grad only make sense together."""
    calls = [node for node in graph.nodes if is_call(node)]
    places = {node: place for place, node in enumerate(calls)}
    steps: list[tuple[fx.Node, ...]] = []
    place = 0
    while place < len(calls):
        end = _find_end(calls, place, places)
        steps.append(tuple(calls[place:end]))
        place = end
    return steps


def _find_end(calls: list[fx.Node], start: int, places: dict[fx.Node, int]) -> int:
    """Where the step ends that begins at a place."""
    depth, end, last = 0, start, start
    while end < len(calls):
        node = calls[end]
        depth += opens_level(node.target) - closes_level(node.target)
        # Nothing but what serves a level comes before it opens: it loads what that needs.
        is_inside = depth > 0 or (_prepares_level(node) and last <= end)
        if not unwraps(node.target) and (is_inside or end < last):
            # What is of a level's own kind may be read after it, and has to be read in this step.
            last = max([last, *(places[user] for user in node.users if user in places)])
        end += 1
        if not is_inside and end > last:
            break
    return end


def serves_level(node: fx.Node) -> bool:
    """Whether nobody wrote the call: vmap, grad or jvp needs it."""
    return is_level_machinery(node.target) or node.target in SETTERS


def _prepares_level(node: fx.Node) -> bool:
    return is_level_machinery(node.target) and not node.users and not closes_level(node.target)


@final
class Switches:
    """The calls that turn gradients, autocast and the like on and off."""

    def __init__(self, steps: Iterable[tuple[fx.Node, ...]]) -> None:
        self.nodes: set[fx.Node] = set()
        # Backwards, so that what only serves a switch is seen after it.
        for step in reversed(list(steps)):
            if len(step) == 1 and self._is_switch(step[0]):
                self.nodes.add(step[0])

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.nodes

    def _is_switch(self, node: fx.Node) -> bool:
        serves = bool(node.users) and all(user in self.nodes for user in node.users)
        return node.target in SETTERS or node.target in EXITS or node.target in _ENTERS or serves

    def needed_by(
        self, nodes: Iterable[fx.Node], kept: frozenset[fx.Node], *, has_grad: bool
    ) -> set[fx.Node]:
        """Those without which a kept node would run in another mode than it did."""
        chosen: set[fx.Node] = set()
        waiting: list[fx.Node] = []
        states: dict[str, Any] = {SETTERS[SET_GRAD_ENABLED]: (SET_GRAD_ENABLED, (has_grad,))}
        for node in nodes:
            if node in self.nodes:
                waiting.append(node)
            elif node in kept:
                chosen |= _settle(waiting, states)
                waiting = []
        return chosen | _settle(waiting, states)


def _settle(waiting: list[fx.Node], states: dict[str, Any]) -> set[fx.Node]:
    """What is left of switches between which nothing runs, with whatever computes their inputs."""
    undone = {node.args[0] for node in waiting if node.target in EXITS}
    left = {
        node
        for node in waiting
        if (node.target in _ENTERS and node not in undone)
        or (node.target in EXITS and node.args[0] not in waiting)
    }
    left |= set(_settle_setters(waiting, states))
    for node in reversed(waiting):
        if not left.isdisjoint(node.users) and node.target not in _ENTERS:
            left.add(node)
    return left


def _settle_setters(waiting: list[fx.Node], states: dict[str, Any]) -> Iterator[fx.Node]:
    for kind in sorted(set(SETTERS.values())):
        setters = [node for node in waiting if SETTERS.get(_target(node)) == kind]
        # What is set and set back leaves what was there before, known or not.
        if not setters or (kind not in states and len(setters) % 2 == 0):
            continue
        state = (setters[-1].target, setters[-1].args)
        if states.get(kind) != state:
            states[kind] = state
            yield setters[-1]


def _target(node: fx.Node) -> Any:
    return node.target
