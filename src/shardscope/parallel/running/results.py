"""What a rank's program returns: outputs as the model nests them, new values of what it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from shardscope._torch.programs import unflatten
from shardscope.parallel.flow import Flow

__all__ = ["Results"]


@final
class Results:
    """Puts new values where they belong, and outputs into their nest."""

    def __init__(self, source: ExportedProgram, flow: Flow, graph: fx.Graph) -> None:
        roles = [role for _, role in flow.outputs]
        state = [role.name for _, role in flow.inputs if role.kind != "input"]
        inputs = [role.name for _, role in flow.inputs if role.kind == "input"]
        self._outputs = [i for i, role in enumerate(roles) if role.kind == "output"]
        self._to_state = [
            (i, state.index(role.name)) for i, role in enumerate(roles) if role.kind == "mutation"
        ]
        self._to_inputs = [
            (i, inputs.index(role.name))
            for i, role in enumerate(roles)
            if role.kind == "input mutation"
        ]
        changes = bool(self._to_state or self._to_inputs)
        self._shared = _shared_outputs(graph, self._outputs) if changes else []
        self._tree = source.module_call_graph[0].signature.out_spec  # type: ignore[union-attr]
        shape = unflatten(list(range(len(self._outputs))), self._tree)
        self._is_one = shape == 0 and type(shape) is int
        self._is_plain = type(shape) is tuple and shape == tuple(range(len(self._outputs)))

    def give(self, results: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """What the model returns, after what it changes has changed."""
        # A result that is what an input was must not change with the input.
        copies = {i: results[i].clone() for i in self._shared}
        self.write_back(results, state, inputs)
        if self._is_one and not copies:
            return results[self._outputs[0]]
        outputs = [copies.get(i, results[i]) for i in self._outputs]
        return tuple(outputs) if self._is_plain else unflatten(outputs, self._tree)

    def write_back(
        self, results: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        """Give buffers and inputs the values that the program has for them."""
        for index, at in self._to_state:
            state[at].copy_(results[index])
        for index, at in self._to_inputs:
            inputs[at].copy_(results[index])


def _shared_outputs(graph: fx.Graph, outputs: Sequence[int]) -> list[int]:
    """The outputs that lie in the memory of something that the program takes."""
    taken = [_storage(node) for node in graph.nodes if node.op == "placeholder"]
    (last,) = graph.find_nodes(op="output")
    results = last.args[0]
    return [
        i
        for i in outputs
        if isinstance(results[i], fx.Node)
        and isinstance(results[i].meta.get("val"), Tensor)
        and any(one is _storage(results[i]) for one in taken)
    ]


def _storage(node: fx.Node) -> torch.UntypedStorage | None:
    value = node.meta.get("val")
    return value.untyped_storage() if isinstance(value, Tensor) else None
