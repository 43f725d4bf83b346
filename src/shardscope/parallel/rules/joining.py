"""Tensors joined along a dim that is there already, or along a new one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.placements import Placement, Replicate, Shard
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy, TensorSpec
from shardscope.parallel.rules.dims import wrap
from shardscope.parallel.rules.terms import (
    blocks_of,
    keep_terms,
    lay,
    offered_to,
    shard_of,
)

__all__ = ["cut_cat", "cut_hstack", "cut_stack", "cut_vstack"]

aten = torch.ops.aten


@rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cut_cat(call: Call) -> Iterator[Strategy]:
    yield from _cut_joined(call, wrap(call["dim"], call.outputs[0].num_dims))


@rule(aten.hstack.default)
def cut_hstack(call: Call) -> Iterator[Strategy]:
    num_dims = call.outputs[0].num_dims
    if _have_dims(call, num_dims):
        yield from _cut_joined(call, min(1, num_dims - 1))


@rule(aten.vstack.default)
def cut_vstack(call: Call) -> Iterator[Strategy]:
    if _have_dims(call, call.outputs[0].num_dims):
        yield from _cut_joined(call, 0)
    elif _have_dims(call, 1):
        yield lay(call, {"tensors": Shard(0)}, Shard(1))
        yield from keep_terms(call, "tensors")


@rule(aten.stack.default)
def cut_stack(call: Call) -> Iterator[Strategy]:
    new = wrap(call["dim"], call.outputs[0].num_dims)
    for dim in range(call["tensors"][0].num_dims):
        yield lay(call, {"tensors": Shard(dim)}, Shard(dim + (dim >= new)))
    yield from keep_terms(call, "tensors")


def _have_dims(call: Call, num_dims: int) -> bool:
    return all(one.num_dims == num_dims for one in call["tensors"])


def _cut_joined(call: Call, joined: int) -> Iterator[Strategy]:
    for dim in range(call.outputs[0].num_dims):
        if dim != joined:
            cuts = [_cut_unless_empty(one, Shard(dim)) for one in call["tensors"]]
            yield lay(call, {"tensors": cuts}, Shard(dim))
    yield from keep_terms(call, "tensors")
    yield from _cut_along(call, joined)


def _cut_unless_empty(spec: TensorSpec, cut: Shard) -> Placement:
    """torch takes an empty vector among tensors of any number of dims, and leaves it out."""
    return Replicate() if spec.shape == (0,) else cut


def _cut_along(call: Call, dim: int) -> Iterator[Strategy]:
    """Each tensor is a block of the result, or several if it comes in blocks."""
    plain: list[Placement] = [_cut_unless_empty(one, Shard(dim)) for one in call["tensors"]]
    offered = [
        offer if isinstance(offer, Shard) and offer.dim == dim else other
        for offer, other in zip(offered_to(call, "tensors"), plain, strict=True)
    ]
    yield from _cut_open(call, dim, plain)
    for cuts in (plain, offered) if offered != plain else (plain,):
        blocks = _blocks(call, cuts)
        if blocks is not None and all(one % call.num_ranks == 0 for one in blocks):
            yield lay(call, {"tensors": cuts}, shard_of(dim, blocks), is_order_blind=False)


def _cut_open(call: Call, dim: int, plain: list[Placement]) -> Iterator[Strategy]:
    """Blocks of a size that is left open, if they are all of one."""
    sizes = {one.shape[dim] for one in call["tensors"] if one.num_dims > dim}
    if len(sizes) == 1 and not isinstance(sizes.pop(), int):
        cut = Shard(dim, outer=len(plain))
        yield lay(call, {"tensors": plain}, cut, is_order_blind=False)


def _blocks(call: Call, cuts: list[Placement]) -> list[int] | None:
    blocks: list[int] = []
    for spec, cut in zip(call["tensors"], cuts, strict=True):
        if isinstance(cut, Shard):
            own = blocks_of(cut, spec.shape[cut.dim])
            if own is None:
                return None
            blocks += own
    return blocks
