"""The verdict on one tensor: shapes first, then NaNs, then numbers against their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

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
from shardscope.parallel.parity.pieces import arrangements, lines_along
from shardscope.record import FINE, Agreement, TensorKind, TensorVerdict, compress_ranks

__all__ = ["Judged", "judge"]


@final
@dataclass(frozen=True, eq=False)
class Judged:
    """A case with its verdict, and what each rank has to be compared, put together from pieces."""

    case: Case
    verdict: TensorVerdict
    wholes: tuple[torch.Tensor, ...] = ()


class _Far(NamedTuple):
    """How far off the worst rank is, and where it is most."""

    distance: Distance
    place: int  # index into the flattened tensor


def judge(case: Case) -> Judged:
    """The verdict on one tensor."""
    reference = case.reference
    present = [rank for rank, one in enumerate(case.ranks) if one is not None]
    if reference is None:
        return _judge_extra(case, present)
    if not present and not bool(reference.any()):
        return _settle(case, Agreement.EQUAL, "none, and the single device's is zero")
    absent = [rank for rank in range(len(case.ranks)) if rank not in present]
    if absent:
        where = "no rank has one" if not present else "some ranks have none"
        return _settle(case, Agreement.MISSING, f"{where}; the single device does", absent)
    return _judge_values(case, [one for one in case.ranks if one is not None])


def _judge_extra(case: Case, present: Sequence[int]) -> Judged:
    held = [rank for rank in present if bool(_held(case, rank).any())]
    if not held:
        return _settle(case, Agreement.EQUAL, "zero, and the single device has none")
    return _settle(case, Agreement.EXTRA, "the single device has none", held)


def _held(case: Case, rank: int) -> torch.Tensor:
    tensor = case.ranks[rank]
    assert tensor is not None
    return tensor


def _judge_values(case: Case, held: Sequence[torch.Tensor]) -> Judged:
    assert case.reference is not None
    strangers = [
        rank for rank, one in enumerate(held) if not _may_be(one.dtype, case.reference.dtype, case)
    ]
    if strangers:
        fact = f"of {_name(held[strangers[0]].dtype)}, not {_name(case.reference.dtype)}"
        return _settle(case, Agreement.RESHAPED, fact, strangers)
    shape = case.reference.shape
    if all(one.shape == shape for one in held):
        return _judge_averaged(case, held, _judge_wholes(case, held))
    judged = None
    for cut in arrangements(held, shape, case.sizes):
        wholes = cut.join(held)
        if wholes is not None and all(one.shape == shape for one in wholes):
            judged = _judge_wholes(case, wholes)
            if judged.verdict.agreement in FINE:
                return judged
    if judged is not None:
        return judged
    odd = [rank for rank, one in enumerate(held) if one.shape != shape]
    fact = f"of the shape {list(held[odd[0]].shape)}, which pieces do not make up {list(shape)}"
    return _settle(case, Agreement.RESHAPED, fact, odd)


def _judge_averaged(case: Case, held: Sequence[torch.Tensor], judged: Judged) -> Judged:
    """Of an output such as a loss, where the batch is cut, the mean over ranks may be right."""
    is_fine = judged.verdict.agreement in FINE
    if is_fine or not case.batch_axes or case.kind is not TensorKind.OUTPUT or case.floor is None:
        return judged
    means = [as_exact(one) for one in held]
    for axis in case.batch_axes:
        for line in lines_along(case.sizes, axis):
            mean = torch.stack([means[rank] for rank in line]).mean(0)
            for rank in line:
                means[rank] = mean
    averaged = _judge_wholes(case, [one.to(held[0].dtype) for one in means])
    return averaged if averaged.verdict.agreement in FINE else judged


def _may_be(dtype: torch.dtype, wanted: torch.dtype, case: Case) -> bool:
    if dtype == wanted:
        return True
    if case.precision is None or not (dtype.is_floating_point and wanted.is_floating_point):
        return False
    return epsilon(dtype) <= epsilon(case.precision)


def _judge_wholes(case: Case, wholes: Sequence[torch.Tensor]) -> Judged:
    assert case.reference is not None
    distinct = _distinct(wholes)
    if case.floor is None:
        off = [rank for rank, one in enumerate(distinct) if not torch.equal(one, case.reference)]
        return _settle_off(case, wholes, off, _has_disagreement(distinct, None), None)
    assert case.target is not None
    exacts = {id(one): as_exact(one) for one in distinct}
    own = as_exact(case.reference)
    is_same = {key: _same_nonfinite(one, own) for key, one in exacts.items()}
    nonfinite = [rank for rank, one in enumerate(distinct) if not is_same[id(one)]]
    if nonfinite:
        fact = _describe_nonfinite(distinct[nonfinite[0]], case.reference)
        return _settle(case, Agreement.NONFINITE, fact, nonfinite, wholes=tuple(wholes))
    measured = {key: measure(one, case.target) for key, one in exacts.items()}
    worst = max(distinct, key=lambda one: measured[id(one)].rms)
    far = _Far(measured[id(worst)], find_worst(exacts[id(worst)], case.target))
    if all(torch.equal(one, case.reference) for one in dict.fromkeys(distinct)):
        return _settle(case, Agreement.EQUAL, far=far)
    off = [rank for rank, one in enumerate(distinct) if not case.floor.allows(measured[id(one)])]
    has_disagreement = bool(off) and _has_disagreement(
        [exacts[id(one)] for one in distinct], case.floor
    )
    return _settle_off(case, wholes, off, has_disagreement, far)


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


def _has_disagreement(wholes: Sequence[torch.Tensor], floor: Floor | None) -> bool:
    others = [one for one in wholes if one is not wholes[0]]
    if floor is None:
        return bool(others)
    return any(not floor.allows(measure(one, wholes[0])) for one in others)


def _settle_off(
    case: Case,
    wholes: Sequence[torch.Tensor],
    off: Sequence[int],
    has_disagreement: bool,
    far: _Far | None,
) -> Judged:
    if not off:
        agreement = Agreement.EQUAL if far is None else Agreement.CLOSE
    else:
        agreement = Agreement.RANKS_DISAGREE if has_disagreement else Agreement.DIFFERS
    return _settle(case, agreement, "", off, far=far, wholes=tuple(wholes))


def _settle(
    case: Case,
    agreement: Agreement,
    detail: str = "",
    ranks: Sequence[int] = (),
    *,
    far: _Far | None = None,
    wholes: tuple[torch.Tensor, ...] = (),
) -> Judged:
    tensor = case.reference if case.reference is not None else _held(case, ranks[0] if ranks else 0)
    verdict = TensorVerdict(
        name=case.name,
        kind=case.kind,
        agreement=agreement,
        shape=tuple(tensor.shape),
        dtype=_name(tensor.dtype),
        error=_relate(far.distance.rms, case.floor) if far and case.floor else None,
        noise=_relate(case.floor.rms, case.floor) if far and case.floor else None,
        max_error=far.distance.largest if far else None,
        worst_index=_unravel(far.place, tensor) if far else None,
        ranks=compress_ranks(ranks),
        detail=detail,
    )
    if agreement in FINE:  # nobody will ask what it was; a model has many of them
        return Judged(replace(case, target=None, ranks=()), verdict)
    return Judged(case, verdict, wholes)


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
