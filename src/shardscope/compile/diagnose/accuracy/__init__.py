"""Compares compiled code with eager execution: a graph (`check_accuracy`) or an entire function.

The eager reference is run unchanged, in double precision and with perturbed rounding, so that
rounding differences are not reported as wrong results. The answer is a `CheckResult`.
"""

from __future__ import annotations

from shardscope.compile.diagnose.accuracy.check_result import (
    NUMBERS,
    Application,
    CheckResult,
    CompilerLog,
    describe_error,
    find_failing_line,
    format_error,
    is_same_failure,
)
from shardscope.compile.diagnose.accuracy.entire_function import (
    check_function_accuracy,
    describe_missing_error,
)
from shardscope.compile.diagnose.accuracy.judge import (
    affects_results,
    check_accuracy,
    check_forward_once,
    find_affecting_node,
    resolve_backend,
)

__all__ = [
    "NUMBERS",
    "Application",
    "CheckResult",
    "CompilerLog",
    "affects_results",
    "check_accuracy",
    "check_forward_once",
    "check_function_accuracy",
    "describe_error",
    "describe_missing_error",
    "find_affecting_node",
    "find_failing_line",
    "format_error",
    "is_same_failure",
    "resolve_backend",
]
