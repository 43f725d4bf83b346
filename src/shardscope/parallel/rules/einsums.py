"""einsum: its equation names every index already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from shardscope.parallel.placements import Size
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.contractions import Labels, contraction_strategies

__all__ = ["einsums"]


@rule(torch.ops.aten.einsum.default)
def einsums(call: Call) -> Iterator[Strategy]:
    """An index of the result stays cut, a summed one leaves addends."""
    shapes = [one.shape for one in call.inputs]
    names, output = _parse(call["equation"], [len(shape) for shape in shapes])
    sizes = _sizes(names, shapes)
    labels: list[Labels] = [
        [name if size == sizes[name] else None for name, size in zip(own, shape, strict=True)]
        for own, shape in zip(names, shapes, strict=True)
    ]
    yield from contraction_strategies(call, labels, output)


def _parse(equation: str, nums_dims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The names of each operand's dims, and of the result's."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    num_more = [
        num_dims - len(one.replace("...", ""))
        for one, num_dims in zip(operands, nums_dims, strict=True)
    ]
    most = max(
        (num for one, num in zip(operands, num_more, strict=True) if "..." in one), default=0
    )
    names = [
        _spread(one, [f"...{dim}" for dim in range(most - num, most)])
        for one, num in zip(operands, num_more, strict=True)
    ]
    shared = [f"...{dim}" for dim in range(most)]
    return names, _spread(right, shared) if arrow else [*shared, *_implied(left)]


def _spread(operand: str, unnamed: list[str]) -> list[str]:
    """One name for each dim; the dims of an ellipsis are counted from the back."""
    before, dots, after = operand.partition("...")
    return [*before, *(unnamed if dots else []), *after]


def _implied(operands: str) -> list[str]:
    """Without an arrow, the result has each letter that occurs once, in the alphabet's order."""
    counts = Counter(letter for letter in operands if letter.isalpha())
    return sorted(letter for letter, count in counts.items() if count == 1)


def _sizes(names: Sequence[Sequence[str]], shapes: Sequence[Sequence[Size]]) -> dict[str, Size]:
    """The size of each index; one that is one somewhere may be more elsewhere."""
    sizes: dict[str, Size] = {}
    for own, shape in zip(names, shapes, strict=True):
        for name, size in zip(own, shape, strict=True):
            if sizes.get(name, 1) == 1:
                sizes[name] = size
    return sizes
