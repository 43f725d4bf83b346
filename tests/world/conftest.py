"""A world of four ranks, on tensors with data and on tensors without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from shardscope import World, simulate


@pytest.fixture(params=["real tensors", "fake tensors"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Rank 0 of four."""
    with simulate(mesh={"dp": 4}) as world:
        if request.param == "fake tensors":
            world.materialize(nn.Linear(1, 1, device="meta"))
        yield world
