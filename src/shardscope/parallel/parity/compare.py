"""The comparing half: what the single device gave against what each rank of the parallel did."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardscope.parallel.parity.cases import Runs, cases
from shardscope.parallel.parity.judge import judge
from shardscope.parallel.parity.outcome import Outcome
from shardscope.record import TensorVerdict

__all__ = ["compare"]


def compare(
    reference: Outcome,
    exact: Outcome | None,
    candidate: Outcome | Sequence[Outcome],
    *,
    jittered: Sequence[tuple[Outcome, Outcome | None]] = (),
    sizes: Sequence[int] = (),
    precision: torch.dtype | None = None,
) -> list[TensorVerdict]:
    """A verdict for each output, each gradient and each buffer that a run changed.

    `candidate` is what the parallel version gave, on one rank or on each rank of a mesh of `sizes`
    (a flat one by default). Tensors are full, or plain shards that make up the full tensor.
    """
    runs = Runs(reference, exact, tuple(jittered), precision)
    return [judge(case).verdict for case in cases(runs, candidate, sizes)]
