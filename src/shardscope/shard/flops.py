"""What calls compute, by the formulas of torch's own FLOP counter."""

from __future__ import annotations

from typing import Any, final

from torch.utils.flop_counter import flop_registry

from shardscope._torch.decompositions import is_composite
from shardscope._torch.dispatch import op_packet
from shardscope._torch.fakes import without_data
from shardscope._torch.twin_kernels import TWIN_KERNELS
from shardscope.shard.dispatch import Dispatcher
from shardscope.shard.levels import count_parts
from shardscope.shard.signature import Signature

__all__ = ["FlopCounter"]


@final
class FlopCounter:
    """Counts each distinct call once; a composite op computes what its parts do."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._known: dict[Signature, int | None] = {}

    def count(self, call: Signature) -> int | None:
        """FLOPs of the call, as if nothing were sharded; None where torch has no formula for it."""
        plain = call.plain()
        if plain not in self._known:
            self._known[plain] = self._count(plain)
        return self._known[plain]

    def _count(self, call: Signature) -> int | None:
        packet = op_packet(call.op)
        formula = flop_registry.get(TWIN_KERNELS.get(packet.__name__, packet))
        if formula is not None:
            return self._apply(formula, call)
        if not is_composite(call.op):
            return None
        parts = count_parts(call, {}, self._dispatcher)
        counts = ((self.count(part), times) for part, times in parts.items() if part != call)
        known = [flops * times for flops, times in counts if flops is not None]
        return sum(known) if known else None

    def _apply(self, formula: Any, call: Signature) -> int | None:
        with without_data():
            try:
                args, kwargs = call.arguments(self._dispatcher.make)
                return int(formula(*args, **kwargs, out_val=call.op(*args, **kwargs)))
            except Exception:  # noqa: BLE001 - formulas assert what ops do not ask for
                return None
