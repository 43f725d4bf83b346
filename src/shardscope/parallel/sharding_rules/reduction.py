"""Reductions, variances, norms, and argmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Literal

import torch
from torch import Tensor, fx

from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.builders import (
    Dims,
    can_be_sharded,
    detached_max,
    has_nonempty_shards,
    make_strategy,
    normalize_dims,
    overloads,
    partial_strategy,
    safe_sqrt,
    shard_dims,
    shardable_dims,
    source_dims,
    to_compute_dtype,
    to_real_dtype,
)
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall, normalize_dim
from shardscope.parallel.sharding_rules.registry import decomposition, lowering, rule
from shardscope.plan.placements import Partial, Reduction, Shard, product

aten = torch.ops.aten
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_MEANS = (aten.mean.default, aten.mean.dim)
_MAX_OPS = (aten.amax.default, aten.max.default)
_MIN_OPS = (aten.amin.default, aten.min.default)


@rule(
    *(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default),
    *(aten.prod.default, aten.prod.dim_int, aten.nanmean.default),
    *(aten.median.dim, aten.nanmedian.dim, aten.mode.default),
    *overloads("var", "std", "var_mean", "std_mean", "logsumexp", "special_logsumexp"),
    *overloads("linalg_vector_norm", "norm", "frobenius_norm"),
)
def shard_remaining_dims(call: OpCall) -> Iterator[Strategy]:
    """Every dim that is not reduced. Reduced dims are replicated."""
    for new, old in source_dims(call).items():
        if can_be_sharded(call.tensor("self").shape[old]):
            yield make_strategy(call, {"self": Shard(old)}, Shard(new))


@rule(*_SUMS, *_MEANS)
def shard_sum(call: OpCall) -> Iterator[Strategy]:
    yield from shard_remaining_dims(call)
    yield from _shard_reduced_dims(call, "sum")
    before, after = call.tensor("self").dtype, call.outputs[0].dtype
    if before != torch.bool and torch.promote_types(before, after) == after:
        yield partial_strategy(call, "self")


@rule(aten.nansum.default, *overloads("count_nonzero"))
def shard_count(call: OpCall) -> Iterator[Strategy]:
    yield from shard_remaining_dims(call)
    yield from _shard_reduced_dims(call, "sum")


@rule(*_MAX_OPS, *_MIN_OPS)
def shard_max_min(call: OpCall) -> Iterator[Strategy]:
    """Reduced dims give a partial maximum or minimum, but not in training: the gradient goes to the
    rank that holds the extreme, which no rank knows alone.
    """
    yield from shard_remaining_dims(call)
    if not _is_differentiated(call):
        reduction: Reduction = "max" if call.op in _MAX_OPS else "min"
        yield from _shard_reduced_dims(call, reduction)
        if not call.tensor("self").dtype.is_complex:
            yield partial_strategy(call, "self", reduction=reduction)


@rule(aten.aminmax.default)
def shard_aminmax(call: OpCall) -> Iterator[Strategy]:
    yield from shard_remaining_dims(call)
    if not _is_differentiated(call):
        yield from _shard_reduced_dims(call, "min", "max")


@rule(*overloads("any", "all"))
def shard_any_all(call: OpCall) -> Iterator[Strategy]:
    """`any` is the maximum of bools, `all` the minimum."""
    yield from shard_remaining_dims(call)
    reduction: Reduction = "max" if "any" in str(call.op) else "min"
    yield from _shard_reduced_dims(call, reduction)
    if call.tensor("self").dtype == torch.bool:
        yield partial_strategy(call, "self", reduction=reduction)


@rule(*overloads("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"))
def shard_cumulative(call: OpCall) -> Iterator[Strategy]:
    """Every dim but the cumulative one."""
    spec = call.tensor("self")
    yield from shard_dims(call, "self", shardable_dims(spec, call.dim()))
    if call.op is aten.cumsum.default and spec.dtype != torch.bool:
        yield partial_strategy(call, "self")


@lowering(*_MEANS)
def lower_mean(local: LoweringContext) -> fx.Node:
    """The rank's term of a mean over a sharded dim: the shard's sum over the number of all
    elements.
    """
    remaining_dims = set(source_dims(local.call).values())
    spec = local.inputs[0]
    reduced_dims = [dim for dim in range(len(spec.shape)) if dim not in remaining_dims]
    if not any(
        isinstance(placement, Shard) and placement.dim in reduced_dims
        for placement in spec.placements
    ):
        return local.repeat()
    keepdim, dtype = local.arguments.get("keepdim", False), local["dtype"]
    local_sum = local.builder.write(
        aten.sum.dim_IntList, local["self"], reduced_dims, keepdim, dtype=dtype
    )
    num_elements = local.builder.size(product([spec.shape[dim] for dim in reduced_dims]))
    return local.builder.write(aten.div.Scalar, local_sum, num_elements)


def _shard_reduced_dims(call: OpCall, *reductions: Reduction) -> Iterator[Strategy]:
    """Each reduced dim; the outputs are partial with these reductions, one for each output."""
    spec = call.tensor("self")
    for dim in shardable_dims(spec, *source_dims(call).values()):
        # An empty shard has a sum, zero, but no maximum.
        if reductions == ("sum",) or has_nonempty_shards(call, spec.shape[dim]):
            partials = [Partial(reduction) for reduction in reductions]
            yield make_strategy(call, {"self": Shard(dim)}, partials)


def _is_differentiated(call: OpCall) -> bool:
    return call.is_training and call.tensor("self").dtype.is_floating_point


def _var_mean(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _moments(self, dim, correction, keepdim)
    return to_real_dtype(var, self.dtype), mean.to(self.dtype)


def _std_mean(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _moments(self, dim, correction, keepdim)
    return to_real_dtype(safe_sqrt(var), self.dtype), mean.to(self.dtype)


def _var(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _var_mean(self, dim, correction=correction, keepdim=keepdim)[0]


def _std(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _std_mean(self, dim, correction=correction, keepdim=keepdim)[0]


def _moments(
    tensor: Tensor, dim: Dims, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Variance and mean. The mean of squared differences is numerically stable, unlike a difference
    of squares.
    """
    dims = normalize_dims(dim, tensor.dim())
    wide = to_compute_dtype(tensor)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    squares = (centred * centred.conj()).real if centred.is_complex() else centred * centred
    divisor = _num_elements(tensor, dims) - (1 if correction is None else correction)
    divisor = torch.sym_max(divisor, 0)  # type: ignore[no-untyped-call]
    var = squares.sum(dims, keepdim=keepdim) / divisor
    return var, mean if keepdim or not dims else mean.squeeze(dims)


def _num_elements(tensor: Tensor, dims: list[int]) -> int:
    count = 1
    for dim in dims:
        count = count * tensor.shape[dim]
    return count


def _register_variance(name: str, decompose: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> None:
    """Register the decomposition for all three overloads of the statistic `name`."""
    packet = getattr(aten, name)

    @decomposition(packet.default)
    def of_all(self: Tensor, unbiased: bool = True) -> Tensor | tuple[Tensor, Tensor]:
        return decompose(self, correction=int(unbiased))

    @decomposition(packet.dim)
    def along_dims(
        self: Tensor, dim: Dims, unbiased: bool = True, keepdim: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        return decompose(self, dim, correction=int(unbiased), keepdim=keepdim)

    decomposition(packet.correction)(decompose)


_register_variance("var_mean", _var_mean)
_register_variance("std_mean", _std_mean)
_register_variance("var", _var)
_register_variance("std", _std)


@decomposition(aten.logsumexp.default, aten.special_logsumexp.default)
def decompose_logsumexp(self: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    dims = normalize_dims(dim, self.dim())
    wide = to_compute_dtype(self)
    maximum = detached_max(wide, dims)
    # An infinite maximum would make the difference nan.
    maximum = torch.where(maximum.abs() == inf, 0.0, maximum)
    result = (wide - maximum).exp().sum(dims, keepdim=True).log() + maximum
    return (result if keepdim or not dims else result.squeeze(dims)).to(self.dtype)


@decomposition(aten.linalg_vector_norm.default)
def decompose_norm(
    self: Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    cast = self if dtype is None else self.to(dtype)
    norm = _norm(to_compute_dtype(cast).abs(), ord, normalize_dims(dim, self.dim()), keepdim)
    return to_real_dtype(norm, cast.dtype)


@decomposition(aten.norm.Scalar)
def decompose_norm_of_all(self: Tensor, p: float = 2) -> Tensor:
    return decompose_norm(self, p)


@decomposition(aten.norm.ScalarOpt_dtype)
def decompose_cast_norm_of_all(self: Tensor, p: float | None, *, dtype: torch.dtype) -> Tensor:
    return decompose_norm(self, 2 if p is None else p, dtype=dtype)


@decomposition(aten.norm.ScalarOpt_dim)
def decompose_norm_along_dims(
    self: Tensor, p: float | None, dim: Dims, keepdim: bool = False
) -> Tensor:
    return decompose_norm(self, 2 if p is None else p, dim, keepdim)


@decomposition(aten.norm.ScalarOpt_dim_dtype)
def decompose_cast_norm_along_dims(
    self: Tensor, p: float | None, dim: Dims, keepdim: bool, *, dtype: torch.dtype
) -> Tensor:
    return decompose_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


@decomposition(aten.frobenius_norm.dim)
def decompose_frobenius_norm(self: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    return decompose_norm(self, 2, dim, keepdim)


def _norm(magnitudes: Tensor, order: float, dims: list[int], keepdim: bool) -> Tensor:
    if order == inf:
        return magnitudes.amax(dims, keepdim)
    if order == -inf:
        return magnitudes.amin(dims, keepdim)
    if order == 0:
        return (magnitudes != 0).to(magnitudes.dtype).sum(dims, keepdim)
    if order == 1:
        return magnitudes.sum(dims, keepdim)
    if order == 2:
        return safe_sqrt((magnitudes * magnitudes).sum(dims, keepdim))
    return magnitudes.pow(order).sum(dims, keepdim).pow(1 / order)


_Reduce = Callable[..., Tensor]


def _register_argmax(name: Literal["max", "min"], find_extreme: _Reduce) -> None:
    """Register the decompositions of amax, max and argmax, or of amin, min and argmin.

    `find_extreme` is torch.amax or torch.amin.
    """
    packet = getattr(aten, name)

    @decomposition(getattr(aten, f"a{name}").default)
    def among_dims(self: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
        return _mean_of_extremes(self, normalize_dims(dim, self.dim()), keepdim, find_extreme)

    @decomposition(packet.default)
    def among_all(self: Tensor) -> Tensor:
        return _mean_of_extremes(self, normalize_dims(None, self.dim()), False, find_extreme)

    @decomposition(packet.dim)
    def along_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        """The value at the first index, which alone gets the gradient."""
        candidates, first = _find_first(self, normalize_dim(dim, self.dim()), find_extreme)
        value = torch.where(candidates == first, self, 0).sum(dim, keepdim).to(self.dtype)
        return value, first if keepdim else first.squeeze(dim)

    @decomposition(getattr(aten, f"arg{name}").default)
    def index(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None:
            first = _find_first(self.reshape(-1), 0, find_extreme)[1]
            return first.reshape([1] * self.dim() if keepdim else [])
        first = _find_first(self, normalize_dim(dim, self.dim()), find_extreme)[1]
        return first if keepdim else first.squeeze(dim)


def _mean_of_extremes(
    tensor: Tensor, dims: list[int], keepdim: bool, find_extreme: _Reduce
) -> Tensor:
    """The maximum as the mean of all elements equal to it, which share its gradient as in torch."""
    if not tensor.is_floating_point():
        return find_extreme(tensor, dims, keepdim)
    is_extreme = _is_extreme(tensor, find_extreme(tensor.detach(), dims, True))
    return torch.where(is_extreme, tensor, 0.0).sum(dims, keepdim) / is_extreme.sum(dims, keepdim)


def _find_first(tensor: Tensor, dim: int, find_extreme: _Reduce) -> tuple[Tensor, Tensor]:
    """The index of each maximum, or the dim's size elsewhere; and the first such index."""
    size = tensor.shape[dim]
    indices = torch.arange(size, device=tensor.device)
    indices = indices.reshape([-1] + [1] * (tensor.dim() - dim - 1))
    is_extreme = _is_extreme(tensor, find_extreme(tensor.detach(), dim, True))
    candidates = torch.where(is_extreme, indices, size)
    return candidates, candidates.amin(dim, keepdim=True)


def _is_extreme(tensor: Tensor, extreme: Tensor) -> Tensor:
    """Where the tensor equals the extreme. NaN counts as the extreme but does not equal itself."""
    is_equal = tensor == extreme
    return is_equal | tensor.isnan() if tensor.is_floating_point() else is_equal


_register_argmax("max", torch.amax)
_register_argmax("min", torch.amin)
