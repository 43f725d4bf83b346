"""The list of ops that each module ran, with the placements of their DTensor inputs.

Ops repeat, layer by layer and step by step: equal entries are one object, so that a further op of
a kind already seen keeps nothing but a reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from torch.distributed.tensor import DTensor

from shardscope.comm.debug.position import Position

__all__ = ["Operation", "OperationLists"]

Operation = dict[str, Any]
"""name, input_shape, input_sharding, device_mesh, is_bw, is_activation_checkpointing."""


@final
class OperationLists:
    """`by_module` maps a module's name to torch's `{"operations_list": [...]}`."""

    def __init__(self) -> None:
        self.by_module: dict[str, dict[str, list[Operation]]] = {}
        self._known: dict[tuple[Any, ...], Operation] = {}

    def add(self, op: Any, args: Sequence[Any], module: str, position: Position) -> None:
        """Put an op on the list of `module`."""
        operation = self._operation(op, list(_dtensors(args)), position)
        lists = self.by_module.setdefault(module, {"operations_list": []})
        lists["operations_list"].append(operation)

    def _operation(self, op: Any, inputs: list[DTensor], position: Position) -> Operation:
        specs = tuple((tensor.shape, tensor.placements, tensor.device_mesh) for tensor in inputs)
        key = (op, specs, position.is_backward, position.is_recompute)
        try:
            known = self._known.get(key)
        except TypeError:  # symbolic shapes have no hash
            return _describe(op, inputs, position)
        if known is None:
            known = self._known[key] = _describe(op, inputs, position)
        return known


def _describe(op: Any, inputs: list[DTensor], position: Position) -> Operation:
    return {
        "name": op,
        "input_shape": [tensor.shape for tensor in inputs],
        "input_sharding": [tensor.placements for tensor in inputs],
        "device_mesh": str(inputs[-1].device_mesh) if inputs else "",
        "is_bw": position.is_backward,
        "is_activation_checkpointing": position.is_recompute,
    }


def _dtensors(args: Sequence[Any]) -> Iterator[DTensor]:
    for value in args:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _dtensors(value)
