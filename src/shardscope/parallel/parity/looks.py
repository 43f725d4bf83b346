"""What to record while a step runs; can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from shardscope.parallel.parity.execute import Probe
from shardscope.parallel.parity.ops import OpProbe
from shardscope.parallel.parity.probe import ModuleProbe

__all__ = ["Look"]


@final
@dataclass(frozen=True)
class Look:
    """Every module, or every op in one of them.

    `renamed` has for a rank the original's names of modules that it has under other names.
    """

    ops_in: str | None = None
    renamed: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def make_probe(self) -> Probe:
        """The probe that records it."""
        return ModuleProbe() if self.ops_in is None else OpProbe(self.ops_in)
