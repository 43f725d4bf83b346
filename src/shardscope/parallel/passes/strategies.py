"""The strategies of an op node along one axis: from its sharding rule, checked and extended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import sympy
import torch

from shardscope._torch.dispatch import is_overload
from shardscope.parallel.ir.graph import OpNode, Reshard, Strategy, Value, map_nest
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.sharding_rules.builders import has_nonempty_shards
from shardscope.parallel.sharding_rules.context import OpCall, TensorSpec
from shardscope.parallel.sharding_rules.random import is_random, memory_order
from shardscope.parallel.sharding_rules.registry import find_rule
from shardscope.plan.placements import Partial, Placement, Replicate, Shard, Size, divides

SYM_SIZE = torch.ops.aten.sym_size.int


def replicate_all(op_node: OpNode | Reshard) -> Strategy:
    """The strategy in which every rank computes the full result from replicated inputs."""
    num_outputs = sum(output.is_tensor for output in op_node.outputs)
    replicate = Replicate()
    return Strategy((replicate,) * len(op_node.inputs), (replicate,) * num_outputs)


@final
class StrategyLookup:
    """Lists the strategies of op nodes along one axis; equal calls are looked up once."""

    def __init__(self, *, axis: int, coordinate: MeshCoordinate, is_training: bool) -> None:
        self._axis = axis
        self._coordinate = coordinate
        self.is_training = is_training
        self._cache: dict[Any, list[Strategy]] = {}

    @property
    def num_ranks(self) -> int:
        return self._coordinate.sizes[self._axis]

    def list_strategies(
        self, op_node: OpNode | Reshard, input_placements: Sequence[Placement]
    ) -> list[Strategy]:
        """The strategies that run the node without communication, "all replicated" last."""
        if isinstance(op_node, Reshard):
            return [*_reshard_strategies(op_node, input_placements[0]), replicate_all(op_node)]
        if op_node.op is SYM_SIZE:  # needs no data
            return [Strategy(tuple(input_placements), ())]
        if not is_overload(op_node.op):
            return [replicate_all(op_node)]
        call = self.describe(op_node, input_placements)
        key = (
            op_node.op,
            _freeze(call.arguments),
            call.outputs,
            call.input_placements,
            call.is_training,
        )
        if key not in self._cache:
            self._cache[key] = list(self._apply_rule(call))
        return [*self._cache[key], replicate_all(op_node)]

    def describe(self, op_node: OpNode, input_placements: Sequence[Placement]) -> OpCall:
        """The call as sharding rules see it: tensors have their local shapes along earlier axes."""
        return describe_call(
            op_node,
            num_axes=self._axis,
            coordinate=self._coordinate,
            num_ranks=self.num_ranks,
            input_placements=tuple(input_placements),
            is_training=self.is_training and any(value.has_gradient for value in op_node.inputs),
        )

    def _apply_rule(self, call: OpCall) -> Iterator[Strategy]:
        rule = find_rule(call.op)
        if rule is None:
            return
        strategies = list(rule(call))
        for strategy in (*strategies, *_lift_to_blocks(strategies, call)):
            if _is_valid(strategy, call):
                yield strategy


def describe_call(
    op_node: OpNode,
    *,
    num_axes: int,
    coordinate: MeshCoordinate,
    num_ranks: int,
    input_placements: tuple[Placement, ...],
    is_training: bool,
) -> OpCall:
    """An op node, of an overload, as a call whose tensors are sharded along the first `num_axes`
    axes.
    """
    op = op_node.op
    assert is_overload(op)
    is_random_op = is_random(op)

    def spec_of(value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        if not value.is_tensor:
            return value.scalar
        spec = _spec(value, num_axes, coordinate)
        if is_random_op:
            return replace(spec, memory_order=memory_order(value.example_tensor))
        return spec

    return OpCall(
        op=op,
        arguments=map_nest(op_node.arguments, spec_of),
        outputs=tuple(
            _spec(output, num_axes, coordinate) for output in op_node.outputs if output.is_tensor
        ),
        num_ranks=num_ranks,
        input_placements=input_placements,
        is_training=is_training,
    )


def _spec(value: Value, num_axes: int, coordinate: MeshCoordinate) -> TensorSpec:
    assert value.dtype is not None
    if not num_axes:
        return TensorSpec(value.shape, value.dtype)
    spec = ShardSpec(value.shape, tuple(value.placements[:num_axes]))
    first_coordinate = MeshCoordinate(coordinate.sizes[:num_axes], (0,) * num_axes)
    return TensorSpec(spec.local_shape(first_coordinate), value.dtype)


def _lift_to_blocks(strategies: Iterable[Strategy], call: OpCall) -> Iterator[Strategy]:
    """Permutation-invariant strategies, for inputs that are sharded in blocks or segments."""
    blocks = {
        placement
        for placement in call.input_placements
        if isinstance(placement, Shard) and not placement.is_plain
    }
    for strategy in strategies:
        if not strategy.is_permutation_invariant or len(_shard_sizes(strategy, call)) != 1:
            continue
        for block in blocks:
            pairs = zip(strategy.inputs, call.input_placements, strict=True)
            if any(
                placement == Shard(block.dim) and source == block for placement, source in pairs
            ):
                yield Strategy(
                    tuple(_in_blocks(placement, block) for placement in strategy.inputs),
                    tuple(_in_blocks(placement, block) for placement in strategy.outputs),
                )


def _in_blocks(placement: Placement, block: Shard) -> Placement:
    return block.at(placement.dim) if isinstance(placement, Shard) else placement


def _shard_sizes(strategy: Strategy, call: OpCall) -> set[Size]:
    pairs = (*zip(strategy.inputs, call.inputs, strict=True),)
    pairs += (*zip(strategy.outputs, call.outputs, strict=True),)
    return {spec.shape[placement.dim] for placement, spec in pairs if isinstance(placement, Shard)}


def _is_valid(strategy: Strategy, call: OpCall) -> bool:
    """Whether the shards of all tensors match, and none is empty under a max or min.

    Shards of one dim may be uneven; shards of dims of different sizes would not match then.
    """
    sizes = _shard_sizes(strategy, call)
    if any(isinstance(size, sympy.Expr) and not divides(call.num_ranks, size) for size in sizes):
        return False
    if len(sizes) > 1 and not all(divides(call.num_ranks, size) for size in sizes):
        return False
    reductions = {
        placement.reduction for placement in strategy.outputs if isinstance(placement, Partial)
    }
    # An empty shard has no maximum. An uneven vocabulary usually leaves no shard empty.
    is_empty_somewhere = not all(has_nonempty_shards(call, size) for size in sizes)
    return not (is_empty_somewhere and reductions - {"sum"})


def _reshard_strategies(reshard: Reshard, input_placement: Placement) -> Iterator[Strategy]:
    """Strategies of a reshard along another axis: shards of dims that it leaves alone, and sums."""
    resharded_dims = {
        placement.dim
        for placement in (reshard.source, reshard.target)
        if isinstance(placement, Shard)
    }
    reductions = {
        placement.reduction
        for placement in (reshard.source, reshard.target)
        if isinstance(placement, Partial)
    }
    if isinstance(input_placement, Shard) and input_placement.dim not in resharded_dims:
        yield Strategy((input_placement,), (input_placement,))
    if input_placement == Partial() and not reductions - {"sum"}:
        yield Strategy((input_placement,), (input_placement,))


def _freeze(nest: Any) -> Any:
    if isinstance(nest, (list, tuple)):
        return tuple(_freeze(item) for item in nest)
    if isinstance(nest, dict):
        return tuple((key, _freeze(item)) for key, item in nest.items())
    if isinstance(nest, slice):
        return ("slice", _freeze((nest.start, nest.stop, nest.step)))
    # 1, 1.0 and True are equal, but not the same argument.
    return (type(nest), nest) if isinstance(nest, (int, float, bool)) else nest
