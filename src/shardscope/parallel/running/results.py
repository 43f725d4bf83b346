"""What a rank's program returns: outputs as the model nests them, new values of what it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch.export import ExportedProgram

from shardscope._torch.programs import unflatten
from shardscope.parallel.flow import Flow

__all__ = ["Results"]


@final
class Results:
    """Puts new values where they belong, and outputs into their nest."""

    def __init__(self, source: ExportedProgram, flow: Flow) -> None:
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
        self._changes = bool(self._to_state or self._to_inputs)
        self._tree = source.module_call_graph[0].signature.out_spec
        shape = unflatten(list(range(len(self._outputs))), self._tree)
        self._is_one = shape == 0 and type(shape) is int
        self._is_plain = type(shape) is tuple and shape == tuple(range(len(self._outputs)))

    def __deepcopy__(self, memo: Any) -> Results:
        """Nothing of it changes; modules are copied with it."""
        return self

    def give(self, results: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """What the model returns, after what it changes has changed."""
        if self._changes:
            self.write_back(results, state, inputs)
        if self._is_one:
            return results[self._outputs[0]]
        outputs = [results[i] for i in self._outputs]
        return tuple(outputs) if self._is_plain else unflatten(outputs, self._tree)

    def write_back(
        self, results: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        """Give buffers and inputs the values that the program has for them."""
        for index, at in self._to_state:
            state[at].copy_(results[index])
        for index, at in self._to_inputs:
            inputs[at].copy_(results[index])
