"""Equal values of many records as one object: a file repeats a name as often as it is used."""

from __future__ import annotations

from typing import Any, final

from msgspec.structs import force_setattr

from shardscope.record.recording import Collective

__all__ = ["SharedValues"]

# Those that repeat; sizes and positions are numbers, kinds and phases are shared already.
_FIELDS = (
    "group",
    "op",
    "axis",
    "dtype",
    "owner",
    "trigger",
    "cause",
    "source",
    "reduce_op",
    "thread",
)


@final
class SharedValues:
    """Values met so far. A recording of a million collectives needs a third of the memory so."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def share(self, call: Collective) -> None:
        """Let a collective that nobody else has seen yet hold values that others hold too."""
        remember = self._known.setdefault
        for field in _FIELDS:
            value = getattr(call, field)
            # Frozen records are changed here alone, and only to something equal.
            force_setattr(call, field, remember(value, value))
