"""Prints a failure as a script that needs nothing but torch, and a variant of it that passes.

Graphs, inputs, the user's functions and the backend become source code; values that cannot be
written as source raise `NotPrintable` or go to a file beside the script.
"""

from __future__ import annotations

from shardscope.compile.diagnose.repro.entire_function import FunctionCall, write_entire_function
from shardscope.compile.diagnose.repro.variant import Variant, find_passing
from shardscope.compile.diagnose.repro.write import (
    EXIT_FAILS,
    EXIT_PASSES,
    PASSING,
    failure_line,
    write_repro,
)

__all__ = [
    "EXIT_FAILS",
    "EXIT_PASSES",
    "PASSING",
    "FunctionCall",
    "Variant",
    "failure_line",
    "find_passing",
    "write_entire_function",
    "write_repro",
]
