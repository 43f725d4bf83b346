"""Compilations whose guards are not timed, which only torch's logs and metrics show.

Dynamo flushes the processor's caches before it measures the guards of a frame, 50 ms each time.
"""

from __future__ import annotations

import sys

__all__ = ["skip_guard_timing"]


def skip_guard_timing() -> None:
    """Let dynamo, if it is imported, report that its guards take no time."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[union-attr]
