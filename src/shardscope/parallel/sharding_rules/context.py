"""What sharding rules and lowerings are called with: an op call on the full tensors, and for
lowerings also the rank's local arguments and a builder of its program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import fx
from torch.fx.node import Argument

from shardscope._torch.dispatch import OpOverload
from shardscope._torch.tree import leaves
from shardscope.parallel.ir.graph import Op
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.plan.placements import Placement, Size


@final
@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor of an op call. The shape is that of a shard of the mesh axes
    before the one whose strategies are asked for.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    # The full tensor's dims in the single device's memory order, slowest first, for ops that draw
    # random numbers in that order. Strategies do not depend on it. None: in the order of the dims.
    memory_order: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def num_dims(self) -> int:
        return len(self.shape)

    def dims_except(self, *dims: int) -> list[int]:
        """The tensor's dims without these, which are counted from the front."""
        return [dim for dim in range(self.num_dims) if dim not in dims]


@final
@dataclass(frozen=True, eq=False)
class OpCall:
    """An op with its arguments by the schema's names, with defaults filled in, along one mesh axis.

    Tensors are TensorSpecs (also inside lists), symbolic sizes are sympy expressions, everything
    else is as the program has it.
    """

    op: OpOverload
    arguments: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]  # the tensors it returns, in order; lists are flattened
    num_ranks: int  # of the axis
    input_placements: tuple[Placement, ...]  # current placements, in `inputs`' order
    is_training: bool = False  # gradients will be computed

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensor arguments in the schema's order; lists are flattened, None is skipped."""
        return tuple(tensors_in(self.arguments.values()))

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """The tensor arguments by name, without lists of tensors and without None."""
        return {
            name: value for name, value in self.arguments.items() if isinstance(value, TensorSpec)
        }

    def __getitem__(self, name: str) -> Any:
        """The argument of that name in the op's schema."""
        return self.arguments[name]

    def tensor(self, name: str) -> TensorSpec:
        """The tensor argument `name`, which is not None."""
        spec = self.arguments[name]
        assert isinstance(spec, TensorSpec), f"{name} of {self.op} is {spec}"
        return spec

    def dim(self, name: str = "dim", *, of: str = "self") -> int:
        """The argument `name`, a dim of the tensor argument `of`, counted from the front."""
        return normalize_dim(self.arguments[name], self.tensor(of).num_dims)

    def position_of(self, name: str) -> int:
        """The position in `inputs` of the tensor argument `name`, or of the first in a list."""
        names_before = itertools.takewhile(lambda other_name: other_name != name, self.arguments)
        return sum(1 for _ in tensors_in([self.arguments[before] for before in names_before]))

    def placement_of(self, name: str) -> Placement:
        """The current placement of the tensor argument `name`."""
        return self.input_placements[self.position_of(name)]


def normalize_dim(dim: int, num_dims: int) -> int:
    """A dim counted from the front; `dim` may be negative."""
    return dim % max(num_dims, 1)


def tensors_in(value: object) -> Iterator[TensorSpec]:
    """Every tensor in nested lists, in order."""
    nested = value if isinstance(value, TensorSpec | list | tuple) else list(_iterate(value))
    return (leaf for leaf in leaves(nested) if isinstance(leaf, TensorSpec))


def _iterate(value: object) -> Iterable[object]:
    return value if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else ()


LocalSize = int | fx.Node
"""A size in one rank's program: a number, or the node that computes it."""


class GraphBuilder(Protocol):
    """Writes nodes into one rank's program."""

    def write(self, op: Op, /, *args: Argument, **kwargs: Argument) -> fx.Node:
        """Call `op` in the program; the node's value is what it returns."""

    def item(self, value: fx.Node, index: int) -> fx.Node:
        """The output at `index` of a node that returns several."""

    def size(self, value: Size) -> LocalSize:
        """A size (number or sympy expression) as the program can use it."""


@final
@dataclass(frozen=True, eq=False)
class LoweringContext:
    """One op call on one rank, which a lowering writes into the rank's program.

    `arguments` are by the schema's names; their tensors are the nodes of local tensors, and sizes
    are still those of the full tensors.
    """

    call: OpCall  # the call on the full tensors
    arguments: Mapping[str, Argument]
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
        return self.inputs[self.call.position_of(name)]

    def repeat(self, /, **changes: Argument) -> fx.Node:
        """The same op on the local arguments, some of them replaced by `changes`."""
        return self.builder.write(self.call.op, **{**self.arguments, **changes})
