"""Proves sharding rules by computing: shard, run on every rank, unshard, compare with the full
result.

Gradients too: each rank differentiates what it computed, and the result has to be the full gradient
in the placement that `grad_placement` gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from rule_sample import Sample, make_sample
from rule_strategies import find_strategies
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.ir.shard_spec import (
    Coordinates,
    MeshCoordinate,
    ShardSpec,
    all_coordinates,
    grad_placement,
    shard_tensor,
    unshard_tensor,
)
from shardscope.parallel.sharding_rules.context import OpCall, TensorSpec
from shardscope.plan.placements import Placement, Replicate

__all__ = ["StrategyVerdict", "prove", "refute"]


@final
@dataclass(frozen=True)
class StrategyVerdict:
    """One strategy for each mesh axis, and what is wrong with them together, if anything."""

    strategies: tuple[Strategy, ...]
    refutation: str | None


def prove(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    sizes: Sequence[int] = (2,),
    candidate_placements: Sequence[Sequence[Placement]] = (),
    constants: Collection[str] = (),
) -> list[StrategyVerdict]:
    """Try every strategy of the op's rule on a mesh of these sizes, in inference and in training.

    `constants` are the arguments that torch gives no gradient.
    """
    with _no_warnings():
        sample = make_sample(op, args, kwargs)
    verdicts: dict[tuple[Strategy, ...], StrategyVerdict] = {}
    for is_training in (True, False):
        call = sample.as_call(num_ranks=sizes[0], is_training=is_training)
        for combination in _combinations(call, sizes, candidate_placements):
            if combination not in verdicts:
                refutation = refute(
                    sample, combination, sizes=sizes, is_training=is_training, constants=constants
                )
                verdicts[combination] = StrategyVerdict(combination, refutation)
    return list(verdicts.values())


def refute(
    sample: Sample,
    strategies: Sequence[Strategy],
    *,
    sizes: Sequence[int],
    is_training: bool = False,
    constants: Collection[str] = (),
) -> str | None:
    """The error when the op runs with these strategies (one for each mesh axis); None if there is
    none.
    """
    trainable = [name for name in sample.arguments if is_training and name not in constants]
    try:
        with _isolated_rng(), _no_warnings():
            ranks = _Ranks(sample, strategies, sizes, trainable)
            return ranks.compare_outputs() or (ranks.compare_gradients() if is_training else None)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def _isolated_rng() -> Iterator[None]:
    """Draw the same numbers every time, without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Ignore torch's warnings, such as of variances of too few elements: results are compared
    anyway.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _combinations(
    call: OpCall, sizes: Sequence[int], candidate_placements: Sequence[Sequence[Placement]]
) -> Iterator[tuple[Strategy, ...]]:
    """Combinations of a strategy for each axis: an axis shards what the earlier axes left."""
    call = replace(call, num_ranks=sizes[0])
    for strategy in find_strategies(call, candidate_placements=candidate_placements):
        if len(sizes) == 1:
            yield (strategy,)
            continue
        smaller = _local_call(call, strategy)
        if smaller is not None:
            yield (strategy, *(_replicated_strategy(call) for _ in sizes[1:]))
            yield from (
                (strategy, *rest)
                for rest in _combinations(smaller, sizes[1:], candidate_placements)
            )
    if len(sizes) > 1:
        yield from (
            (_replicated_strategy(call), *rest)
            for rest in _combinations(call, sizes[1:], candidate_placements)
        )


def _replicated_strategy(call: OpCall) -> Strategy:
    return Strategy((Replicate(),) * len(call.inputs), (Replicate(),) * len(call.outputs))


def _local_call(call: OpCall, strategy: Strategy) -> OpCall | None:
    """The call on what a rank of the axis holds; None if ranks hold different sizes."""
    inputs = _shard_specs(call.inputs, [strategy.inputs])
    outputs = _shard_specs(call.outputs, [strategy.outputs])
    if not all(shard_spec.is_even((call.num_ranks,)) for shard_spec in (*inputs, *outputs)):
        return None
    coordinate = MeshCoordinate((call.num_ranks,), (0,))
    shapes = iter([shard_spec.local_shape(coordinate) for shard_spec in inputs])
    return replace(
        call,
        arguments=map_aggregate(
            dict(call.arguments),
            lambda argument: (
                replace(argument, shape=next(shapes))
                if isinstance(argument, TensorSpec)
                else argument
            ),
        ),
        outputs=tuple(
            replace(spec, shape=shard_spec.local_shape(coordinate))
            for spec, shard_spec in zip(call.outputs, outputs, strict=True)
        ),
    )


def _shard_specs(
    specs: Sequence[TensorSpec | Tensor], by_axis: Sequence[Sequence[Placement]]
) -> tuple[ShardSpec, ...]:
    return tuple(
        ShardSpec(tuple(spec.shape), placements)
        for spec, placements in zip(specs, zip(*by_axis, strict=True), strict=True)
    )


@final
class _Ranks:
    """The op as all ranks of a mesh run it."""

    def __init__(
        self,
        sample: Sample,
        strategies: Sequence[Strategy],
        sizes: Sequence[int],
        trainable: Collection[str],  # the arguments whose gradients are computed
    ) -> None:
        self._sizes = tuple(sizes)
        self._strategies = strategies
        with _shared_seed():
            self._reference = make_sample(sample.op, (), _leaves(sample.arguments, trainable))
        self._inputs = _shard_specs(sample.inputs, [strategy.inputs for strategy in strategies])
        self._outputs = _shard_specs(sample.outputs, [strategy.outputs for strategy in strategies])
        input_shards = [
            self._shard(tensor.detach(), shard_spec.placements)
            for tensor, shard_spec in zip(sample.inputs, self._inputs, strict=True)
        ]
        ranks = all_coordinates(sizes)
        self._shards = {
            at: [
                shards[at].clone().requires_grad_(reference.requires_grad)
                for shards, reference in zip(input_shards, self._reference.inputs, strict=True)
            ]
            for at in ranks
        }
        self._results = {at: self._run(at) for at in ranks}

    def compare_outputs(self) -> str | None:
        for index, expected in enumerate(self._reference.outputs):
            shards = {at: results[index].detach() for at, results in self._results.items()}
            result = self._unshard(shards, self._outputs[index].placements)
            difference = _difference(result, expected.detach())
            if difference is not None:
                return f"output {index} {difference}"
        return None

    def compare_gradients(self) -> str | None:
        results = [
            (index, output)
            for index, output in enumerate(self._reference.outputs)
            if output.grad_fn
        ]
        if not results:
            return None
        weights = {index: torch.randn_like(output) for index, output in results}
        try:
            expected = _gradients(self._reference.inputs, dict(results), weights)
        except RuntimeError:
            return None  # torch cannot differentiate it either
        rank_gradients = self._gradients_of_ranks(weights)
        for index, expected_gradient in enumerate(expected):
            if expected_gradient is None:
                continue
            placements = self._gradient_placements(index)
            shards = {at: gradients[index] for at, gradients in rank_gradients.items()}
            difference = _difference(self._unshard(shards, placements), expected_gradient)
            if difference is not None:
                return f"the gradient of input {index} {difference}"
        return None

    def _gradients_of_ranks(self, weights: Mapping[int, Tensor]) -> dict[Coordinates, list[Any]]:
        weight_shards = {
            index: self._shard(
                weight,
                [
                    grad_placement(placement, is_split=False)
                    for placement in self._outputs[index].placements
                ],
            )
            for index, weight in weights.items()
        }
        return {
            at: _gradients(
                self._shards[at],
                {index: results[index] for index in weights},
                {index: weight_shards[index][at] for index in weights},
            )
            for at, results in self._results.items()
        }

    def _shard_weight(self, index: int, weight: Tensor) -> dict[Coordinates, Tensor]:
        placements = self._outputs[index].placements
        return self._shard(
            weight, [grad_placement(placement, is_split=False) for placement in placements]
        )

    def _gradient_placements(self, index: int) -> list[Placement]:
        return [
            grad_placement(strategy.inputs[index], is_split=not _is_replicated(strategy))
            for strategy in self._strategies
        ]

    def _run(self, at: Coordinates) -> tuple[Tensor, ...]:
        shard_specs = (self._inputs, self._outputs)
        with _shared_seed():
            results = self._reference.run_locally(
                self._shards[at],
                shard_specs=shard_specs,
                coordinate=MeshCoordinate(self._sizes, at),
            )
        for result, shard_spec in zip(results, self._outputs, strict=True):
            promised = shard_spec.local_shape(MeshCoordinate(self._sizes, at))
            if tuple(result.shape) != promised:
                raise ValueError(f"a rank computes {tuple(result.shape)}, not {promised}")
        return results

    def _shard(
        self, full_tensor: Tensor, placements: Sequence[Placement]
    ) -> dict[Coordinates, Tensor]:
        return shard_tensor(full_tensor, placements=placements, sizes=self._sizes)

    def _unshard(
        self, shards: Mapping[Coordinates, Tensor], placements: Sequence[Placement]
    ) -> Tensor:
        return unshard_tensor(shards, placements=placements, sizes=self._sizes)


@contextmanager
def _shared_seed() -> Iterator[None]:
    """All ranks draw what the single device draws: they share its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _is_replicated(strategy: Strategy) -> bool:
    return all(
        isinstance(placement, Replicate) for placement in (*strategy.inputs, *strategy.outputs)
    )


def _leaves(arguments: Mapping[str, Any], trainable: Collection[str]) -> dict[str, Any]:
    return {
        name: map_aggregate(value, lambda item, name=name: _leaf(item, name in trainable))  # type: ignore[misc]
        for name, value in arguments.items()
    }


def _leaf(value: Any, grads: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    can_differ = value.is_floating_point() or value.is_complex()
    return value.detach().clone().requires_grad_(grads and can_differ)


def _gradients(
    inputs: Sequence[Tensor], outputs: Mapping[int, Tensor], weights: Mapping[int, Tensor]
) -> list[Tensor | None]:
    """The gradient of each input; None for those that cannot have one."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    used = [index for index, output in outputs.items() if output.requires_grad]
    if not used:
        return [torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in inputs]
    gradients = iter(
        torch.autograd.grad(
            [outputs[index] for index in used],
            wanted,
            [weights[index] for index in used],
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return [next(gradients) if tensor.requires_grad else None for tensor in inputs]


def _difference(actual: Tensor, expected: Tensor) -> str | None:
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    except AssertionError as error:
        return f"differs: {str(error).splitlines()[0]}"
    return None
