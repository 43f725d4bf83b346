"""Any part of a fragment, as a fragment of its own that is given what the whole gave it.

A part may leave out an op that wrote to memory which other ops of it read, or the op that made two
values share memory. So nothing is concluded from names: whatever a kept op would not find in the
state in which it found it in the whole becomes an input, with the values that it had right then.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import final

from torch import fx

from shardscope.compile.diagnose.cutting.assembly import Assembly
from shardscope.compile.diagnose.cutting.plan import Plan
from shardscope.compile.diagnose.cutting.tape import Seen, Tape
from shardscope.compile.diagnose.cutting.units import Switches, is_call, serves_level
from shardscope.compile.diagnose.fragment import Fragment

__all__ = ["Recorded"]

_MAX_BYTES = 4 << 30


@final
class Recorded:
    """A fragment that was run eagerly once, and that parts can be cut out of."""

    def __init__(self, fragment: Fragment, *, seed: int = 0, max_bytes: int = _MAX_BYTES) -> None:
        self._fragment = fragment
        self._tape = Tape(fragment, seed=seed, max_bytes=max_bytes)
        self._switches = Switches(step.nodes for step in self._tape.steps)
        self._leaders = dict[fx.Node, fx.Node]()
        for step in self._tape.steps:
            self._leaders.update(dict.fromkeys(step.nodes, self._leader(step.nodes)))

    def _leader(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """The op that stands for a step: taking a tuple apart belongs to what made the tuple."""
        if len(nodes) > 1:
            written = [node for node in nodes if not serves_level(node)]
            return (written or list(nodes))[0]
        (node,) = nodes
        source = node.args[0] if node.target is operator.getitem else None
        is_part = isinstance(source, fx.Node) and isinstance(
            self._tape.made[source], tuple | list | dict
        )
        return self._leaders.get(source, node) if is_part else node  # type: ignore[arg-type]

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The names of what can be kept or left out, in the order of the program."""
        leaders = dict.fromkeys(self._leaders.values())
        return tuple(node.name for node in leaders if node not in self._switches)

    @cached_property
    def reads(self) -> Mapping[str, tuple[str, ...]]:
        """Of which ops each op reads the results."""
        found: dict[str, dict[str, None]] = {name: {} for name in self.ops}
        for node, leader in self._leaders.items():
            sources = [self._leaders[one] for one in node.all_input_nodes if one in self._leaders]
            names = [source.name for source in sources if source is not leader]
            found.get(leader.name, {}).update(dict.fromkeys(names))
        return {name: tuple(sources) for name, sources in found.items()}

    def cut(self, keep: Collection[str], *, is_exposed: bool = False) -> Fragment:
        """The fragment that has exactly these ops, and the switches that they need.

        Its outputs are what ops outside of it read, or every tensor that it makes.
        """
        names = set(keep)
        kept = {
            node
            for node, leader in self._leaders.items()
            if leader.name in names and node not in self._switches
        }
        nodes = self._fragment.graph.graph.nodes
        has_grad = self._fragment.with_gradients
        kept |= self._switches.needed_by(nodes, frozenset(kept), has_grad=has_grad)
        plan = Plan(self._tape, frozenset(kept))
        return Assembly(self._fragment, self._tape, plan, is_exposed=is_exposed).build()

    def expose(self) -> Fragment:
        """The same fragment with every tensor that is made on the way as an output, after its own.

        It shows what a tail hides that makes all of its inputs alike.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._fragment.graph.graph.nodes:
            if node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                continue
            own_nodes = set(node.all_input_nodes)
            shown = [one for one in copies if self._is_tensor(one) and one not in own_nodes]
            own = fx.node.map_arg(node.args[0], copies.__getitem__)
            graph.output((*own, *(copies[one] for one in shown)))
        module = fx.GraphModule(self._fragment.graph, graph)
        return replace(self._fragment, graph=module)

    def _is_tensor(self, node: fx.Node) -> bool:
        return is_call(node) and isinstance(self._tape.made.get(node), Seen)
