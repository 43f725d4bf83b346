"""Which gradients the backward pass computes, and which of them are partial: the gradient of a
replicated value that a sharded op reads is each rank's term of a sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import final

import torch
from torch import Tensor

from shardscope._torch.dispatch import is_overload
from shardscope._torch.export import fake_mode_of, traced
from shardscope._torch.tree import pytree_flatten
from shardscope.parallel.ir.graph import (
    OpNode,
    Reshard,
    ShardingGraph,
    Strategy,
    Value,
    map_nest,
    values_in,
)
from shardscope.plan.placements import Replicate, Shard


@final
class GradReductions:
    """Where the gradients of replicated values must be reduced over ranks.

    An op node whose inputs and outputs are all replicated returns replicated gradients. One with
    a sharded input or output returns partial gradients, which must be reduced before they are
    added to the gradients of other uses.
    """

    def __init__(self, graph: ShardingGraph) -> None:
        self._use_kinds: dict[tuple[Value, int], set[bool]] = defaultdict(set)
        self._gathered = {
            (op_node.output, op_node.axis)
            for op_node in graph.op_nodes
            if isinstance(op_node, Reshard) and isinstance(op_node.source, Shard)
        }
        for op_node in graph.op_nodes:
            for value in op_node.inputs:
                for axis, placement in enumerate(value.placements):
                    if placement == Replicate():
                        self._use_kinds[value, axis].add(_is_sharded(op_node, axis))
        for item, _ in graph.outputs:
            for value in values_in(item):
                for axis in range(len(value.placements)):
                    self._use_kinds[value, axis].add(False)

    def has_partial_grad(self, value: Value, axis: int) -> bool:
        """Whether a gathered value is read by sharded ops only.

        The reshard that gathers it then reduce-scatters its gradient.
        """
        return (value, axis) in self._gathered and self._use_kinds[value, axis] == {True}

    def axes_to_reduce(self, op_node: OpNode | Reshard, position: int) -> tuple[int, ...]:
        """The axes along which an input is replicated and the op sharded: its gradient is partial.

        Without those along which the reshard that gathered it reduces the gradient.
        """
        value = op_node.inputs[position]
        if not value.has_gradient:
            return ()
        return tuple(
            axis
            for axis, placement in enumerate(value.placements)
            if placement == Replicate()
            and _is_sharded(op_node, axis)
            and not self.has_partial_grad(value, axis)
        )


def find_grad_reductions(graph: ShardingGraph) -> GradReductions:
    """The gradient reductions of a graph that is propagated along all axes."""
    return GradReductions(graph)


def _is_sharded(op_node: OpNode | Reshard, axis: int) -> bool:
    strategy: Strategy | None = op_node.strategies[axis]
    if strategy is None:  # a reshard, along its own axis or an earlier one
        return False
    return any(
        not isinstance(placement, Replicate) for placement in (*strategy.inputs, *strategy.outputs)
    )


@final
class Gradients:
    """The values between the trained parameters and the loss, through which gradients flow.

    Whether an op is differentiable is found by running it on fake tensors, once per kind of call.
    """

    def __init__(self, graph: ShardingGraph) -> None:
        self._mode = fake_mode_of([value.example for value, _ in graph.inputs if value.is_tensor])
        self._has_open_sizes = bool(graph.sizes.known)
        self._probed: dict[Hashable, tuple[bool, ...]] = {}
        self._trained = {
            value
            for value, role in graph.inputs
            if role.kind == "parameter" and value.example_tensor.requires_grad
        }
        self._dependents = self._find_dependents(graph)
        self._dependencies = self._find_dependencies(graph)

    def passes(self, op_node: OpNode | Reshard, position: int) -> bool:
        """Whether the backward pass computes the gradient of this input of the node."""
        return op_node.inputs[position] in self._dependents and self._is_needed(op_node, position)

    def _find_dependents(self, graph: ShardingGraph) -> set[Value]:
        """The values that depend on trained parameters."""
        dependent = set(self._trained)
        for op_node in graph.op_nodes:
            for position, value in enumerate(op_node.inputs):
                if value in dependent:
                    dependent.update(self._differentiable_outputs(op_node, position))
        return dependent

    def _find_dependencies(self, graph: ShardingGraph) -> set[Value]:
        """The values that the loss depends on."""
        losses = [item for item, role in graph.outputs if role.kind == "output"]
        self._dependencies = set(values_in(losses[0])) if losses else set()
        for op_node in reversed(graph.op_nodes):
            for position, value in enumerate(op_node.inputs):
                if value in self._dependents and self._is_needed(op_node, position):
                    self._dependencies.add(value)
        return self._dependencies

    def _is_needed(self, op_node: OpNode | Reshard, position: int) -> bool:
        return any(
            output in self._dependencies
            for output in self._differentiable_outputs(op_node, position)
        )

    def _differentiable_outputs(self, op_node: OpNode | Reshard, position: int) -> Iterator[Value]:
        """The outputs that are differentiable with respect to an input."""
        if not _is_float(op_node.inputs[position]):
            return iter(())
        outputs = [output for output in op_node.outputs if output.is_tensor]
        if isinstance(op_node, Reshard) or not is_overload(op_node.op):
            return (output for output in outputs if _is_float(output))
        passing = self._probe_op(op_node, position)
        return (output for output, passes in zip(outputs, passing, strict=True) if passes)

    def _probe_op(self, op_node: OpNode, position: int) -> tuple[bool, ...]:
        key = (
            op_node.op,
            position,
            tuple(value.dtype for value in op_node.inputs),
            len(op_node.outputs),
        )
        if key not in self._probed:
            # Outside of `traced`, an op may specialize sizes that the program leaves dynamic.
            with traced(self._mode, has_open_sizes=self._has_open_sizes), torch.enable_grad():
                self._probed[key] = _differentiate(op_node, position)
        return self._probed[key]


def _differentiate(op_node: OpNode, position: int) -> tuple[bool, ...]:
    """Run the op on fake tensors, of which one requires a gradient; True for outputs that do."""
    positions = iter(range(len(op_node.inputs)))

    def example(item: object) -> object:
        if not isinstance(item, Value) or not item.is_tensor:
            return item.example if isinstance(item, Value) else item
        leaf = item.example_tensor.detach()
        return leaf.requires_grad_() if next(positions) == position else leaf

    values = [value for value in op_node.outputs if value.is_tensor]
    try:
        outputs = op_node.op(**map_nest(op_node.arguments, example))
    except RuntimeError:  # torch reports it when the program is run
        return tuple(_is_float(value) for value in values)
    tensors = [output for output in pytree_flatten(outputs)[0] if isinstance(output, Tensor)]
    return tuple(tensor.requires_grad for tensor in tensors)


def _is_float(value: Value) -> bool:
    dtype = value.dtype
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)
