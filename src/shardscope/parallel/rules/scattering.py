"""Elements put or added where indices say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardscope.parallel.placements import Partial, Replicate, Shard
from shardscope.parallel.rules.book import rule, speller
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.dims import wrap
from shardscope.parallel.rules.local import Local
from shardscope.parallel.rules.pieces import count_once
from shardscope.parallel.rules.terms import can_add, lay, pass_terms

__all__ = ["cut_index_add", "cut_index_fill", "cut_scatter", "spell_added"]

aten = torch.ops.aten

_LINEAR = (aten.scatter.src, aten.scatter_add.default)


@rule(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
def cut_scatter(call: Call) -> Iterator[Strategy]:
    """Along the other dims, element stays with element; so all must be of one size there."""
    names = [name for name in ("self", "index", "src") if name in call.arguments]
    num_dims = call["self"].num_dims
    if any(call[name].num_dims != num_dims for name in names):
        return
    along = wrap(call["dim"], num_dims)
    for dim in range(num_dims):
        if dim != along and len({call[name].shape[dim] for name in names}) == 1:
            yield lay(call, dict.fromkeys(names, Shard(dim)), Shard(dim))
    if call.op in _LINEAR:
        yield from pass_terms(call, "self", "src")
    if call.op == aten.scatter_add.default and can_add(call["self"]):
        yield from _cut_added(call, along)


def _cut_added(call: Call, along: int) -> Iterator[Strategy]:
    """What is added up may be added by different ranks."""
    if call["index"].shape[along] == call["src"].shape[along]:
        cut = Shard(along)
        for whole in (Replicate(), Partial()):
            yield lay(call, {"self": whole, "index": cut, "src": cut}, Partial())


@rule(aten.index_add.default, aten.index_copy.default)
def cut_index_add(call: Call) -> Iterator[Strategy]:
    target, source = call["self"], call["source"]
    if source.num_dims != target.num_dims or call["index"].num_dims != 1:
        return
    along = wrap(call["dim"], target.num_dims)
    for dim in range(target.num_dims):
        if dim != along:
            yield lay(call, {"self": Shard(dim), "source": Shard(dim)}, Shard(dim))
    yield from pass_terms(call, "self", "source")
    if call.op == aten.index_add.default and can_add(target):
        for whole in (Replicate(), Partial()):
            cuts = {"self": whole, "index": Shard(0), "source": Shard(along)}
            yield lay(call, cuts, Partial())


@speller(aten.scatter_add.default, aten.index_add.default)
def spell_added(local: Local) -> Any:
    return local.repeat(self=count_once(local, "self"))


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def cut_index_fill(call: Call) -> Iterator[Strategy]:
    along = wrap(call["dim"], call["self"].num_dims)
    for dim in range(call["self"].num_dims):
        if dim != along:
            yield lay(call, {"self": Shard(dim)}, Shard(dim))
