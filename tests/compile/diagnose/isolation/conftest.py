"""Processes are dear: one that lives and one that dies serve all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardscope.compile.diagnose.isolation.enclosure import Enclosure
from shardscope.compile.diagnose.isolation.nursery import Nursery
from shardscope.compile.diagnose.isolation.workers import Workers


@pytest.fixture(scope="session")
def enclosure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Enclosure]:
    with Enclosure(tmp_path_factory.mktemp("output")) as enclosure:
        yield enclosure


@pytest.fixture(scope="session")
def workers(enclosure: Enclosure) -> Iterator[Workers]:
    """Nothing that is done with these ends a process."""
    with Workers(enclosure, has_standby=False) as workers:
        yield workers
        assert workers.num_started == 1, "one process serves all calls"


@pytest.fixture(scope="session")
def nursery(enclosure: Enclosure) -> Iterator[Nursery]:
    with Nursery(enclosure) as nursery:
        yield nursery


@pytest.fixture(scope="session", params=["spawned", "forked"])
def fragile(
    request: pytest.FixtureRequest, enclosure: Enclosure, nursery: Nursery
) -> Iterator[Workers]:
    """For calls that end their process."""
    parent = nursery if request.param == "forked" else None
    with Workers(enclosure, preload=(), nursery=parent) as workers:
        yield workers
