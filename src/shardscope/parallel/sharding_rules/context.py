"""The input of a sharding rule (an op call) and of a lowering: local arguments, shard specs and a
graph builder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import fx

from shardscope._torch.tree import leaves
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.plan.placements import Placement, Size


@final
@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor of the call, before it is sharded along the axis in question."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    # The full tensor's dims in the single device's memory order, slowest first, for ops that draw
    # random numbers in that order. Strategies do not depend on it. None: in the order of the dims.
    memory_order: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def num_dims(self) -> int:
        return len(self.shape)


@final
@dataclass(frozen=True, eq=False)
class OpCall:
    """An op with its arguments by the schema's names, with defaults filled in.

    Tensors are TensorSpec (also inside lists), symbolic sizes are sympy expressions, everything
    else is as written.
    """

    op: Any  # torch._ops.OpOverload
    arguments: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]  # the tensors it returns, in order; lists are flattened
    num_ranks: int  # of the axis
    input_placements: tuple[Placement, ...]  # current placements, in `inputs`' order
    is_training: bool = False  # gradients will be computed

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensor arguments in the schema's order; lists are flattened, None is skipped."""
        return tuple(tensors_in(self.arguments.values()))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@final
@dataclass(frozen=True)
class Strategy:
    """One choice of placements with which the op runs on each rank's local tensors, without
    communication.

    `is_permutation_invariant`: the op computes the same whichever indices of the sharded dims a
    rank holds, as long as all sharded tensors hold the same ones. Then the strategy also applies to
    shards in blocks (Shard.outer, Shard.segments). False for ops that depend on an index's position
    in the dim, such as views.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    is_permutation_invariant: bool = True


def tensors_in(value: Iterable[Any]) -> Iterator[TensorSpec]:
    """Every tensor in nested lists, in order."""
    return (leaf for leaf in leaves(list(value)) if isinstance(leaf, TensorSpec))


LocalSize = int | fx.Node
"""A size in one rank's program: a number, or the node that computes it."""


class GraphBuilder(Protocol):
    """Writes nodes into one rank's program."""

    def write(self, op: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Call `op` in the program; the node's value is what it returns."""

    def item(self, value: fx.Node, index: int) -> fx.Node:
        """The output at `index` of a node that returns several."""

    def size(self, value: Any) -> LocalSize:
        """A size (number or sympy expression) as the program can use it."""


@final
@dataclass(frozen=True, eq=False)
class LoweringContext:
    """One op call on one rank. `arguments` are by the schema's names; tensors are nodes of local
    tensors.
    """

    call: OpCall  # the call on the full tensors
    arguments: Mapping[str, Any]
    inputs: tuple[ShardSpec, ...]  # of its tensor arguments, in `call.inputs`' order
    outputs: tuple[ShardSpec, ...]
    coordinate: MeshCoordinate
    builder: GraphBuilder

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def output_shape(self, index: int = 0) -> list[LocalSize]:
        """The local shape of the output at `index`."""
        return [
            self.builder.size(size) for size in self.outputs[index].local_shape(self.coordinate)
        ]

    def input_spec(self, name: str) -> ShardSpec:
        """The shard spec of the tensor argument of that name (not of a list of tensors)."""
        spec = self.call[name]
        position = next(i for i, tensor in enumerate(self.call.inputs) if tensor is spec)
        return self.inputs[position]

    def repeat(self, /, **changes: Any) -> fx.Node:
        """The same op on the local arguments, some of them replaced by `changes`."""
        return self.builder.write(self.call.op, **{**self.arguments, **changes})
