"""An op on real tensors: as its sharding rule sees it, and as a rank of a mesh runs it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from shardscope._torch.dispatch import op_schema
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.sharding_rules.context import (
    LocalSize,
    LoweringContext,
    OpCall,
    TensorSpec,
)
from shardscope.parallel.sharding_rules.random import memory_order
from shardscope.parallel.sharding_rules.registry import find_lowering
from shardscope.plan.placements import Placement, Replicate, Size

__all__ = ["Sample", "make_sample"]


@final
@dataclass(frozen=True, eq=False)
class Sample:
    """An op with its arguments by the schema's names, defaults filled in, and its results."""

    op: Any
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(_tensors(self.arguments))

    def as_call(
        self,
        *,
        num_ranks: int,
        input_placements: Sequence[Placement] = (),
        is_training: bool = False,
    ) -> OpCall:
        """The call as a sharding rule sees it."""
        return OpCall(
            op=self.op,
            arguments=_map_tensors(self.arguments, _spec_of),
            outputs=tuple(_spec_of(tensor) for tensor in self.outputs),
            num_ranks=num_ranks,
            input_placements=tuple(input_placements) or (Replicate(),) * len(self.inputs),
            is_training=is_training,
        )

    def run_locally(
        self,
        inputs: Sequence[Tensor],
        *,
        shard_specs: tuple[tuple[ShardSpec, ...], ...],
        coordinate: MeshCoordinate,
    ) -> tuple[Tensor, ...]:
        """What a rank computes from its shards with the op's lowering.

        `shard_specs` are those of the inputs and those of the outputs.
        """
        graph = fx.Graph()
        nodes = iter([graph.placeholder(f"shard_{index}") for index in range(len(inputs))])
        local = LoweringContext(
            call=self.as_call(num_ranks=1),
            arguments=_map_tensors(self.arguments, lambda _: next(nodes)),
            inputs=shard_specs[0],
            outputs=shard_specs[1],
            coordinate=coordinate,
            builder=_GraphBuilder(graph),
        )
        lower = find_lowering(self.op) or LoweringContext.repeat
        graph.output(lower(local))
        return tuple(_tensors(fx.Interpreter(torch.nn.Module(), graph=graph).run(*inputs)))


def make_sample(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Sample:
    """Run the op on full tensors."""
    arguments = _by_name(op, args, kwargs or {})
    return Sample(op, arguments, tuple(_tensors(op(**arguments))))


@final
class _GraphBuilder:
    """Writes into a graph whose sizes are all known."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    def write(self, op: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.call_function(op, args, kwargs)

    def item(self, value: fx.Node, index: int) -> fx.Node:
        return self._graph.call_function(operator.getitem, (value, index))

    def size(self, value: Size) -> LocalSize:
        return int(value)


def _by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = op_schema(op).arguments
    named = {
        argument.name: argument.default_value for argument in schema if argument.has_default_value()
    }
    named.update({argument.name: value for argument, value in zip(schema, args, strict=False)})
    named.update(kwargs)
    return {argument.name: named[argument.name] for argument in schema}


def _tensors(value: Any) -> Iterator[Tensor]:
    tensors: list[Tensor] = []
    _map_tensors(value, tensors.append)
    yield from tensors


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    return map_aggregate(value, lambda item: change(item) if isinstance(item, Tensor) else item)


def _spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, memory_order(tensor))
