"""The world that most tests of tracing run in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardscope import World, simulate


@pytest.fixture
def world() -> Iterator[World]:
    """Rank 0 of four, on one axis."""
    with simulate({"dp": 4}) as world:
        yield world
