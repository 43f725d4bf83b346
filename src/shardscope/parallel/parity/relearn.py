"""Gradients of plain pieces that lie in an order of their own, such as fused queries and keys.

How they lie is learnt from the weights: each row of a rank's piece is one of the original's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardscope.parallel.parity.cases import Case
from shardscope.parallel.parity.judge import Judged, judge
from shardscope.parallel.parity.outcome import Outcome
from shardscope.record import FINE, TensorKind

__all__ = ["relearn"]

Places = tuple[int, list[list[int]]]  # the dim that is cut, and each rank's indices along it


def relearn(judged: Sequence[Judged], reference: Outcome, ranks: Sequence[Outcome]) -> list[Judged]:
    """Judge gradients of pieces again, put together as the weights are.

    Only where outputs are right: pieces that lie in a wrong order would make those wrong.
    """
    outputs = [one for one in judged if one.case.kind is TensorKind.OUTPUT]
    if not outputs or any(one.verdict.agreement not in FINE for one in outputs):
        return list(judged)
    return [_judge_again(one, reference, ranks) for one in judged]


def _judge_again(one: Judged, reference: Outcome, ranks: Sequence[Outcome]) -> Judged:
    case = one.case
    if case.kind is not TensorKind.GRADIENT or one.verdict.agreement in FINE:
        return one
    places = _find_places(case.name, reference, ranks)
    whole = None if places is None else _put_together(case, places)
    if whole is None:
        return one
    again = judge(replace(case, ranks=tuple(whole for _ in case.ranks)))
    return again if again.verdict.agreement in FINE else one


def _find_places(name: str, reference: Outcome, ranks: Sequence[Outcome]) -> Places | None:
    """From the parameter itself, or, where its rows are alike, from another of its module."""
    module = name.rpartition(".")[0]
    siblings = [other for other in reference.parameters if other.rpartition(".")[0] == module]
    for other in dict.fromkeys((name, *siblings)):
        places = _learn(
            reference.parameters.get(other), [one.parameters.get(other) for one in ranks]
        )
        if places is not None:
            return places
    return None


def _learn(original: torch.Tensor | None, pieces: Sequence[torch.Tensor | None]) -> Places | None:
    held = [one for one in pieces if one is not None]
    if original is None or len(held) < len(pieces):
        return None
    for dim in range(original.ndim):
        if all(_fits(one, original, dim) for one in held):
            rows = {row: index for index, row in enumerate(_rows(original, dim))}
            found = [[rows.get(row, -1) for row in _rows(one, dim)] for one in held]
            is_known = all(-1 not in some for some in found)
            if is_known and len(rows) == original.shape[dim]:  # else some rows are alike
                return dim, found
    return None


def _fits(piece: torch.Tensor, original: torch.Tensor, dim: int) -> bool:
    is_same_type = piece.ndim == original.ndim and piece.dtype == original.dtype
    return is_same_type and all(
        one == other
        for index, (one, other) in enumerate(zip(piece.shape, original.shape, strict=True))
        if index != dim
    )


def _rows(tensor: torch.Tensor, dim: int) -> list[bytes]:
    rows = tensor.detach().cpu().movedim(dim, 0).reshape(tensor.shape[dim], -1).contiguous()
    return [row.view(torch.uint8).numpy().tobytes() for row in rows]


def _put_together(case: Case, places: Places) -> torch.Tensor | None:
    """The whole, if the ranks have all of it, and agree where they have the same."""
    dim, indices = places
    assert case.reference is not None
    if dim >= case.reference.ndim:
        return None
    whole = torch.zeros_like(case.reference)
    filled = torch.zeros(case.reference.shape[dim], dtype=torch.bool)
    for piece, some in zip(case.ranks, indices, strict=True):
        if piece is None or piece.ndim != whole.ndim or piece.shape[dim] != len(some):
            return None
        where = torch.tensor(some)
        known = filled[where]
        before = whole.index_select(dim, where[known].to(whole.device))
        kept = piece.index_select(dim, known.nonzero().flatten().to(piece.device))
        if not torch.equal(before, kept):
            return None
        whole.index_copy_(dim, where.to(whole.device), piece)
        filled[where] = True
    return whole if bool(filled.all()) else None
