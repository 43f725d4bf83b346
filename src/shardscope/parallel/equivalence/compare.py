"""Compares one tensor on all ranks with the single device: dtype, shape, NaN, then values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

import torch
from msgspec import structs

from shardscope.numerics import (
    Distance,
    NoiseFloor,
    epsilon,
    find_worst,
    has_same_nonfinite,
    measure,
    to_fp64_on_cpu,
    unravel,
)
from shardscope.parallel.equivalence.cases import OF_A_RANK, Case, Runs, make_cases
from shardscope.parallel.equivalence.step_result import EVALUATION, StepResult
from shardscope.parallel.equivalence.tensor_shards import (
    Layout,
    ranks_along,
    shard_layouts,
    trim_padding,
)
from shardscope.record import (
    FINE,
    Agreement,
    Suspect,
    TensorKind,
    TensorVerdict,
    compress_ranks,
)

_MAX_PADDED_ERROR = 0.3  # of a tensor that is taken for a wrong one with padding


@final
@dataclass(frozen=True, eq=False)
class TensorComparison:
    """A case with its verdict.

    `full` has the full tensor of each rank, put together from shards by `layout` where the
    ranks hold shards; it is empty where the tensor agrees. `dtype` is the dtype on the ranks if
    it is neither the single device's nor allowed by the caller; the coarsest if there are
    several. `is_near_own` says that the ranks agree with the single device in its own precision,
    where double precision gives another result.
    """

    case: Case
    verdict: TensorVerdict
    full: tuple[torch.Tensor, ...] = ()
    layout: Layout | None = None
    dtype: torch.dtype | None = None
    reduction: Literal["sum", "mean", ""] = ""  # of the ranks' own values, by which they agree
    is_near_own: bool = False

    @property
    def epsilon(self) -> float:
        """The machine epsilon of the tensor on the ranks; 0 for integers."""
        dtype = self.dtype or (None if self.case.reference is None else self.case.reference.dtype)
        return 0.0 if dtype is None else epsilon(dtype)

    def full_in_fp64(self) -> list[torch.Tensor]:
        """The full tensor of each rank as `case.target` is: float64, on the CPU."""
        return [to_fp64_on_cpu(tensor) for tensor in self.full]


class _WorstError(NamedTuple):
    """The largest error of any rank, and the element where it is."""

    distance: Distance
    flat_index: int  # index into the flattened tensor


def compare_case(case: Case) -> TensorComparison:
    """The verdict on one tensor."""
    reference = case.reference
    present = [rank for rank, tensor in enumerate(case.ranks) if tensor is not None]
    if reference is None:
        return _compare_extra(case, present)
    absent = [rank for rank in range(len(case.ranks)) if rank not in present]
    if not absent:
        return _compare_values(case, [tensor for tensor in case.ranks if tensor is not None])
    if present and case.kind is TensorKind.OUTPUT and case.name.startswith(EVALUATION):
        return _compare_present(case, present)
    is_zero = not bool(reference.any())
    if is_zero and not any(bool(_tensor_of(case, rank).any()) for rank in present):
        return _make_comparison(
            case, Agreement.EQUAL, "zero on the single device, and none on the ranks"
        )
    where = "no rank has one" if not present else "some ranks have none"
    return _make_comparison(case, Agreement.MISSING, f"{where}; the single device does", absent)


def _compare_present(case: Case, present: Sequence[int]) -> TensorComparison:
    """The verdict on the ranks that have an evaluation, as where only the first one evaluates."""
    comparison = compare_case(case.choose_ranks(present))
    if comparison.verdict.agreement in FINE:
        return comparison
    verdict = structs.replace(comparison.verdict, ranks=compress_ranks(present))
    return replace(comparison, verdict=verdict)


def _compare_extra(case: Case, present: Sequence[int]) -> TensorComparison:
    nonzero = [rank for rank in present if bool(_tensor_of(case, rank).any())]
    if not nonzero:
        return _make_comparison(case, Agreement.EQUAL, "zero, and the single device has none")
    return _make_comparison(case, Agreement.EXTRA, "the single device has none", nonzero)


def _tensor_of(case: Case, rank: int) -> torch.Tensor:
    tensor = case.ranks[rank]
    assert tensor is not None
    return tensor


def _compare_values(case: Case, tensors: Sequence[torch.Tensor]) -> TensorComparison:
    assert case.reference is not None
    wanted = case.reference.dtype
    ranks = [rank for rank, tensor in enumerate(tensors) if not _may_be(tensor.dtype, wanted, case)]
    if ranks:
        return _compare_mismatched_dtype(case, tensors, ranks)
    return _compare_layouts(case, tensors)


def _compare_mismatched_dtype(
    case: Case, tensors: Sequence[torch.Tensor], ranks: Sequence[int]
) -> TensorComparison:
    """The verdict where `ranks` have another dtype: its rounding raises the noise floor."""
    reference = case.reference
    assert reference is not None
    dtype = max((tensors[rank].dtype for rank in ranks), key=epsilon)
    common = {_find_widest(tensor.dtype) for tensor in (reference, *tensors)}
    if len(common) > 1:  # such as integers instead of floating point
        comparison = _make_comparison(case, Agreement.DIFFERS, "", ranks)
    else:
        (wide,) = common
        widened_case = replace(
            case,
            reference=reference.to(wide),
            floor=None if case.floor is None else case.floor.raise_to(dtype),
            calls=tuple(tuple(tensor.to(wide) for tensor in calls) for calls in case.calls),
        )
        comparison = _compare_layouts(widened_case, [tensor.to(wide) for tensor in tensors])
    comparison = replace(
        comparison, case=replace(comparison.case, reference=reference), dtype=dtype
    )
    fact = describe_dtype(comparison)
    verdict = structs.replace(
        comparison.verdict,
        dtype=name_dtype(reference.dtype),
        noise=_find_noise(case) if comparison.verdict.noise is not None else None,
        detail="; ".join(filter(None, (fact, comparison.verdict.detail))),
    )
    is_coarser = epsilon(dtype) > epsilon(reference.dtype)
    if verdict.agreement is Agreement.CLOSE and is_coarser:
        verdict = structs.replace(
            verdict,
            agreement=Agreement.ROUNDED,
            suspect=Suspect.ROUNDING,
            ranks=compress_ranks(ranks),
        )
    return replace(comparison, verdict=verdict)


def describe_dtype(comparison: TensorComparison) -> str:
    """A clause that names the dtype on the ranks and the single device's."""
    assert comparison.dtype is not None
    assert comparison.case.reference is not None
    return (
        f"dtype is {name_dtype(comparison.dtype)}, "
        f"not {name_dtype(comparison.case.reference.dtype)}"
    )


def _find_widest(dtype: torch.dtype) -> torch.dtype:
    """The widest dtype of the same kind; dtypes of different kinds are not compared."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _compare_layouts(case: Case, tensors: Sequence[torch.Tensor]) -> TensorComparison:
    """The verdict on full tensors, or on shards in the layout that fits best."""
    assert case.reference is not None
    shape = case.reference.shape
    if all(tensor.shape == shape for tensor in tensors):
        return _compare_averaged(case, tensors, _compare_full(case, tensors))
    nearest: TensorComparison | None = None
    for layout in shard_layouts(tensors, shape, case.sizes):
        for full in _join(case, tensors, layout):
            comparison = replace(_compare_full(case, full), layout=layout)
            if comparison.verdict.agreement in FINE:
                return comparison
            if nearest is None or _error(comparison) < _error(nearest):
                nearest = comparison
    if nearest is not None:
        return _choose_wrong_shards(nearest, tensors)
    padded = _compare_padded(case, tensors)
    if padded is not None:
        return padded
    joined = [] if case.kind is TensorKind.OUTPUT else _join_flat(tensors, shape, case.sizes)
    flat = [_compare_full(case, full) for full in joined]
    if flat:
        return min(flat, key=_error)
    odd = [rank for rank, tensor in enumerate(tensors) if tensor.shape != shape]
    fact = f"shape is {list(tensors[odd[0]].shape)}, and no such shards make up {list(shape)}"
    return _make_comparison(case, Agreement.RESHAPED, fact, odd)


def _compare_padded(case: Case, tensors: Sequence[torch.Tensor]) -> TensorComparison | None:
    """The verdict on tensors that are padded at the end; None if they are not like that at all."""
    assert case.reference is not None
    shape = case.reference.shape
    comparisons = []
    for trimmed in trim_padding(tensors, shape, case.sizes):
        total = sum(tensor.numel() for tensor in trimmed)
        if total % shape.numel() == 0 and total:
            comparisons.append(
                _compare_layouts(replace(case, ranks=tuple(trimmed), calls=()), trimmed)
            )
    nearest = min(comparisons, key=_error, default=None)
    return nearest if nearest is not None and _error(nearest) < _MAX_PADDED_ERROR else None


def _join_flat(
    tensors: Sequence[torch.Tensor], shape: torch.Size, sizes: tuple[int, ...]
) -> Iterator[list[torch.Tensor]]:
    """Full tensors from shards of the flattened tensor, perhaps with padding at the end."""
    if any(tensor.ndim != 1 for tensor in tensors) or not tensors[0].numel():
        return
    number, length = shape.numel(), tensors[0].numel()
    if all(tensor.numel() == number for tensor in tensors):
        yield [tensor.view(shape) for tensor in tensors]
    for num_shards in range(2, len(tensors) + 1):
        if not number <= num_shards * length < number + num_shards:
            continue
        for layout in shard_layouts(tensors, torch.Size([num_shards * length]), sizes):
            joined = layout.join(tensors)
            if joined is not None and all(full.numel() >= number for full in joined):
                yield [full[:number].view(shape) for full in joined]


def _choose_wrong_shards(
    comparison: TensorComparison, shards: Sequence[torch.Tensor]
) -> TensorComparison:
    """The comparison of shards, restricted to the ranks whose own shard differs."""
    case, layout = comparison.case, comparison.layout
    joined = None if layout is None else layout.join(shards)
    is_of_shards = joined is not None and all(
        torch.equal(tensor, full) for tensor, full in zip(joined, comparison.full, strict=True)
    )
    if layout is None or case.target is None or not is_of_shards:
        return comparison
    parts = layout.split(to_fp64_on_cpu(case.target), shards)
    off = [
        rank
        for rank, (shard, part) in enumerate(zip(shards, parts, strict=True))
        if not _is_near(to_fp64_on_cpu(shard), part, case.floor)
    ]
    verdict = structs.replace(
        comparison.verdict, ranks=compress_ranks(off) or comparison.verdict.ranks
    )
    return replace(comparison, verdict=verdict)


def _is_near(value: torch.Tensor, target: torch.Tensor, floor: NoiseFloor | None) -> bool:
    if floor is None:
        return torch.equal(value, target)
    return has_same_nonfinite(value, target) and floor.allows(measure(value, target))


def _choose_wrong_regions(
    case: Case, full: Sequence[torch.Tensor], off: Sequence[int]
) -> Sequence[int]:
    """Of the ranks whose gathered tensor differs, those whose own part differs, if known."""
    if case.target is None or not case.regions or len(case.regions) != len(full):
        return off
    target, wrong_ranks = to_fp64_on_cpu(case.target), []
    for rank in off:
        region = case.regions[rank]
        if region is None:
            return off
        part = tuple(slice(*bounds) for bounds in region)
        if not _is_near(to_fp64_on_cpu(full[rank])[part], target[part], case.floor):
            wrong_ranks.append(rank)
    return wrong_ranks or off


def _join(
    case: Case, tensors: Sequence[torch.Tensor], layout: Layout
) -> Iterator[Sequence[torch.Tensor]]:
    """Full tensors from the shards of all calls, then from the shards of each call."""
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


def _error(comparison: TensorComparison) -> float:
    error = comparison.verdict.error
    return math.inf if error is None else error


def _compare_averaged(
    case: Case, tensors: Sequence[torch.Tensor], comparison: TensorComparison
) -> TensorComparison:
    """Accept an output that each rank reduces over its own shard of the batch.

    It agrees if its mean over ranks (such as a loss) or its sum (such as a count) agrees.
    """
    is_fine = comparison.verdict.agreement in FINE
    if is_fine or not case.batch_axes or case.kind not in OF_A_RANK:
        return comparison
    sums = [to_fp64_on_cpu(tensor) for tensor in tensors]
    for axis in case.batch_axes:
        for line in ranks_along(case.sizes, axis):
            total = torch.stack([sums[rank] for rank in line]).sum(0)
            for rank in line:
                sums[rank] = total
    count = math.prod(case.sizes[axis] for axis in case.batch_axes)
    for divisor in (count, 1):
        reduced = _compare_full(case, [(total / divisor).to(tensors[0].dtype) for total in sums])
        if reduced.verdict.agreement in FINE:
            return replace(reduced, reduction="sum" if divisor == 1 else "mean")
    return comparison


def _may_be(dtype: torch.dtype, wanted: torch.dtype, case: Case) -> bool:
    if dtype == wanted:
        return True
    if case.precision is None or not (dtype.is_floating_point and wanted.is_floating_point):
        return False
    return epsilon(dtype) <= epsilon(case.precision)


def _compare_full(case: Case, full: Sequence[torch.Tensor]) -> TensorComparison:
    assert case.reference is not None
    distinct = _distinct(full)
    if case.floor is None:
        off = [
            rank for rank, tensor in enumerate(distinct) if not torch.equal(tensor, case.reference)
        ]
        return _make_value_comparison(case, full, off, _has_disagreement(distinct, None), None)
    assert case.target is not None
    fp64_tensors = {id(tensor): to_fp64_on_cpu(tensor) for tensor in distinct}
    reference_fp64 = to_fp64_on_cpu(case.reference)
    is_same = {
        key: has_same_nonfinite(tensor, reference_fp64) for key, tensor in fp64_tensors.items()
    }
    nonfinite = [rank for rank, tensor in enumerate(distinct) if not is_same[id(tensor)]]
    if nonfinite:
        fact = _describe_nonfinite(distinct[nonfinite[0]], case.reference)
        return _make_comparison(case, Agreement.NONFINITE, fact, nonfinite, full=tuple(full))
    measured = {key: measure(tensor, case.target) for key, tensor in fp64_tensors.items()}
    worst = max(distinct, key=lambda tensor: measured[id(tensor)].rms)
    worst_error = _WorstError(measured[id(worst)], find_worst(fp64_tensors[id(worst)], case.target))
    if all(torch.equal(tensor, case.reference) for tensor in dict.fromkeys(distinct)):
        return _make_comparison(case, Agreement.EQUAL, worst_error=worst_error)
    off = [
        rank for rank, tensor in enumerate(distinct) if not case.floor.allows(measured[id(tensor)])
    ]
    has_disagreement = bool(off) and _has_disagreement(
        [fp64_tensors[id(tensor)] for tensor in distinct], case.floor
    )
    comparison = _make_value_comparison(case, full, off, has_disagreement, worst_error)
    own = case.own_floor
    is_near_own = own is not None and all(
        own.allows(measure(tensor, reference_fp64)) for tensor in fp64_tensors.values()
    )
    return replace(comparison, is_near_own=is_near_own)


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, with equal tensors replaced by the first of them."""
    representatives: list[torch.Tensor] = []
    result = []
    for tensor in tensors:
        known = (
            representative
            for representative in representatives
            if representative is tensor or torch.equal(representative, tensor)
        )
        same = next(known, None)
        if same is None:
            representatives.append(tensor)
            same = tensor
        result.append(same)
    return result


def _has_disagreement(full: Sequence[torch.Tensor], floor: NoiseFloor | None) -> bool:
    different = [tensor for tensor in full if tensor is not full[0]]
    if floor is None:
        return bool(different)
    return any(not floor.allows(measure(tensor, full[0])) for tensor in different)


def _make_value_comparison(
    case: Case,
    full: Sequence[torch.Tensor],
    off: Sequence[int],
    has_disagreement: bool,
    worst_error: _WorstError | None,
) -> TensorComparison:
    if not off:
        agreement = Agreement.EQUAL if worst_error is None else Agreement.CLOSE
    else:
        agreement = Agreement.RANKS_DISAGREE if has_disagreement else Agreement.DIFFERS
        off = _choose_wrong_regions(case, full, off)
    return _make_comparison(case, agreement, "", off, worst_error=worst_error, full=tuple(full))


def _make_comparison(
    case: Case,
    agreement: Agreement,
    detail: str = "",
    ranks: Sequence[int] = (),
    *,
    worst_error: _WorstError | None = None,
    full: tuple[torch.Tensor, ...] = (),
) -> TensorComparison:
    present = (tensor for tensor in (case.reference, *case.ranks) if tensor is not None)
    tensor = next(present)
    verdict = TensorVerdict(
        name=case.name,
        kind=case.kind,
        agreement=agreement,
        shape=tuple(tensor.shape),
        dtype=name_dtype(tensor.dtype),
        error=_relative_error(worst_error.distance.rms, case.floor)
        if worst_error and case.floor
        else None,
        noise=_find_noise(case) if worst_error else None,
        max_error=worst_error.distance.largest if worst_error else None,
        worst_index=unravel(worst_error.flat_index, tensor) if worst_error else None,
        ranks=compress_ranks(ranks),
        detail=detail,
    )
    if agreement in FINE:  # drop the data: a model has many, and they need no explanation
        return TensorComparison(replace(case, target=None, ranks=(), calls=()), verdict)
    return TensorComparison(case, verdict, full)


def _find_noise(case: Case) -> float | None:
    """The single device's noise relative to the magnitude of the tensor; None for integers."""
    return None if case.floor is None else _relative_error(case.floor.rms, case.floor)


def _relative_error(error: float, floor: NoiseFloor) -> float | None:
    """The error relative to the magnitude of the tensor; None if only the magnitude is zero."""
    if floor.scale > 0:
        return min(error / floor.scale, 1e300)
    return 0.0 if error == 0 else None


def _describe_nonfinite(value: torch.Tensor, wanted: torch.Tensor) -> str:
    counts = [
        f"{int(torch.isnan(tensor).sum()):,} NaN and {int(torch.isinf(tensor).sum()):,} infinite"
        for tensor in (value, wanted)
    ]
    return f"{counts[0]}; on the single device {counts[1]}"


def name_dtype(dtype: torch.dtype) -> str:
    """The name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def compare(
    reference: StepResult,
    fp64: StepResult | None,
    candidate: StepResult | Sequence[StepResult],
    *,
    perturbed_runs: Sequence[tuple[StepResult, StepResult | None]] = (),
    sizes: Sequence[int] = (),
    precision: torch.dtype | None = None,
) -> list[TensorVerdict]:
    """A verdict for each output, each gradient and each buffer that a run changed.

    `candidate` is the result of the parallel version: of one rank, or of each rank of a mesh of
    `sizes` (by default one axis). Tensors are full tensors, or plain shards that make up the
    full tensor.
    """
    runs = Runs(reference, fp64, tuple(perturbed_runs), precision)
    return [compare_case(case).verdict for case in make_cases(runs, candidate, sizes)]
