"""Tied parameters that sharding turned into several, and whether that is an error.

A broken tie is a fact of the parallel model's structure: names that share one parameter in the
original do not share one there. It is an error unless the program itself gives all copies the
gradient of the tied parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from shardscope.numerics.noise import as_exact, measure
from shardscope.parallel.parity.causes import Explanation
from shardscope.parallel.parity.judge import Judged
from shardscope.parallel.parity.outcome import Outcome, tie_names
from shardscope.record import Suspect

__all__ = ["BrokenTie", "explain_tie", "find_broken_ties"]


@final
@dataclass(frozen=True)
class BrokenTie:
    """Parameters of the parallel model that are one parameter in the original.

    `names` has all names of the original's parameter, `copies` one name for each of the parameters
    that it became. They are on one rank, or, if `is_across_ranks`, each is on other ranks, such as
    those of another pipeline stage.
    """

    names: tuple[str, ...]
    copies: tuple[str, ...]
    frozen: tuple[str, ...] = ()  # copies that require no gradient
    is_across_ranks: bool = False


def find_broken_ties(reference: Outcome, ranks: Sequence[Outcome]) -> Iterator[BrokenTie]:
    """The tied parameters of the original that are several parameters on the ranks.

    Whether this is an error depends on their gradients, which the parallel model may sum itself.
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
                    for copies, own in zip(copies_of, name_sets, strict=True)
                    for copy in copies
                    if any(other and not own & other for other in name_sets)
                )
            )
        if len(most) > 1:
            frozen = {name for rank in ranks for name in rank.frozen}
            yield BrokenTie(
                tuple(names), most, tuple(n for n in most if n in frozen), is_across_ranks
            )


def _list_copies(names: Sequence[str], ties: Mapping[str, str]) -> tuple[str, ...]:
    """One of the names for each parameter that has some of them."""
    copies: dict[str, str] = {}
    for name in names:
        if name in ties:
            copies.setdefault(ties[name], name)
    return tuple(copies.values())


def explain_tie(
    tie: BrokenTie, gradients: Sequence[Judged], *, num_compared: int, changed: Sequence[str]
) -> Explanation | None:
    """What is wrong with a broken tie; None if nothing is.

    `gradients` are those of its copies that differ from the tied parameter's, of `num_compared`
    that were compared, and `changed` its copies whose values differ before the step.
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
    elif _add_up(gradients, is_over_ranks=tie.is_across_ranks):
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


def _is_same_on_copies(tie: BrokenTie, gradients: Sequence[Judged]) -> bool:
    """Whether the copies of a tied parameter have the same gradient, as if they were tied."""
    floor = gradients[0].case.floor
    if tie.frozen or floor is None or not all(result.full for result in gradients):
        return False
    if tie.is_across_ranks:
        pairs = [(gradients[0].full[0], tensor) for tensor in gradients[0].full[1:]]
    elif len(gradients) < len(tie.copies):
        return False
    else:
        full = [result.full for result in gradients]
        pairs = [pair for own in full[1:] for pair in zip(full[0], own, strict=True)]
    limit = floor.at(4.0)
    return all(limit.allows(measure(as_exact(own), as_exact(other))) for own, other in pairs)


def _add_up(gradients: Sequence[Judged], *, is_over_ranks: bool) -> bool:
    """Whether the gradients of copies are parts of the gradient of the tied parameter."""
    first = gradients[0]
    if first.case.target is None or first.case.floor is None or not all(r.full for r in gradients):
        return False
    tensors = first.full if is_over_ranks else [result.full[0] for result in gradients]
    parts = {id(tensor): as_exact(tensor) for tensor in tensors}
    total = torch.stack(list(parts.values())).sum(0)
    return first.case.floor.at(4.0).allows(measure(total, first.case.target))
