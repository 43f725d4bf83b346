"""A parallel version of a model, of which all ranks can be run in any variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from shardscope.parallel.equivalence import AS_IT_IS, StepResult, Task, Variant
from shardscope.parallel.parity.probe import ProbeSpec

Report = Callable[[str, str], None]
"""Takes gaps: the place, and the fact."""


class Version(Protocol):
    """A parallel version of a model, of which all ranks can be run in any variant."""

    @property
    def model(self) -> nn.Module:
        """The original model."""

    @property
    def axes(self) -> Mapping[str, int]:
        """Names and sizes of the mesh axes."""

    @property
    def task(self) -> Task:
        """The step to run."""

    @property
    def batch_axes(self) -> Sequence[str]:
        """The mesh axes along which the batch is sharded."""

    @property
    def batch_dim(self) -> int:
        """The dim of the inputs that is sharded along the batch axes."""

    def run(
        self, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[list[StepResult]]:
        """The results of each rank, a list over steps."""
