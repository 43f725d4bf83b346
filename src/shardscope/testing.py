"""Assertions for tests: `from shardscope.testing import assert_comm`."""

from __future__ import annotations

from shardscope.plugins.assertions import (
    BreachError,
    assert_comm,
    assert_contract,
    assert_memory,
    assert_no_graph_breaks,
)

__all__ = [
    "BreachError",
    "assert_comm",
    "assert_contract",
    "assert_memory",
    "assert_no_graph_breaks",
]

BreachError.__module__ = __name__  # its public name, which pytest prints
