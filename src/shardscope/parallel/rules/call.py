"""One call of an op as its rule sees it, and one way to run it in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from shardscope.parallel.placements import Placement, Size

__all__ = ["Call", "Strategy", "TensorSpec", "tensors_in"]


@final
@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the call, before it is cut along the axis in question."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    # The whole's dims in the order of the single device's memory, slowest first, for what draws
    # numbers in that order. Strategies do not depend on it. None: in their own.
    memory_order: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def num_dims(self) -> int:
        return len(self.shape)


@final
@dataclass(frozen=True, eq=False)
class Call:
    """An op with its arguments: by the schema's names, defaults filled in.

    Tensors are TensorSpec (also inside lists), sizes that a dynamic program leaves open are
    sympy expressions, everything else is as written.
    """

    op: Any  # torch._ops.OpOverload
    arguments: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]  # the tensors it returns, in order; lists are spread
    num_ranks: int  # of the axis
    offered: tuple[Placement, ...]  # how its tensor arguments lie now, in `inputs`' order
    is_training: bool = False  # gradients will be asked for

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Its tensor arguments in the schema's order; lists are spread, None is left out."""
        return tuple(tensors_in(self.arguments.values()))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@final
@dataclass(frozen=True)
class Strategy:
    """One way to run the op on each rank's pieces alone, without communication.

    `is_order_blind`: the op does the same whichever indices of the cut dims a rank holds, as long
    as all cut tensors hold the same ones. Then it is also good for cuts in blocks (Shard.outer,
    Shard.segments). False for ops that care where in the dim an index is, such as views.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    is_order_blind: bool = True


def tensors_in(value: Any) -> Iterator[TensorSpec]:
    """Every tensor in a nest of lists, in order."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
        for one in value:
            yield from tensors_in(one)
