"""What to look at while a step runs; can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardscope.parallel.parity.execute import Probe
from shardscope.parallel.parity.ops import OpProbe
from shardscope.parallel.parity.probe import ModuleProbe

__all__ = ["MODULES", "Look"]


@final
@dataclass(frozen=True)
class Look:
    """At what every module puts out, or every op in one of them."""

    ops_in: str | None = None

    def make_probe(self, *, scale: float = 1.0) -> Probe:
        """Who does the looking; gradients are larger than a single device's by `scale`."""
        return ModuleProbe(scale=scale) if self.ops_in is None else OpProbe(self.ops_in)


MODULES = Look()
