"""The context that functions in a worker receive: a store for values, and reporting of phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final


@final
class WorkerContext:
    """Exists as long as the worker process; values in `store` are available to later calls."""

    def __init__(self, send_phase: Callable[[str], None]) -> None:
        self.store: dict[str, Any] = {}
        self._send_phase = send_phase

    def report_phase(self, phase: str) -> None:
        """Report that a new phase begins, which has its own time limit."""
        self._send_phase(phase)
