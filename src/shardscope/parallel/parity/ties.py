"""Tied parameters that sharding turned into several, and whether that is an error.

A tie is broken if names that share one parameter in the original do not share one in the parallel
model. That is an error unless the program gives all copies the gradient of the tied parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardscope.parallel.equivalence import StepResult, TensorComparison, tie_names
from shardscope.parallel.parity.explanation import Explanation
from shardscope.parallel.parity.result import BrokenTie
from shardscope.record import Suspect


def find_broken_ties(reference: StepResult, ranks: Sequence[StepResult]) -> Iterator[BrokenTie]:
    """The tied parameters of the original that are several parameters on the ranks.

    Whether this is an error depends on their gradients, which the parallel model may sum.
    """
    groups: dict[str, list[str]] = {}
    for name, first in tie_names(reference.parameters).items():
        groups.setdefault(first, []).append(name)
    for names in groups.values():
        copies_of = [_list_copies(names, rank.ties) for rank in ranks]
        most = max(copies_of, key=len, default=())
        is_across_ranks = len(most) == 1
        if is_across_ranks:
            name_sets = [{name for name in names if name in rank.ties} for rank in ranks]
            most = tuple(
                dict.fromkeys(
                    copy
                    for copies, names_here in zip(copies_of, name_sets, strict=True)
                    for copy in copies
                    if any(
                        names_elsewhere and not names_here & names_elsewhere
                        for names_elsewhere in name_sets
                    )
                )
            )
        if len(most) > 1:
            frozen = {name for rank in ranks for name in rank.frozen}
            yield BrokenTie(
                tuple(names), most, tuple(n for n in most if n in frozen), is_across_ranks
            )


def _list_copies(names: Sequence[str], ties: Mapping[str, str]) -> tuple[str, ...]:
    """For each parameter behind these names, the first of its names."""
    copies: dict[str, str] = {}
    for name in names:
        if name in ties:
            copies.setdefault(ties[name], name)
    return tuple(copies.values())


def explain_tie(
    tie: BrokenTie,
    gradients: Sequence[TensorComparison],
    *,
    num_compared: int,
    changed: Sequence[str],
) -> Explanation | None:
    """The explanation of a broken tie; None if it is no error.

    `gradients` are the gradients of copies that differ from the tied parameter's, of
    `num_compared`; `changed` names the copies whose values differ before the step.
    """
    is_unused = num_compared < 2 and not tie.frozen and not tie.is_across_ranks
    if not gradients or is_unused or _is_same_on_copies(tie, gradients):
        return None
    clause = f"in the original {' and '.join(tie.copies)} were one tensor and are "
    clause += f"{len(tie.copies)} now"
    if tie.is_across_ranks:
        clause += ", on different ranks"
    if tie.frozen:
        verb = "requires" if len(tie.frozen) == 1 else "require"
        clause += f", of which {' and '.join(tie.frozen)} {verb} no gradient"
    elif changed:
        verb = "has" if len(changed) == 1 else "have"
        clause += f", and {' and '.join(changed)} {verb} other values already before the step"
    elif _is_sum_of_copies(gradients, is_over_ranks=tie.is_across_ranks):
        clause += ", each with a part of the gradient"
    else:
        clause += ", and their gradients differ"
    remedy = (
        f"Tie them again after sharding ({tie.copies[1]} = {tie.copies[0]}), and give both the "
        "same placement."
    )
    if tie.is_across_ranks:
        remedy = (
            "Sum the gradients of the copies over the ranks that hold them, with an all-reduce "
            "after backward."
        )
    return Explanation(Suspect.BROKEN_TIE, clause, remedy=remedy)


def _is_same_on_copies(tie: BrokenTie, gradients: Sequence[TensorComparison]) -> bool:
    """Whether all copies of a tied parameter have the same gradient, as if still tied."""
    floor = gradients[0].case.floor
    if tie.frozen or floor is None or not all(result.full for result in gradients):
        return False
    if tie.is_across_ranks:
        pairs = [(gradients[0].full[0], tensor) for tensor in gradients[0].full[1:]]
    elif len(gradients) < len(tie.copies):
        return False
    else:
        full = [result.full for result in gradients]
        pairs = [
            pair
            for copy_gradients in full[1:]
            for pair in zip(full[0], copy_gradients, strict=True)
        ]
    limit = floor.scale_by(4.0)
    return all(limit.covers(gradient, copy_gradient) for gradient, copy_gradient in pairs)


def _is_sum_of_copies(gradients: Sequence[TensorComparison], *, is_over_ranks: bool) -> bool:
    """Whether the gradients of the copies sum to the gradient of the tied parameter."""
    first = gradients[0]
    if first.case.target is None or first.case.floor is None or not all(r.full for r in gradients):
        return False
    tensors = first.full if is_over_ranks else [result.full[0] for result in gradients]
    # Ranks with equal gradients share a tensor, which is one part of the sum.
    parts = torch.stack([*{id(tensor): tensor for tensor in tensors}.values()])
    total = parts.to(torch.promote_types(parts.dtype, torch.float64)).sum(0)
    return first.case.floor.scale_by(4.0).covers(total, first.case.target)
