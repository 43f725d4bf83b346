"""The verdict on one tensor: dtypes and shapes, then NaNs, then numbers against their noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from msgspec import structs

from shardscope.numerics.noise import (
    Distance,
    Floor,
    as_exact,
    epsilon,
    find_worst,
    is_finite,
    measure,
)
from shardscope.parallel.parity.cases import Case
from shardscope.parallel.parity.layouts import Layout, ranks_along, shard_layouts
from shardscope.record import FINE, Agreement, Suspect, TensorKind, TensorVerdict, compress_ranks

__all__ = ["Judged", "describe_dtype", "judge", "name_dtype"]


@final
@dataclass(frozen=True, eq=False)
class Judged:
    """A case with its verdict.

    `full` has the full tensor of each rank, put together from shards by `layout` where there are
    any; it is empty where the tensor is right. `dtype` is that of the ranks where it is neither the
    single device's nor one that the caller allows, the coarsest if there are several.
    """

    case: Case
    verdict: TensorVerdict
    full: tuple[torch.Tensor, ...] = ()
    layout: Layout | None = None
    dtype: torch.dtype | None = None


class _Far(NamedTuple):
    """How far off the worst rank is, and where it is most."""

    distance: Distance
    place: int  # index into the flattened tensor


def judge(case: Case) -> Judged:
    """The verdict on one tensor."""
    reference = case.reference
    present = [rank for rank, tensor in enumerate(case.ranks) if tensor is not None]
    if reference is None:
        return _judge_extra(case, present)
    absent = [rank for rank in range(len(case.ranks)) if rank not in present]
    if not absent:
        return _judge_values(case, [tensor for tensor in case.ranks if tensor is not None])
    is_zero = not bool(reference.any())
    if is_zero and not any(bool(_tensor_of(case, rank).any()) for rank in present):
        return _settle(case, Agreement.EQUAL, "zero on the single device, and none on the ranks")
    where = "no rank has one" if not present else "some ranks have none"
    return _settle(case, Agreement.MISSING, f"{where}; the single device does", absent)


def _judge_extra(case: Case, present: Sequence[int]) -> Judged:
    nonzero = [rank for rank in present if bool(_tensor_of(case, rank).any())]
    if not nonzero:
        return _settle(case, Agreement.EQUAL, "zero, and the single device has none")
    return _settle(case, Agreement.EXTRA, "the single device has none", nonzero)


def _tensor_of(case: Case, rank: int) -> torch.Tensor:
    tensor = case.ranks[rank]
    assert tensor is not None
    return tensor


def _judge_values(case: Case, tensors: Sequence[torch.Tensor]) -> Judged:
    assert case.reference is not None
    wanted = case.reference.dtype
    ranks = [rank for rank, own in enumerate(tensors) if not _may_be(own.dtype, wanted, case)]
    if ranks:
        return _judge_other_dtype(case, tensors, ranks)
    return _judge_layouts(case, tensors)


def _judge_other_dtype(case: Case, tensors: Sequence[torch.Tensor], ranks: Sequence[int]) -> Judged:
    """The verdict where these ranks have another dtype: values may be off by its rounding."""
    reference = case.reference
    assert reference is not None
    dtype = max((tensors[rank].dtype for rank in ranks), key=epsilon)
    common = {_find_widest(own.dtype) for own in (reference, *tensors)}
    if len(common) > 1:  # such as integers instead of floating point
        judged = _settle(case, Agreement.DIFFERS, "", ranks)
    else:
        (wide,) = common
        widened = replace(
            case,
            reference=reference.to(wide),
            floor=None if case.floor is None else case.floor.raise_to(dtype),
            calls=tuple(tuple(own.to(wide) for own in calls) for calls in case.calls),
        )
        judged = _judge_layouts(widened, [own.to(wide) for own in tensors])
    judged = replace(judged, case=replace(judged.case, reference=reference), dtype=dtype)
    fact = describe_dtype(judged)
    verdict = structs.replace(
        judged.verdict,
        dtype=name_dtype(reference.dtype),
        noise=_find_noise(case) if judged.verdict.noise is not None else None,
        detail="; ".join(filter(None, (fact, judged.verdict.detail))),
    )
    is_coarser = epsilon(dtype) > epsilon(reference.dtype)
    if verdict.agreement is Agreement.CLOSE and is_coarser:
        verdict = structs.replace(
            verdict,
            agreement=Agreement.ROUNDED,
            suspect=Suspect.ROUNDING,
            ranks=compress_ranks(ranks),
        )
    return replace(judged, verdict=verdict)


def describe_dtype(judged: Judged) -> str:
    """A clause about a dtype that is not the single device's."""
    assert judged.dtype is not None
    assert judged.case.reference is not None
    return f"dtype is {name_dtype(judged.dtype)}, not {name_dtype(judged.case.reference.dtype)}"


def _find_widest(dtype: torch.dtype) -> torch.dtype:
    """The widest dtype of the same kind: dtypes of different kinds are not compared."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _judge_layouts(case: Case, tensors: Sequence[torch.Tensor]) -> Judged:
    """The verdict on full tensors, or on shards that make up the full tensor."""
    assert case.reference is not None
    shape = case.reference.shape
    if all(tensor.shape == shape for tensor in tensors):
        return _judge_averaged(case, tensors, _judge_full(case, tensors))
    nearest: Judged | None = None
    for layout in shard_layouts(tensors, shape, case.sizes):
        for full in _join(case, tensors, layout):
            judged = replace(_judge_full(case, full), layout=layout)
            if judged.verdict.agreement in FINE:
                return judged
            if nearest is None or _error(judged) < _error(nearest):
                nearest = judged
    if nearest is not None:
        return _choose_wrong_shards(nearest, tensors)
    odd = [rank for rank, tensor in enumerate(tensors) if tensor.shape != shape]
    fact = f"shape is {list(tensors[odd[0]].shape)}, and no such shards make up {list(shape)}"
    return _settle(case, Agreement.RESHAPED, fact, odd)


def _choose_wrong_shards(judged: Judged, shards: Sequence[torch.Tensor]) -> Judged:
    """The verdict on plain shards, with only those ranks whose own shard differs."""
    case, layout = judged.case, judged.layout
    joined = None if layout is None else layout.join(shards)
    is_of_shards = joined is not None and all(
        torch.equal(own, full) for own, full in zip(joined, judged.full, strict=True)
    )
    if layout is None or case.target is None or not is_of_shards:
        return judged
    parts = layout.split(as_exact(case.target), shards)
    off = [
        rank
        for rank, (shard, part) in enumerate(zip(shards, parts, strict=True))
        if not _is_near(as_exact(shard), part, case.floor)
    ]
    verdict = structs.replace(judged.verdict, ranks=compress_ranks(off) or judged.verdict.ranks)
    return replace(judged, verdict=verdict)


def _is_near(value: torch.Tensor, target: torch.Tensor, floor: Floor | None) -> bool:
    if floor is None:
        return torch.equal(value, target)
    return _same_nonfinite(value, target) and floor.allows(measure(value, target))


def _choose_wrong_regions(
    case: Case, full: Sequence[torch.Tensor], off: Sequence[int]
) -> Sequence[int]:
    """Of the ranks whose gathered tensor differs, those whose own part of it does, if known."""
    if case.target is None or not case.regions or len(case.regions) != len(full):
        return off
    target, own = as_exact(case.target), []
    for rank in off:
        region = case.regions[rank]
        if region is None:
            return off
        part = tuple(slice(*bounds) for bounds in region)
        if not _is_near(as_exact(full[rank])[part], target[part], case.floor):
            own.append(rank)
    return own or off


def _join(
    case: Case, tensors: Sequence[torch.Tensor], layout: Layout
) -> Iterator[Sequence[torch.Tensor]]:
    """Full tensors of what each rank has of all calls, or of each call in turn."""
    assert case.reference is not None
    joined = [layout.join(tensors)]
    if case.calls:
        calls = [layout.join(call) for call in zip(*case.calls, strict=True)]
        along = min(case.batch_dim, case.reference.ndim - 1)
        if all(full is not None for full in calls):
            by_rank = zip(*(full for full in calls if full is not None), strict=True)
            joined.append([torch.cat(full, along) for full in by_rank])
    for full in joined:
        if full is not None and all(tensor.shape == case.reference.shape for tensor in full):
            yield full


def _error(judged: Judged) -> float:
    error = judged.verdict.error
    return math.inf if error is None else error


def _judge_averaged(case: Case, tensors: Sequence[torch.Tensor], judged: Judged) -> Judged:
    """Of an output that is reduced over the batch, where that is sharded, each rank has its own.

    Averaged over ranks it may be right, such as a loss; or summed, such as a count.
    """
    is_fine = judged.verdict.agreement in FINE
    if is_fine or not case.batch_axes or case.kind is not TensorKind.OUTPUT:
        return judged
    sums = [as_exact(tensor) for tensor in tensors]
    for axis in case.batch_axes:
        for line in ranks_along(case.sizes, axis):
            total = torch.stack([sums[rank] for rank in line]).sum(0)
            for rank in line:
                sums[rank] = total
    count = math.prod(case.sizes[axis] for axis in case.batch_axes)
    for divisor in (count, 1):
        reduced = _judge_full(case, [(total / divisor).to(tensors[0].dtype) for total in sums])
        if reduced.verdict.agreement in FINE:
            return reduced
    return judged


def _may_be(dtype: torch.dtype, wanted: torch.dtype, case: Case) -> bool:
    if dtype == wanted:
        return True
    if case.precision is None or not (dtype.is_floating_point and wanted.is_floating_point):
        return False
    return epsilon(dtype) <= epsilon(case.precision)


def _judge_full(case: Case, full: Sequence[torch.Tensor]) -> Judged:
    assert case.reference is not None
    distinct = _distinct(full)
    if case.floor is None:
        off = [rank for rank, one in enumerate(distinct) if not torch.equal(one, case.reference)]
        return _settle_off(case, full, off, _has_disagreement(distinct, None), None)
    assert case.target is not None
    exacts = {id(one): as_exact(one) for one in distinct}
    own = as_exact(case.reference)
    is_same = {key: _same_nonfinite(one, own) for key, one in exacts.items()}
    nonfinite = [rank for rank, one in enumerate(distinct) if not is_same[id(one)]]
    if nonfinite:
        fact = _describe_nonfinite(distinct[nonfinite[0]], case.reference)
        return _settle(case, Agreement.NONFINITE, fact, nonfinite, full=tuple(full))
    measured = {key: measure(one, case.target) for key, one in exacts.items()}
    worst = max(distinct, key=lambda one: measured[id(one)].rms)
    far = _Far(measured[id(worst)], find_worst(exacts[id(worst)], case.target))
    if all(torch.equal(one, case.reference) for one in dict.fromkeys(distinct)):
        return _settle(case, Agreement.EQUAL, far=far)
    off = [rank for rank, one in enumerate(distinct) if not case.floor.allows(measured[id(one)])]
    has_disagreement = bool(off) and _has_disagreement(
        [exacts[id(one)] for one in distinct], case.floor
    )
    return _settle_off(case, full, off, has_disagreement, far)


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, where equal ones are one and the same."""
    found: list[torch.Tensor] = []
    result = []
    for tensor in tensors:
        known = (one for one in found if one is tensor or torch.equal(one, tensor))
        same = next(known, None)
        if same is None:
            found.append(tensor)
            same = tensor
        result.append(same)
    return result


def _has_disagreement(full: Sequence[torch.Tensor], floor: Floor | None) -> bool:
    others = [one for one in full if one is not full[0]]
    if floor is None:
        return bool(others)
    return any(not floor.allows(measure(one, full[0])) for one in others)


def _settle_off(
    case: Case,
    full: Sequence[torch.Tensor],
    off: Sequence[int],
    has_disagreement: bool,
    far: _Far | None,
) -> Judged:
    if not off:
        agreement = Agreement.EQUAL if far is None else Agreement.CLOSE
    else:
        agreement = Agreement.RANKS_DISAGREE if has_disagreement else Agreement.DIFFERS
        off = _choose_wrong_regions(case, full, off)
    return _settle(case, agreement, "", off, far=far, full=tuple(full))


def _settle(
    case: Case,
    agreement: Agreement,
    detail: str = "",
    ranks: Sequence[int] = (),
    *,
    far: _Far | None = None,
    full: tuple[torch.Tensor, ...] = (),
) -> Judged:
    present = (tensor for tensor in (case.reference, *case.ranks) if tensor is not None)
    tensor = next(present)
    verdict = TensorVerdict(
        name=case.name,
        kind=case.kind,
        agreement=agreement,
        shape=tuple(tensor.shape),
        dtype=name_dtype(tensor.dtype),
        error=_relate(far.distance.rms, case.floor) if far and case.floor else None,
        noise=_find_noise(case) if far else None,
        max_error=far.distance.largest if far else None,
        worst_index=_unravel(far.place, tensor) if far else None,
        ranks=compress_ranks(ranks),
        detail=detail,
    )
    if agreement in FINE:  # a model has many of them, and nothing is left to explain
        return Judged(replace(case, target=None, ranks=(), calls=()), verdict)
    return Judged(case, verdict, full)


def _find_noise(case: Case) -> float | None:
    """The noise of the single device, relative to its numbers; None for integers."""
    return None if case.floor is None else _relate(case.floor.rms, case.floor)


def _relate(error: float, floor: Floor) -> float | None:
    """An error relative to the numbers; where those are zero there is no such thing."""
    if floor.scale > 0:
        return min(error / floor.scale, 1e300)
    return 0.0 if error == 0 else None


def _unravel(index: int, tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.is_complex():
        index //= 2  # its parts lie beside each other
    if not tensor.numel():
        return ()
    places = torch.unravel_index(torch.tensor(index), tensor.shape)
    return tuple(int(one) for one in places)


def _same_nonfinite(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    if is_finite(value) and is_finite(wanted):
        return True
    is_same_nan = torch.equal(torch.isnan(value), torch.isnan(wanted))
    return is_same_nan and all(
        torch.equal(value == limit, wanted == limit) for limit in (torch.inf, -torch.inf)
    )


def _describe_nonfinite(value: torch.Tensor, wanted: torch.Tensor) -> str:
    counts = [
        f"{int(torch.isnan(one).sum()):,} NaN and {int(torch.isinf(one).sum()):,} infinite"
        for one in (value, wanted)
    ]
    return f"{counts[0]}; on the single device {counts[1]}"


def name_dtype(dtype: torch.dtype) -> str:
    """As `bfloat16`."""
    return str(dtype).removeprefix("torch.")
