"""Words that rules are written in: dims counted from the front, and strategies by what is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardscope._torch.dispatch import op_schema
from shardscope.parallel.placements import Partial, Placement, Reduction, Replicate, Shard, Size
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec

__all__ = [
    "can_be_cut",
    "cut",
    "kept_terms",
    "matched_dims",
    "overloads",
    "placed",
    "reductions_of",
    "sources",
    "terms",
    "with_any_other",
    "wrap",
    "wrap_all",
]


def wrap(dim: int, num_dims: int) -> int:
    """A dim counted from the front, also where it was counted from the back."""
    return dim % max(num_dims, 1)


def wrap_all(dims: int | Iterable[int] | None, num_dims: int) -> list[int]:
    """Dims counted from the front, in order; none given means all."""
    if isinstance(dims, int):
        dims = [dims]
    found = sorted({wrap(dim, num_dims) for dim in dims or ()})
    return found or list(range(num_dims))


def can_be_cut(size: Size) -> bool:
    """Whether there is something to cut: a dim of one is left whole, it may be broadcast."""
    return not (isinstance(size, int) and size <= 1)


def placed(places: Mapping[int, Placement], number: int) -> tuple[Placement, ...]:
    """So many placements: those named by position, and Replicate for the rest."""
    return tuple(places.get(position, Replicate()) for position in range(number))


def cut(call: Call, inputs: Mapping[int, int], outputs: Mapping[int, int]) -> Strategy:
    """Tensors cut along one dim each (position to dim), the others whole."""
    return Strategy(
        placed({at: Shard(dim) for at, dim in inputs.items()}, len(call.inputs)),
        placed({at: Shard(dim) for at, dim in outputs.items()}, len(call.outputs)),
    )


def terms(call: Call, *positions: int, reduction: Reduction = "sum") -> Strategy:
    """These inputs in terms, the others whole, and every output in terms."""
    term = Partial(reduction)
    return Strategy(
        placed(dict.fromkeys(positions, term), len(call.inputs)), (term,) * len(call.outputs)
    )


def kept_terms(call: Call) -> Iterator[Strategy]:
    """For an op that only moves values: terms of its first input stay terms, of any reduction."""
    for reduction in reductions_of(call.outputs[0].dtype):
        yield terms(call, 0, reduction=reduction)


def reductions_of(dtype: torch.dtype) -> tuple[Reduction, ...]:
    """What terms of this dtype may be combined by."""
    if dtype == torch.bool:
        return ("max", "min")
    return ("sum",) if dtype.is_complex else ("sum", "max", "min")


def with_any_other(call: Call, strategy: Strategy) -> Iterator[Strategy]:
    """For an op that takes only a shape or a dtype from its second tensor: that may lie anyhow."""
    for other in dict.fromkeys([call.offered[1], Replicate()]):
        yield replace(strategy, inputs=(strategy.inputs[0], other))


def sources(call: Call) -> dict[int, int]:
    """Which dim of the first input each dim of the first output is, where it is one.

    The op itself says it, of a tensor whose sizes name its dims: so defaults, negative dims and
    empty lists mean what they mean to torch.
    """
    own = call.inputs[0]
    named = torch.empty([dim + 2 for dim in range(own.num_dims)], dtype=own.dtype, device="meta")
    arguments = {
        name: named if isinstance(value, TensorSpec) else value
        for name, value in call.arguments.items()
    }
    result = call.op(**arguments)
    first = result if isinstance(result, torch.Tensor) else result[0]
    return {new: size - 2 for new, size in enumerate(first.shape) if size > 1}


def matched_dims(shape: Sequence[Size], whole: Sequence[Size]) -> Iterator[tuple[int, int]]:
    """Dims of a tensor that are not broadcast where it is used in `whole`, and which they are.

    What is not 1 has the size of the whole, though open sizes may say so in other symbols: those
    of two inputs that export found out nothing about.
    """
    offset = len(whole) - len(shape)
    for dim, size in enumerate(shape):
        are_known = isinstance(size, int) and isinstance(whole[dim + offset], int)
        if can_be_cut(size) and (size == whole[dim + offset] or not are_known):
            yield dim, dim + offset


def overloads(*names: str) -> list[Any]:
    """Every overload of these aten ops that takes tensors and writes into none.

    Ops that this torch does not have are left out.
    """
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    kinds = [getattr(one, kind) for one in packets if one is not None for kind in one.overloads()]
    return [op for op in kinds if not op_schema(op).is_mutable and _takes_tensors(op)]


def _takes_tensors(op: Any) -> bool:
    return any("Tensor" in str(slot.type) for slot in op_schema(op).arguments)
