"""Rules proved by computing: cut, run on every rank, join, compare with the whole.

Gradients too: each rank differentiates what it computed, and what comes back has to be the whole's
gradient in the layout that calculus gives it (`dual`).
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

from rule_offers import find_strategies
from rule_sample import Sample, make_sample
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import Placement, Replicate
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.dealing import Coordinates, all_coordinates, deal, dual, join

__all__ = ["Verdict", "prove", "refute"]


@final
@dataclass(frozen=True)
class Verdict:
    """One strategy for each mesh axis, and what is wrong with them together, if anything."""

    strategies: tuple[Strategy, ...]
    refutation: str | None


def prove(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    sizes: Sequence[int] = (2,),
    offers: Sequence[Sequence[Placement]] = (),
    constants: Collection[str] = (),
) -> list[Verdict]:
    """Try every strategy of the op's rule on a mesh of these sizes, as inference and training.

    `constants` are the arguments that torch gives no gradient.
    """
    with _no_warnings():
        sample = make_sample(op, args, kwargs)
    verdicts: dict[tuple[Strategy, ...], Verdict] = {}
    for is_training in (True, False):
        call = sample.as_call(num_ranks=sizes[0], is_training=is_training)
        for chosen in _combinations(call, sizes, offers):
            if chosen not in verdicts:
                refutation = refute(
                    sample, chosen, sizes=sizes, is_training=is_training, constants=constants
                )
                verdicts[chosen] = Verdict(chosen, refutation)
    return list(verdicts.values())


def refute(
    sample: Sample,
    strategies: Sequence[Strategy],
    *,
    sizes: Sequence[int],
    is_training: bool = False,
    constants: Collection[str] = (),
) -> str | None:
    """What goes wrong when the op runs so (a strategy for each mesh axis); None if nothing does."""
    learned = [name for name in sample.arguments if is_training and name not in constants]
    try:
        with _own_chance(), _no_warnings():
            ranks = _Ranks(sample, strategies, sizes, learned)
            return ranks.compare_outputs() or (ranks.compare_gradients() if is_training else None)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def _own_chance() -> Iterator[None]:
    """Draw the same numbers every time, and none of those that the caller would draw."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What torch warns of, as of variances of too few elements, is compared here anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _combinations(
    call: Call, sizes: Sequence[int], offers: Sequence[Sequence[Placement]]
) -> Iterator[tuple[Strategy, ...]]:
    """A strategy for each axis: an axis cuts what the axes before it left."""
    call = replace(call, num_ranks=sizes[0])
    for strategy in find_strategies(call, offers=offers):
        if len(sizes) == 1:
            yield (strategy,)
            continue
        smaller = _after(call, strategy)
        if smaller is not None:
            yield (strategy, *(_whole(call) for _ in sizes[1:]))
            yield from ((strategy, *rest) for rest in _combinations(smaller, sizes[1:], offers))
    if len(sizes) > 1:
        yield from ((_whole(call), *rest) for rest in _combinations(call, sizes[1:], offers))


def _whole(call: Call) -> Strategy:
    return Strategy((Replicate(),) * len(call.inputs), (Replicate(),) * len(call.outputs))


def _after(call: Call, strategy: Strategy) -> Call | None:
    """The call on what one rank of the axis holds; None if ranks hold different sizes."""
    inputs = _layouts(call.inputs, [strategy.inputs])
    outputs = _layouts(call.outputs, [strategy.outputs])
    if not all(one.is_even((call.num_ranks,)) for one in (*inputs, *outputs)):
        return None
    seat = Seat((call.num_ranks,), (0,))
    shapes = iter([one.local_shape(seat) for one in inputs])
    return replace(
        call,
        arguments=map_aggregate(
            dict(call.arguments),
            lambda one: replace(one, shape=next(shapes)) if isinstance(one, TensorSpec) else one,
        ),
        outputs=tuple(
            replace(spec, shape=one.local_shape(seat))
            for spec, one in zip(call.outputs, outputs, strict=True)
        ),
    )


def _layouts(
    specs: Sequence[TensorSpec | Tensor], by_axis: Sequence[Sequence[Placement]]
) -> tuple[Layout, ...]:
    return tuple(
        Layout(tuple(spec.shape), placements)
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
        learned: Collection[str],  # the arguments whose gradients are asked for
    ) -> None:
        self._sizes = tuple(sizes)
        self._strategies = strategies
        with _same_chance():
            self._whole = make_sample(sample.op, (), _leaves(sample.arguments, learned))
        self._inputs = _layouts(sample.inputs, [one.inputs for one in strategies])
        self._outputs = _layouts(sample.outputs, [one.outputs for one in strategies])
        dealt = [
            self._deal(tensor.detach(), layout.placements)
            for tensor, layout in zip(sample.inputs, self._inputs, strict=True)
        ]
        ranks = all_coordinates(sizes)
        self._pieces = {
            at: [
                one[at].clone().requires_grad_(whole.requires_grad)
                for one, whole in zip(dealt, self._whole.inputs, strict=True)
            ]
            for at in ranks
        }
        self._results = {at: self._run(at) for at in ranks}

    def compare_outputs(self) -> str | None:
        for index, whole in enumerate(self._whole.outputs):
            pieces = {at: results[index].detach() for at, results in self._results.items()}
            found = self._join(pieces, self._outputs[index].placements)
            difference = _difference(found, whole.detach())
            if difference is not None:
                return f"output {index} {difference}"
        return None

    def compare_gradients(self) -> str | None:
        results = [(index, one) for index, one in enumerate(self._whole.outputs) if one.grad_fn]
        if not results:
            return None
        weights = {index: torch.randn_like(one) for index, one in results}
        try:
            expected = _gradients(self._whole.inputs, dict(results), weights)
        except RuntimeError:
            return None  # torch cannot differentiate it either
        found = self._gradients_of_ranks(weights)
        for index, whole in enumerate(expected):
            if whole is None:
                continue
            lie = self._gradient_placements(index)
            pieces = {at: one[index] for at, one in found.items()}
            difference = _difference(self._join(pieces, lie), whole)
            if difference is not None:
                return f"the gradient of input {index} {difference}"
        return None

    def _gradients_of_ranks(self, weights: Mapping[int, Tensor]) -> dict[Coordinates, list[Any]]:
        dealt = {
            index: self._deal(
                weight, [dual(one, is_split=False) for one in self._outputs[index].placements]
            )
            for index, weight in weights.items()
        }
        return {
            at: _gradients(
                self._pieces[at],
                {index: results[index] for index in weights},
                {index: dealt[index][at] for index in weights},
            )
            for at, results in self._results.items()
        }

    def _deal_weight(self, index: int, weight: Tensor) -> dict[Coordinates, Tensor]:
        lies = self._outputs[index].placements
        return self._deal(weight, [dual(one, is_split=False) for one in lies])

    def _gradient_placements(self, index: int) -> list[Placement]:
        return [
            dual(strategy.inputs[index], is_split=not _is_whole(strategy))
            for strategy in self._strategies
        ]

    def _run(self, at: Coordinates) -> tuple[Tensor, ...]:
        layouts = (self._inputs, self._outputs)
        with _same_chance():
            results = self._whole.run_locally(
                self._pieces[at], layouts=layouts, seat=Seat(self._sizes, at)
            )
        for result, layout in zip(results, self._outputs, strict=True):
            promised = layout.local_shape(Seat(self._sizes, at))
            if tuple(result.shape) != promised:
                raise ValueError(f"a rank computes {tuple(result.shape)}, not {promised}")
        return results

    def _deal(self, whole: Tensor, placements: Sequence[Placement]) -> dict[Coordinates, Tensor]:
        return deal(whole, placements=placements, sizes=self._sizes)

    def _join(
        self, pieces: Mapping[Coordinates, Tensor], placements: Sequence[Placement]
    ) -> Tensor:
        return join(pieces, placements=placements, sizes=self._sizes)


@contextmanager
def _same_chance() -> Iterator[None]:
    """All ranks draw what the single device draws: they share its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _is_whole(strategy: Strategy) -> bool:
    return all(isinstance(one, Replicate) for one in (*strategy.inputs, *strategy.outputs))


def _leaves(arguments: Mapping[str, Any], learned: Collection[str]) -> dict[str, Any]:
    return {
        name: map_aggregate(value, lambda one, name=name: _leaf(one, name in learned))  # type: ignore[misc]
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
    wanted = [one for one in inputs if one.requires_grad]
    used = [index for index, one in outputs.items() if one.requires_grad]
    if not used:
        return [torch.zeros_like(one) if one.requires_grad else None for one in inputs]
    found = iter(
        torch.autograd.grad(
            [outputs[index] for index in used],
            wanted,
            [weights[index] for index in used],
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return [next(found) if one.requires_grad else None for one in inputs]


def _difference(found: Tensor, expected: Tensor) -> str | None:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        return f"differs: {str(error).splitlines()[0]}"
    return None
