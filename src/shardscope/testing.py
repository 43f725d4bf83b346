"""Assertions for tests: `from shardscope.testing import assert_comm`."""

from __future__ import annotations

from shardscope.plugins.assertions import (
    BreachError,
    assert_comm,
    assert_contract,
    assert_memory,
    assert_no_graph_breaks,
)
from shardscope.plugins.divergence import DivergenceError, assert_no_divergence

__all__ = [
    "BreachError",
    "DivergenceError",
    "assert_comm",
    "assert_contract",
    "assert_memory",
    "assert_no_divergence",
    "assert_no_graph_breaks",
]

BreachError.__module__ = __name__  # its public name, which pytest prints
DivergenceError.__module__ = __name__
