"""Every test here runs as the only rank of a world."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel_cases.alone import world_of_one


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with world_of_one():
        yield
