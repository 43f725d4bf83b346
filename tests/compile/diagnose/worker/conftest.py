"""Processes are dear: one that lives and one that dies serve all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardscope.compile.diagnose.worker.fork_server import ForkServer
from shardscope.compile.diagnose.worker.pool import Workers
from shardscope.compile.diagnose.worker.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with Sandbox(tmp_path_factory.mktemp("output")) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def workers(sandbox: Sandbox) -> Iterator[Workers]:
    """Nothing that is done with these ends a process."""
    with Workers(sandbox, has_standby=False) as workers:
        yield workers
        assert workers.num_started == 1, "one process serves all calls"


@pytest.fixture(scope="session")
def fork_server(sandbox: Sandbox) -> Iterator[ForkServer]:
    with ForkServer(sandbox) as fork_server:
        yield fork_server


@pytest.fixture(scope="session", params=["spawned", "forked"])
def fragile(
    request: pytest.FixtureRequest, sandbox: Sandbox, fork_server: ForkServer
) -> Iterator[Workers]:
    """For calls that end their process."""
    parent = fork_server if request.param == "forked" else None
    with Workers(sandbox, preload=(), fork_server=parent) as workers:
        yield workers
