"""What functions that run in a worker are given: a place to keep things, and a voice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

__all__ = ["Bench"]


@final
class Bench:
    """Lives as long as the worker process; what `held` holds, later calls find there."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.held: dict[str, Any] = {}
        self._tell = tell

    def announce(self, phase: str) -> None:
        """Say that a new phase has begun, with a time limit of its own."""
        self._tell(phase)
