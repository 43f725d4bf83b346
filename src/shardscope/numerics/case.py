"""One value of a run beside the same value of others, and what may be said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardscope.record import Condition, Deviation

__all__ = ["Case", "Exact", "MoreRuns", "Values", "Verdict", "no_more_runs", "plain"]

Values = Mapping[str, Any]
"""What a run gave, by name: tensors, and whatever else a function returns."""
Exact = Callable[[], Values | None]
"""What the run in double precision gave, which is made when it is needed; None if none can be."""
MoreRuns = Callable[[int], Sequence[Values]]
"""That many runs of eager execution with other roundings, or as many as there can be."""

_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def no_more_runs(count: int) -> Sequence[Values]:
    """For whom there are none."""
    return ()


@final
@dataclass(frozen=True)
class Verdict:
    """On one value."""

    name: str
    condition: Condition
    fact: str = ""  # what is wrong, or nearer
    deviation: Deviation | None = None


@final
@dataclass(frozen=True, eq=False)
class Case:
    """One tensor, as the compiled function gave it, as eager execution did, and in double."""

    name: str
    compiled: Tensor
    eager: Tensor
    exact: Tensor | None
    others: MoreRuns

    def run_others(self, count: int) -> list[Tensor]:
        """The same tensor of other runs, where those are alike."""
        found = [run.get(self.name) for run in self.others(count)]
        tensors = [plain(one) for one in found if isinstance(one, Tensor)]
        return [one for one in tensors if one.shape == self.eager.shape]


def plain(tensor: Tensor) -> Tensor:
    """A tensor whose elements can be compared: dense, of this rank, of a dtype with kernels."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([plain(one).flatten() for one in tensor.unbind()])
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    # Kernels of long unsigned numbers are few, and equal bits are equal numbers.
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor
