"""Random ops: every rank draws exactly what the single device draws, and keeps its piece.

For that the ranks share one seed, and each draws for the whole shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardscope.parallel.placements import Replicate, Shard
from shardscope.parallel.rules.book import decomposition, rule, speller
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import cut_piece
from shardscope.parallel.rules.terms import lay, offered_to, pass_terms

__all__ = [
    "cut_drawn_like",
    "cut_dropout",
    "is_random",
    "refuse_rrelu",
    "spell_drawn_like",
    "spell_dropout",
    "spell_native_dropout",
    "take_alpha_dropout_apart",
    "write_whole_like",
]

aten = torch.ops.aten


def is_random(op: Any) -> bool:
    """Whether the op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


@rule(aten.dropout.default, aten.feature_dropout.default, aten.native_dropout.default)
def cut_dropout(call: Call) -> Iterator[Strategy]:
    """With the mask drawn, it is a product with numbers that every rank knows."""
    for dim in range(call["input"].num_dims):
        yield lay(call, {"input": Shard(dim)}, Shard(dim))
    if len(call.outputs) == 1:
        yield from pass_terms(call, "input")


@speller(aten.dropout.default, aten.feature_dropout.default)
def spell_dropout(local: Local) -> Any:
    """Ones that go through the same op come out as the mask, divided as it divides."""
    if not local["train"]:
        return local.repeat()
    mask = cut_piece(
        local.pen, local.repeat(input=_write_ones(local)), layout=local.outputs[0], seat=local.seat
    )
    return local.pen.write(aten.mul.Tensor, local["input"], mask)


@speller(aten.native_dropout.default)
def spell_native_dropout(local: Local) -> Any:
    both = local.repeat(input=_write_ones(local))
    factor, mask = (
        cut_piece(local.pen, local.pen.item(both, index), layout=layout, seat=local.seat)
        for index, layout in enumerate(local.outputs)
    )
    return local.pen.write(aten.mul.Tensor, local["input"], factor), mask


def _write_ones(local: Local) -> Any:
    return local.pen.write(aten.ones_like.default, write_whole_like(local, "input"))


def write_whole_like(local: Local, name: str) -> Any:
    """A tensor like the whole argument, but for its values: its memory too, which orders draws."""
    spec: TensorSpec = local.call[name]
    order = spec.memory_order or tuple(range(spec.num_dims))
    shape = [local.pen.size(spec.shape[dim]) for dim in order]
    whole = local.pen.write(aten.new_empty.default, local[name], shape)
    if list(order) == sorted(order):
        return whole
    return local.pen.write(aten.permute.default, whole, [order.index(dim) for dim in sorted(order)])


_DRAWN_LIKE = (
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.bernoulli.p,
    aten.normal_functional.default,
    aten.uniform.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.cauchy.default,
    aten.log_normal.default,
    aten.random.default,
    aten.random.to,
)


@rule(*_DRAWN_LIKE)
def cut_drawn_like(call: Call) -> Iterator[Strategy]:
    """They take a tensor for its shape and type alone, so any piece of it will do."""
    (offer,) = offered_to(call, "self")
    for dim in range(call["self"].num_dims):
        yield lay(call, {"self": Shard(dim)}, Shard(dim))
    if offer != Replicate():
        yield lay(call, {"self": offer}, Replicate(), is_order_blind=False)


@speller(*_DRAWN_LIKE)
def spell_drawn_like(local: Local) -> Any:
    whole = write_whole_like(local, "self")
    return cut_piece(local.pen, local.repeat(self=whole), layout=local.outputs[0], seat=local.seat)


@rule(aten.rrelu.default)
def refuse_rrelu(call: Call) -> Iterator[Strategy]:
    """torch marks it as pointwise, but its slopes are drawn."""
    if not call["training"]:
        for dim in range(call["self"].num_dims):
            yield lay(call, {"self": Shard(dim)}, Shard(dim))


@decomposition(aten.alpha_dropout.default)
def take_alpha_dropout_apart(input: Tensor, p: float, train: bool) -> Any:
    """What is dropped becomes a constant, and all is scaled to keep mean and variance."""
    if not train or p in (0, 1) or input.device.type not in ("cpu", "meta"):
        raise NotImplementedError  # elsewhere dropout does not draw as this op does
    dropped = 1.7580993408473766  # what SELU tends to, negative
    scale = 1 / math.sqrt((dropped * dropped * p + 1) * (1 - p))
    is_kept = (aten.dropout(torch.ones_like(input), p, True) != 0).to(input.dtype)
    return input * (is_kept * scale) + ((is_kept - 1) * dropped * scale + dropped * scale * p)
