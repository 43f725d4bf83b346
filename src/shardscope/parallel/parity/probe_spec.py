"""What to record while a step runs; can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from shardscope.parallel.equivalence.step import Probe
from shardscope.parallel.parity.first_op import OpProbe
from shardscope.parallel.parity.probe import ModuleProbe


@final
@dataclass(frozen=True)
class ProbeSpec:
    """Record every module, or, with `ops_in`, every op in that module.

    `renamed` maps a rank to the original's names of its modules that have other names.
    """

    ops_in: str | None = None
    renamed: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def make_probe(self) -> Probe:
        """A probe that records it."""
        return ModuleProbe() if self.ops_in is None else OpProbe(self.ops_in)
