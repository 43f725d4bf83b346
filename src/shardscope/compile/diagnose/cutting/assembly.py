"""A part of a fragment put together as planned: its graph, its inputs, its outputs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

from torch import Tensor, fx

from shardscope.compile.diagnose.cutting.eager_run import copy_state
from shardscope.compile.diagnose.cutting.plan import Plan, Slot, seen_in
from shardscope.compile.diagnose.cutting.tape import Seen, Tape
from shardscope.compile.diagnose.cutting.values import map_leaves
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.leaves import is_computed, make_computed

__all__ = ["Assembly"]

_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack")


@final
class Assembly:
    """The graph of a part, under construction. Nodes keep their names."""

    def __init__(
        self, fragment: Fragment, tape: Tape, plan: Plan, *, is_exposed: bool = False
    ) -> None:
        self._fragment = fragment
        self._tape = tape
        self._plan = plan
        self._is_exposed = is_exposed
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._inputs: dict[Slot, fx.Node] = {}

    def build(self) -> Fragment:
        """The fragment."""
        self._add_inputs()
        nodes = list(self._fragment.graph.graph.nodes)
        for node in nodes:
            if node in self._plan.attributes or node in self._plan.kept:
                sources = self._plan.sources.get(node, {})
                self._copies[node] = self._graph.node_copy(node, self._reader(sources))
        self._graph.output(tuple(self._outputs()))
        used = [*self._plan.attributes, *self._plan.kept]
        state = copy_state(self._fragment.graph, used)
        module = fx.GraphModule(state, self._graph)
        return replace(self._fragment, graph=module, inputs=tuple(self._values()))

    def _reader(self, sources: dict[fx.Node, Any]) -> Any:
        def read(node: fx.Node) -> Any:
            source = sources.get(node, node)
            if isinstance(source, fx.Node):
                return self._copies[source]
            return map_leaves(source, Slot, self._inputs.__getitem__)

        return read

    def _add_inputs(self) -> None:
        # Nodes that are kept have the first claim on their names.
        taken = {node.name for node in self._fragment.graph.graph.nodes}
        free = taken - {node.name for node in self._plan.kept}
        for slot in self._plan.slots:
            name = slot.node.name
            if not slot.is_whole or name not in free:
                name = _take_name(f"{name}_given", taken)
            free.discard(name)
            copy = self._graph.create_node("placeholder", name, name=name)
            copy.meta = {
                key: value
                for key, value in slot.node.meta.items()
                if slot.is_whole or key in _ORIGIN
            }
            self._inputs[slot] = copy
        for slot, copy in self._inputs.items():
            # What a program writes to and wants gradients of was made by an op, so it is here.
            if slot.is_written and self._has_gradient(slot):
                name = _take_name(f"{copy.name}_written", taken)
                clone = self._graph.create_node("call_method", "clone", (copy,), name=name)
                self._inputs[slot] = clone

    def _values(self) -> Iterator[Any]:
        wants = [slot.want for slot in self._plan.slots if slot.want is not None]
        copies = self._tape.copy_values(wants)
        computed = self._find_computed()
        for slot in self._plan.slots:
            if slot.want is None:
                yield self._tape.made[slot.node]
                continue
            leaf = copies[slot.want].requires_grad_(self._has_gradient(slot))
            yield make_computed(leaf) if leaf.requires_grad and slot.node in computed else leaf

    def _find_computed(self) -> set[fx.Node]:
        """The placeholders of what the program was given that autograd had computed."""
        placeholders = self._fragment.graph.graph.find_nodes(op="placeholder")
        given = zip(placeholders, self._fragment.inputs, strict=True)
        return {node for node, one in given if isinstance(one, Tensor) and is_computed(one)}

    def _has_gradient(self, slot: Slot) -> bool:
        return slot.requires_grad and self._fragment.with_gradients

    def _outputs(self) -> Iterator[fx.Node]:
        """What others read; else what is written to; else whatever comes last."""
        shown = [part for node in self._copies for part in self._shown_parts(node)]
        written = [self._inputs[slot] for slot in self._plan.slots if slot.is_written]
        last = [copy for node, copy in self._copies.items() if node in self._plan.sources]
        yield from shown or written or last[-1:]

    def _shown_parts(self, node: fx.Node) -> Iterator[fx.Node]:
        value = self._tape.made.get(node)
        is_read = any(user not in self._plan.kept for user in node.users)
        if node not in self._plan.sources:
            return
        if isinstance(value, Seen) and (is_read or self._is_exposed):
            yield self._copies[node]
        elif isinstance(value, tuple | list) and is_read:
            yield from self._take_apart(self._copies[node], value)

    def _take_apart(self, copy: fx.Node, value: Any) -> Iterator[fx.Node]:
        for index, part in enumerate(value):
            if next(seen_in(part), None) is not None:
                taken = self._graph.call_function(operator.getitem, (copy, index))
                yield from [taken] if isinstance(part, Seen) else self._take_apart(taken, part)


def _take_name(name: str, taken: set[str]) -> str:
    names = (f"{name}_{number}" for number in itertools.count(1))
    free = next(one for one in names if one not in taken)
    taken.add(free)
    return free
