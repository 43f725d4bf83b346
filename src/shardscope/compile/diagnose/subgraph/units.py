"""Divides the nodes of a graph into steps that must stay together, and finds mode switches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

from torch import fx

from shardscope._torch.graph import (
    EXITS,
    SET_GRAD_ENABLED,
    SETTERS,
    closes_level,
    is_level_machinery,
    opens_level,
    unwraps,
)

_ENTERS = frozenset(EXITS.values())


def is_call(node: fx.Node) -> bool:
    """Whether the node calls a function, method or module."""
    return node.op in ("call_function", "call_method", "call_module")


def split_into_steps(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    """The calls of a graph as steps; all calls inside a vmap or grad form one step."""
    calls = [node for node in graph.nodes if is_call(node)]
    positions = {node: position for position, node in enumerate(calls)}
    steps: list[tuple[fx.Node, ...]] = []
    position = 0
    while position < len(calls):
        end = _find_end(calls, position, positions)
        steps.append(tuple(calls[position:end]))
        position = end
    return steps


def _find_end(calls: list[fx.Node], start: int, positions: dict[fx.Node, int]) -> int:
    """The end of the step that begins at `start`."""
    depth, end, last = 0, start, start
    while end < len(calls):
        node = calls[end]
        depth += opens_level(node.target) - closes_level(node.target)
        # Before a level opens, only calls that prepare it belong to the step.
        is_inside = depth > 0 or (_prepares_level(node) and last <= end)
        if not unwraps(node.target) and (is_inside or end < last):
            # Wrapped values of a level may be read after it, and must be read in this step.
            last = max([last, *(positions[user] for user in node.users if user in positions)])
        end += 1
        if not is_inside and end > last:
            break
    return end


def serves_level(node: fx.Node) -> bool:
    """Whether the call is part of vmap, grad or jvp, and not an op that the user wrote."""
    return is_level_machinery(node.target) or node.target in SETTERS


def _prepares_level(node: fx.Node) -> bool:
    return is_level_machinery(node.target) and not node.users and not closes_level(node.target)


@final
class Switches:
    """The calls that switch gradients, autocast and other modes on and off."""

    def __init__(self, steps: Iterable[tuple[fx.Node, ...]]) -> None:
        self.nodes: set[fx.Node] = set()
        # Backwards, so that calls that only serve a switch come after it.
        for step in reversed(list(steps)):
            if len(step) == 1 and self._is_switch(step[0]):
                self.nodes.add(step[0])

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.nodes

    def _is_switch(self, node: fx.Node) -> bool:
        serves = bool(node.users) and all(user in self.nodes for user in node.users)
        return node.target in SETTERS or node.target in EXITS or node.target in _ENTERS or serves

    def needed_by(
        self, nodes: Iterable[fx.Node], kept_nodes: frozenset[fx.Node], *, has_grad: bool
    ) -> set[fx.Node]:
        """The switches that the kept nodes need to run in the same mode as before."""
        needed: set[fx.Node] = set()
        waiting: list[fx.Node] = []
        states: dict[str, Any] = {SETTERS[SET_GRAD_ENABLED]: (SET_GRAD_ENABLED, (has_grad,))}
        for node in nodes:
            if node in self.nodes:
                waiting.append(node)
            elif node in kept_nodes:
                needed |= _reduce_switches(waiting, states)
                waiting = []
        return needed | _reduce_switches(waiting, states)


def _reduce_switches(waiting: list[fx.Node], states: dict[str, Any]) -> set[fx.Node]:
    """The switches with an effect among those between two ops, and the nodes that they read."""
    undone = {node.args[0] for node in waiting if node.target in EXITS}
    left = {
        node
        for node in waiting
        if (node.target in _ENTERS and node not in undone)
        or (node.target in EXITS and node.args[0] not in waiting)
    }
    left |= set(_reduce_setters(waiting, states))
    for node in reversed(waiting):
        if not left.isdisjoint(node.users) and node.target not in _ENTERS:
            left.add(node)
    return left


def _reduce_setters(waiting: list[fx.Node], states: dict[str, Any]) -> Iterator[fx.Node]:
    for kind in sorted(set(SETTERS.values())):
        setters = [node for node in waiting if SETTERS.get(_target(node)) == kind]
        # An even number of setters restores the previous state, known or not.
        if not setters or (kind not in states and len(setters) % 2 == 0):
            continue
        state = (setters[-1].target, setters[-1].args)
        if states.get(kind) != state:
            states[kind] = state
            yield setters[-1]


def _target(node: fx.Node) -> Any:
    return node.target
