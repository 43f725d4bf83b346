"""An op on real tensors: as its rule sees it, and as one rank of a mesh runs it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from shardscope._torch.dispatch import op_schema
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import Placement, Replicate, Size
from shardscope.parallel.rules.call import Call, TensorSpec
from shardscope.parallel.rules.local import Local, LocalSize
from shardscope.parallel.rules.lookup import find_speller
from shardscope.parallel.rules.memory import memory_order

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
        offered: Sequence[Placement] = (),
        is_training: bool = False,
    ) -> Call:
        """The call that a rule is asked about."""
        return Call(
            op=self.op,
            arguments=_map_tensors(self.arguments, _spec_of),
            outputs=tuple(_spec_of(one) for one in self.outputs),
            num_ranks=num_ranks,
            offered=tuple(offered) or (Replicate(),) * len(self.inputs),
            is_training=is_training,
        )

    def run_locally(
        self, inputs: Sequence[Tensor], *, layouts: tuple[tuple[Layout, ...], ...], seat: Seat
    ) -> tuple[Tensor, ...]:
        """What one rank computes from its pieces, as the op's speller writes it.

        `layouts` are those of the inputs and those of the outputs.
        """
        graph = fx.Graph()
        nodes = iter([graph.placeholder(f"piece_{index}") for index in range(len(inputs))])
        local = Local(
            call=self.as_call(num_ranks=1),
            arguments=_map_tensors(self.arguments, lambda _: next(nodes)),
            inputs=layouts[0],
            outputs=layouts[1],
            seat=seat,
            pen=_GraphPen(graph),
        )
        spell = find_speller(self.op) or Local.repeat
        graph.output(spell(local))
        return tuple(_tensors(fx.Interpreter(torch.nn.Module(), graph=graph).run(*inputs)))


def make_sample(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Sample:
    """Run the op on whole tensors."""
    arguments = _by_name(op, args, kwargs or {})
    return Sample(op, arguments, tuple(_tensors(op(**arguments))))


@final
class _GraphPen:
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
    slots = op_schema(op).arguments
    named = {slot.name: slot.default_value for slot in slots if slot.has_default_value()}
    named.update({slot.name: value for slot, value in zip(slots, args, strict=False)})
    named.update(kwargs)
    return {slot.name: named[slot.name] for slot in slots}


def _tensors(value: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    _map_tensors(value, found.append)
    yield from found


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    return map_aggregate(value, lambda one: change(one) if isinstance(one, Tensor) else one)


def _spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, memory_order(tensor))
