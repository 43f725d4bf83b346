"""Sample recordings for all tests, and the folder they come from."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

# Tests are imported by file (--import-mode=importlib), so their folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))
# Under pytest's importlib mode test modules are called tests.…, and other processes import them.
sys.path.append(str(Path(__file__).parents[1]))

import older_torch
import sample_recordings as samples
from shardscope.record import Recording
from unmeasured_guards import skip_guard_timing
from warm_python import fork_launch_server, warm_context

_entry_points = tempfile.TemporaryDirectory(prefix="shardscope-entry-points-")


def _register_entry_points() -> None:
    """Let a checkout that is only on the path have the entry points that installing it makes."""
    try:
        distribution("shardscope")
    except PackageNotFoundError:
        pass
    else:
        return
    repository = Path(__file__).parents[1]
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    lines = []
    # Not pytest's: it has looked for plugins already, and tests that need ours name it.
    for group in ("torch_dynamo_backends",):
        lines += [f"[{group}]", *(f"{k} = {v}" for k, v in project["entry-points"][group].items())]
    folder = Path(_entry_points.name) / "shardscope-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: shardscope\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    sys.path.append(_entry_points.name)
    path = [os.environ.get("PYTHONPATH"), str(repository / "src"), _entry_points.name]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # for other processes


_register_entry_points()

# A shell ignores interrupts for what it runs in the background, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all tests are collected, whatever is made stays: torch, test modules, the tests themselves.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish() -> Iterator[None]:
    """From here on garbage is what tests make: to look through all else takes half a second."""
    yield
    skip_guard_timing()
    gc.collect()
    gc.freeze()
    # Every op that torch traces makes hundreds of objects, most of which live on.
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What outlives a file of tests, as caches of torch do, is not looked through again, either.

    It grows to millions of objects; some tests and much of what they test go through all objects.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: a worker without tests cannot take one that has begun."""
    items.sort(key=lambda item: "integration" not in item.path.parts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A test of something that an older torch does not have is skipped there, and says so."""
    try:
        yield
    except Exception as error:
        missing = older_torch.find_missing(error)
        if missing is None:
            raise
        pytest.skip(missing)


_SHAPES = {
    "empty": samples.make_recording,
    "one rank": samples.make_llama,
    "many ranks": lambda: samples.make_llama(num_layers=4, dp=2, ranks=tuple(range(16))),
    "ranks that differ": lambda: samples.make_recording(
        tuple(
            samples.make_collective(rank=rank, order=order, group_order=order)
            for rank in range(4)
            for order in range(rank)
        ),
        ranks=(0, 1, 2, 3),
    ),
    "hostile names": samples.make_varied,
    "phases": samples.make_phases,
    "holdings": samples.make_holdings,
    "parallel programs": samples.make_parallel,
    "explanations": samples.make_explained,
    "diagnoses": samples.make_diagnosed,
}


@pytest.fixture(params=list(_SHAPES))
def any_recording(request: pytest.FixtureRequest) -> Recording:
    """Every shape of recording in turn."""
    made = _SHAPES[request.param]()
    assert isinstance(made, Recording)
    return made


@pytest.fixture
def host_clock_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are timed on the host alone, also if a test before this one has used a GPU."""
    monkeypatch.setattr("shardscope.attribution.spans.has_cuda", lambda: False)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that `parity` starts as processes have torch at once; one test lets it spawn them."""
    processes = "shardscope.parallel.parity.processes.get_context"
    monkeypatch.setattr(processes, lambda method: warm_context())


@pytest.fixture(scope="module")
def forked_launches() -> Iterator[None]:
    """The server that `run` starts has torch at once; tests of commands start a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardscope.launch.warm_process._started", fork_launch_server)
        yield


@pytest.fixture
def llama() -> Recording:
    """A 32-layer Llama under FSDP2 + TP, rank 0 of 1,024."""
    return samples.make_llama()


@pytest.fixture
def varied() -> Recording:
    """Every kind, phase and cause, with hostile names."""
    return samples.make_varied()
