"""Views, permutations, expand and repeat, and glu."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import sympy
import torch
from torch import fx

from shardscope._torch.dispatch import private_aten_op
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    can_be_sharded,
    make_strategy,
    overloads,
    propagate_partial,
    shard_dims,
    shardable_dims,
    source_dims,
    with_any_placement,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall, normalize_dim
from shardscope.parallel.sharding_rules.registry import lowering, rule
from shardscope.plan.placements import Shard, Size, divides, product

DimGroup = tuple[list[int], list[int]]
"""Dims of the old shape, and the dims of the new shape that have the same elements."""


def group_dims(before: Sequence[Size], after: Sequence[Size]) -> Iterator[DimGroup]:
    """The smallest groups of adjacent dims that a reshape from `before` to `after` splits, merges
    or leaves as they are; dims of size 1 are left out.

    From (2, 3, 4) to (6, 4), these are ([0, 1], [0]) and ([2], [1]).
    """
    old = [dim for dim, size in enumerate(before) if can_be_sharded(size)]
    new = [dim for dim, size in enumerate(after) if can_be_sharded(size)]
    ends = _matching_prefixes([before[dim] for dim in old], [after[dim] for dim in new])
    start = (0, 0)
    for end in ends:
        yield old[start[0] : end[0]], new[start[1] : end[1]]
        start = end


def _matching_prefixes(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[int, int]]:
    """Pairs of prefix lengths of both shapes that have the same number of elements."""
    return [
        (old, new)
        for old in range(1, len(before) + 1)
        for new in range(1, len(after) + 1)
        if _is_equal_size(product(before[:old]), product(after[:new]))
    ]


def reshape_shard(
    shard: Shard, before: Sequence[Size], after: Sequence[Size], *, group: DimGroup, num_ranks: int
) -> Shard | None:
    """The placement after a reshape of a tensor that is placed as `shard`, whose dim is in `group`:
    every rank holds the same elements. None if no placement has them.
    """
    old, new = group
    at = old.index(shard.dim)
    size = before[shard.dim]
    blocks_before = product([before[dim] for dim in old[:at]])
    rest = product([before[dim] for dim in old[at + 1 :]])
    segments = () if len(set(shard.segments)) == 1 else shard.segments
    if shard.segments and sum(shard.segments) != size:
        return None  # segments of the full dim, of which an earlier axis left a shard
    if segments:
        return _reshape_segments(shard, rest, after, new, num_ranks) if at == 0 else None
    outer = len(shard.segments) or shard.outer
    if not divides(outer * num_ranks, size):
        return None
    return _shard_of_blocks(blocks_before * outer, after, new, num_ranks)


def _shard_of_blocks(
    num_blocks: Size, after: Sequence[Size], dims: Sequence[int], num_ranks: int
) -> Shard | None:
    """The placement, along one of `dims`, in which the flattened dims consist of `num_blocks`
    blocks that are each sharded; None if there is none.
    """
    num_outer: Size = 1
    for dim in dims:
        outer = quotient(num_blocks, num_outer)
        if outer is not None and divides(outer * num_ranks, after[dim]):
            return Shard(dim, outer)
        num_outer = num_outer * after[dim]
    return None


def _reshape_segments(
    shard: Shard, rest: Size, after: Sequence[Size], dims: Sequence[int], num_ranks: int
) -> Shard | None:
    """Segments of different sizes stay segments, in units of the new dim's elements."""
    unit = product([after[dim] for dim in dims[1:]])
    folded = [quotient(segment * rest, unit) for segment in shard.segments]
    if not all(isinstance(size, int) and size % num_ranks == 0 for size in folded):
        return None
    if not all(segment % num_ranks == 0 for segment in shard.segments):
        return None
    return Shard(dims[0], segments=tuple(size for size in folded if isinstance(size, int)))


def quotient(size: Size, divisor: Size) -> Size | None:
    """`size / divisor`, or None if it is not an integer for every value of the symbols."""
    if not divides(divisor, size):
        return None
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor
    ratio = sympy.cancel(sympy.sympify(size) / divisor)
    return int(ratio) if ratio.is_Integer else ratio


def _is_equal_size(left: Size, right: Size) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return bool(sympy.expand(left - right) == 0)


aten = torch.ops.aten

_WITH_SIZES = (
    *(aten.view.default, aten.reshape.default, private_aten_op("unsafe_view")),
    *(aten.unflatten.int, private_aten_op("reshape_alias")),
)
_LIKE_ANOTHER = (aten.view_as.default, aten.reshape_as.default)
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


@rule(
    *_WITH_SIZES,
    *_SQUEEZES,
    *(aten.flatten.using_ints, aten.ravel.default, aten.unsqueeze.default),
    *(aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default),
)
def shard_reshape(call: OpCall) -> Iterator[Strategy]:
    """Every dim that each rank can reshape on its own. This depends on the shapes of input and
    output; size arguments are those of the full tensor and are replaced by the lowering.
    """
    before, after = call.tensor("self").shape, call.outputs[0].shape
    for group in group_dims(before, after):
        old, new = group
        if len(old) == len(new) == 1:
            yield make_strategy(call, {"self": Shard(old[0])}, Shard(new[0]))
        else:
            yield from _shard_reshaped_group(call, group)
    yield from propagate_partial(call, "self", offer_all=True)


@rule(*_LIKE_ANOTHER)
def shard_reshape_like(call: OpCall) -> Iterator[Strategy]:
    """As shard_reshape; only the shape of the second tensor matters."""
    for strategy in shard_reshape(call):
        yield from with_any_placement(call, strategy, "other")


def _shard_reshaped_group(call: OpCall, group: DimGroup) -> Iterator[Strategy]:
    before, after = call.tensor("self").shape, call.outputs[0].shape
    placement = call.placement_of("self")
    contiguous = [Shard(dim) for dim in group[0]]
    is_inside = isinstance(placement, Shard) and placement.dim in group[0]
    for shard in dict.fromkeys([*contiguous, *([placement] if is_inside else [])]):
        assert isinstance(shard, Shard)
        new = reshape_shard(shard, before, after, group=group, num_ranks=call.num_ranks)
        if new is not None:
            yield make_strategy(call, {"self": shard}, new, is_permutation_invariant=False)


@lowering(*_WITH_SIZES, *_LIKE_ANOTHER)
def lower_reshape(local: LoweringContext) -> fx.Node:
    """Reshape to the local sizes. Not a view: a shard may be strided where the full
    tensor is not.
    """
    return local.builder.write(aten.reshape.default, local["self"], local.output_shape())


@lowering(*_SQUEEZES)
def lower_squeeze(local: LoweringContext) -> fx.Node:
    """Squeeze only the dims that are squeezed globally: a shard may have more dims of size 1."""
    shape = local.call.tensor("self").shape
    requested = local.call.arguments.get("dim")
    dims = (
        range(len(shape))
        if requested is None
        else [requested]
        if isinstance(requested, int)
        else requested
    )
    squeezed_dims = [dim for dim in dims if shape[dim] == 1]
    return local.builder.write(aten.squeeze.dims, local["self"], squeezed_dims)


@rule(
    *(aten.permute.default, aten.transpose.int, aten.swapaxes.default, aten.swapdims.default),
    *(aten.t.default, aten.numpy_T.default, aten.mT.default, aten.mH.default),
    *(aten.adjoint.default, aten.matrix_H.default),
    *overloads("movedim", "moveaxis"),
)
def shard_permute(call: OpCall) -> Iterator[Strategy]:
    """Every dim, at its new position."""
    for new, old in source_dims(call).items():
        if can_be_sharded(call.tensor("self").shape[old]):
            yield make_strategy(call, {"self": Shard(old)}, Shard(new))
    yield from propagate_partial(call, "self", offer_all=True)


@rule(aten.diagonal.default)
def shard_diagonal(call: OpCall) -> Iterator[Strategy]:
    """Every dim but the two of the diagonal, which become the last."""
    spec = call.tensor("self")
    for new, old in enumerate(spec.dims_except(call.dim("dim1"), call.dim("dim2"))):
        if can_be_sharded(spec.shape[old]):
            yield make_strategy(call, {"self": Shard(old)}, Shard(new))
    yield from propagate_partial(call, "self", offer_all=True)


_EXPANDS = (aten.expand.default, aten.broadcast_to.default)
_REPEATS = (aten.repeat.default, aten.tile.default)


@rule(*_EXPANDS)
def shard_expand(call: OpCall) -> Iterator[Strategy]:
    """Existing dims stay sharded; each rank creates its own shard of the new dims.

    A size other than 1 is not expanded. It equals the output's, although symbolic sizes may express
    that in different symbols, those of two inputs that export did not relate.
    """
    yield from _shard_existing_dims(call, shardable_dims(call.tensor("self")))
    for dim in _new_dims(call):
        yield make_strategy(call, {}, Shard(dim))
    yield from propagate_partial(call, "self", offer_all=True)


@rule(aten.expand_as.default)
def shard_expand_like(call: OpCall) -> Iterator[Strategy]:
    """As shard_expand; only the shape of the second tensor matters."""
    for strategy in shard_expand(call):
        yield from with_any_placement(call, strategy, "other")


@rule(*_REPEATS)
def shard_repeat(call: OpCall) -> Iterator[Strategy]:
    """As shard_expand; a repeated dim becomes that many blocks, each sharded in the same way."""
    before, after = call.tensor("self").shape, call.outputs[0].shape
    offset = len(after) - len(before)
    dims = shardable_dims(call.tensor("self"))
    times = {dim: quotient(after[dim + offset], before[dim]) for dim in dims}
    yield from _shard_existing_dims(call, [dim for dim in dims if times[dim] == 1])
    for dim in _new_dims(call):
        yield make_strategy(call, {}, Shard(dim))
    yield from propagate_partial(call, "self", offer_all=True)
    for dim, count in times.items():
        if count is not None and count != 1:
            repeat_shard = partial(_repeat_blocks, times=count)
            yield from _shard_repeated_dim(call, dim, dim + offset, repeat_shard)


@rule(aten.repeat_interleave.self_int)
def shard_repeat_interleave(call: OpCall) -> Iterator[Strategy]:
    """Each index is repeated in place, so a shard becomes a longer shard."""
    yield from propagate_partial(call, "self", offer_all=True)
    before, after = call.tensor("self").shape, call.outputs[0].shape
    if call["dim"] is None and len(before) != 1:
        return  # the tensor is flattened first
    repeated_dim = normalize_dim(call["dim"] or 0, len(before))
    yield from shard_dims(call, "self", shardable_dims(call.tensor("self"), repeated_dim))
    times = quotient(after[repeated_dim], before[repeated_dim])
    if can_be_sharded(before[repeated_dim]) and times is not None:
        yield from _shard_repeated_dim(
            call, repeated_dim, repeated_dim, partial(_lengthen_segments, times=times)
        )


@lowering(*_EXPANDS, aten.expand_as.default)
def lower_expand(local: LoweringContext) -> fx.Node:
    return local.builder.write(aten.expand.default, local["self"], local.output_shape())


@lowering(*_REPEATS)
def lower_repeat(local: LoweringContext) -> fx.Node:
    """Repeat as often as the local output is longer than the local input."""
    shape = local.inputs[0].local_shape(local.coordinate)
    output_shape = local.outputs[0].local_shape(local.coordinate)
    padded = [1] * (len(output_shape) - len(shape)) + list(shape)
    times = [quotient(new, old) or 1 for old, new in zip(padded, output_shape, strict=True)]
    return local.builder.write(
        aten.repeat.default, local["self"], [local.builder.size(count) for count in times]
    )


@lowering(aten.repeat_interleave.self_int)
def lower_repeat_interleave(local: LoweringContext) -> fx.Node:
    return local.repeat(output_size=None)


def _shard_existing_dims(call: OpCall, dims: Iterable[int]) -> Iterator[Strategy]:
    """These dims of the input, which are dims of the output, counted from the last."""
    offset = call.outputs[0].num_dims - call.tensor("self").num_dims
    for dim in dims:
        yield make_strategy(call, {"self": Shard(dim)}, Shard(dim + offset))


def _new_dims(call: OpCall) -> Iterator[int]:
    before, after = call.tensor("self").shape, call.outputs[0].shape
    offset = len(after) - len(before)
    for dim, size in enumerate(after):
        if can_be_sharded(size) and (dim < offset or before[dim - offset] == 1):
            yield dim


def _shard_repeated_dim(
    call: OpCall, old: int, new: int, repeat_shard: Callable[[Shard], Shard]
) -> Iterator[Strategy]:
    placement = call.placement_of("self")
    is_here = isinstance(placement, Shard) and placement.dim == old
    for shard in dict.fromkeys([Shard(old), *([placement] if is_here else [])]):
        assert isinstance(shard, Shard)
        output = repeat_shard(shard).at(new)
        yield make_strategy(call, {"self": shard}, output, is_permutation_invariant=False)


def _repeat_blocks(shard: Shard, times: Size) -> Shard:
    if shard.segments:
        return Shard(shard.dim, segments=shard.segments * times)
    return Shard(shard.dim, shard.outer * times)


def _lengthen_segments(shard: Shard, times: Size) -> Shard:
    return Shard(shard.dim, shard.outer, tuple(size * times for size in shard.segments))


@rule(aten.glu.default)
def shard_glu(call: OpCall) -> Iterator[Strategy]:
    """Every dim; the halved dim only if both halves are sharded equally, so that each rank halves
    its shard.
    """
    spec, halved = call.tensor("self"), call.dim()
    yield from shard_dims(call, "self", shardable_dims(spec, halved))
    placement = call.placement_of("self")
    candidates = [
        Shard(halved, outer=2),
        *([placement] if isinstance(placement, Shard) else []),
    ]
    for shard in dict.fromkeys(candidates):
        half = _shard_of_half(shard) if shard.dim == halved else None
        if half is not None and _is_even(shard, spec.shape[halved], call.num_ranks):
            yield make_strategy(call, {"self": shard}, half, is_permutation_invariant=False)


def _shard_of_half(shard: Shard) -> Shard | None:
    """The Shard of one half, if both halves are sharded in the same blocks."""
    middle = len(shard.segments) // 2
    if shard.segments:
        left, right = shard.segments[:middle], shard.segments[middle:]
        return None if left != right else Shard(shard.dim, segments=left if middle > 1 else ())
    outer = quotient(shard.outer, 2)
    return None if outer is None else Shard(shard.dim, outer)


def _is_even(shard: Shard, size: Size, num_ranks: int) -> bool:
    if shard.segments:
        return all(segment % num_ranks == 0 for segment in shard.segments)
    return divides(shard.outer * num_ranks, size)
