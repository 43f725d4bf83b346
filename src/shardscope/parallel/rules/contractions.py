"""Products summed over some indices, with every index named: the strategies of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardscope.parallel.placements import Partial, Placement, Shard, Size
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import can_be_cut, placed, terms

__all__ = ["Labels", "broadcast_labels", "contraction_strategies"]

Labels = Sequence[str | None]
"""A name for each dim of a tensor; None for one that is broadcast, which is never cut."""


def contraction_strategies(
    call: Call, inputs: Sequence[Labels], output: Labels, *, added: int | None = None
) -> Iterator[Strategy]:
    """Cut along any index: one that the result has stays cut, one that is summed leaves addends.

    `added` is the position of an input that is added to the product and not a factor of it. Where
    the product is in addends, that has to be too, or every rank would add it.
    """
    factors = [position for position in range(len(inputs)) if position != added]
    too = [] if added is None else [added]
    for name in dict.fromkeys(name for one in factors for name in inputs[one] if name is not None):
        places = _places(call, inputs, name)
        if places is None:
            continue
        is_summed = name not in output
        if is_summed:
            places |= dict.fromkeys(too, Partial())
        result = Partial() if is_summed else Shard(output.index(name))
        yield Strategy(placed(places, len(inputs)), (result,))
    for factor in factors:
        yield terms(call, factor, *too)


def broadcast_labels(shape: Sequence[Size], output: Labels, whole: Sequence[Size]) -> Labels:
    """The names of dims that are matched with the result's from the back."""
    offset = len(output) - len(shape)
    return [
        output[dim + offset] if size == whole[dim + offset] else None
        for dim, size in enumerate(shape)
    ]


def _places(call: Call, inputs: Sequence[Labels], name: str) -> dict[int, Placement] | None:
    """Where that index is cut in each input that has it; None if it cannot be."""
    places: dict[int, Placement] = {}
    for position, labels in enumerate(inputs):
        if list(labels).count(name) > 1:
            return None  # a diagonal: its two dims would have to be cut at once
        if name in labels:
            dim = labels.index(name)
            if not can_be_cut(call.inputs[position].shape[dim]):
                return None
            places[position] = Shard(dim)
    return places
