"""Imported last by the server whose forks are programs: these do not collect what it has imported.

Modules of torch are a million objects. A program that collects garbage, or that goes through all
objects as `run` does, would look at each, and so copy the memory that it shares with the server.
"""

from __future__ import annotations

import gc

from unmeasured_guards import skip_guard_timing

__all__: list[str] = []

skip_guard_timing()
gc.collect()
gc.freeze()
