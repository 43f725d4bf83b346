"""What tests of rules share: tensors to try, and all that a rule claims, proved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shardscope.parallel.placements import Placement
from shardscope.parallel.rules.proof import prove

__all__ = ["claims", "numbers", "positives"]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positives(*shape: int) -> torch.Tensor:
    return numbers(*shape).abs() + 0.1


def claims(
    op: Any,
    *args: Any,
    sizes: Sequence[int] = (2,),
    offers: Sequence[Sequence[Placement]] = (),
    kwargs: Mapping[str, Any] | None = None,
    constants: Collection[str] = (),
) -> set[str]:
    """Every strategy that the op's rule claims, as text, after all of them were proved."""
    verdicts = prove(op, args, kwargs, sizes=sizes, offers=offers, constants=constants)
    refuted = {spell(one.strategies): one.refutation for one in verdicts if one.refutation}
    assert refuted == {}, f"{op} cannot run as its rule says: {refuted}"
    return {spell(one.strategies) for one in verdicts}


def spell(strategies: Sequence[Any]) -> str:
    """`S(0) R -> S(0)`, with a `;` between mesh axes."""
    return "; ".join(
        f"{' '.join(map(str, one.inputs))} -> {' '.join(map(str, one.outputs))}"
        for one in strategies
    )
