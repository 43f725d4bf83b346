"""Hangs that are found before launch: ranks that see different data must issue the same.

`api.py` runs a program as several ranks (`runs.py`) and compares what they issue; then again with
`variations.py` of what some of them see, where the program decides by it. What diverges becomes a
finding (`findings.py`).
"""

from __future__ import annotations

from shardscope.checks.api import CheckResult, check

__all__ = ["CheckResult", "check"]
