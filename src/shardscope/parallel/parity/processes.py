"""Runs the ranks of a parallel version as processes of a gloo group."""

from __future__ import annotations

import math
import os
import pickle
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardscope.errors import ParityError, RankError, ShardscopeError
from shardscope.parallel.equivalence import AS_IT_IS, StepResult, Variant
from shardscope.parallel.parity.probe import ProbeSpec
from shardscope.parallel.parity.version import Version
from shardscope.parallel.parity.versions import share_equal_tensors

_TIMEOUT = timedelta(minutes=5)  # of collectives
_JOIN_TIMEOUT_S = 10  # for a process to end after it was terminated
_FAILURE_GRACE_S = 0.5  # for other ranks to report failures


class SendableVersion(Version, Protocol):
    """A version that can be sent to another process, to run as one of its ranks."""

    def run_as_rank(
        self, mesh: DeviceMesh, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[StepResult]:
        """Run the steps as one rank of the mesh."""


@final
class Processes:
    """A version whose ranks are processes, which start when first needed and then stay."""

    def __init__(self, version: SendableVersion) -> None:
        self._version = version
        self.model, self.axes, self.task = version.model, version.axes, version.task
        self.batch_axes, self.batch_dim = version.batch_axes, version.batch_dim
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="shardscope-")
        self._num_runs = 0

    def run(
        self, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[list[StepResult]]:
        """The results of each rank, a list over steps."""
        if not self._ranks:
            self._start()
        self._num_runs += 1
        for _, pipe in self._ranks:
            with suppress(OSError):  # a process that has ended is reported below
                pipe.send((self._num_runs, variant, probe_spec))
        self._await()
        first: dict[tuple[int, int, str], torch.Tensor] = {}
        return [
            share_equal_tensors(_load(self._result_path(self._num_runs, rank)), first)
            for rank in range(len(self._ranks))
        ]

    def close(self) -> None:
        """End the ranks, and remove the files they wrote."""
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        payload = Path(self._folder.name, "payload")
        payload.write_bytes(_pack(self._version))
        context = get_context("spawn")
        store = Path(self._folder.name, f"store-{self._num_runs}")
        size = math.prod(self.axes.values())
        for rank in range(size):
            parent_pipe, child_pipe = context.Pipe()
            args = (rank, size, str(payload), str(store), self._folder.name, child_pipe)
            process = context.Process(
                target=_run_rank_process, args=args, name=f"rank {rank}", daemon=True
            )
            process.start()
            child_pipe.close()
            self._ranks.append((process, parent_pipe))

    def _await(self) -> None:
        """Wait until all ranks have run; if a rank fails, end the others and raise."""
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        failures: dict[int, str] = {}
        while pending:
            # Ranks that lose a peer fail too: collect failures that follow shortly after.
            ready = wait(list(pending), _FAILURE_GRACE_S if failures else None)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank, failure = pending.pop(pipe), _receive(pipe)
                if failure is not None:
                    failures[rank] = failure
            if failures and not ready:
                break
        if failures:
            self._end()
            rank = min(
                failures, key=lambda candidate: (_is_consequence(failures[candidate]), candidate)
            )
            raise RankError(f"rank {rank} failed: {failures[rank]}", rank=rank)

    def _end(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.terminate()
        for process, _ in self._ranks:
            process.join(_JOIN_TIMEOUT_S)
            if process.is_alive():
                process.kill()
        self._ranks.clear()

    def _result_path(self, run: int, rank: int) -> Path:
        return Path(self._folder.name, f"outcome-{run}-{rank}")


def _receive(pipe: Connection) -> str | None:
    """The failure of a rank as text; None if it succeeded."""
    try:
        failure: str | None = pipe.recv()
    except (EOFError, OSError):
        return "its process ended"
    return failure


def _is_consequence(failure: str) -> bool:
    return any(words in failure for words in ("by peer", "Broken pipe", "Timed out"))


def _load(path: Path) -> list[StepResult]:
    steps: list[StepResult] = torch.load(path, weights_only=False)
    path.unlink()
    return steps


def _pack(version: SendableVersion) -> bytes:
    """The version, pickled, with the files of modules that a rank could not import by name."""
    try:
        packed = pickle.dumps(version)
    except Exception as error:
        raise ParityError(
            f"the model, or the function that shards it, cannot be sent to another process "
            f"({type(error).__name__}: {error!s:.160}). Define its classes and functions at the "
            "top level of a file, or run the ranks in this process (processes=False)."
        ) from error
    modules = {
        name: module.__file__
        for name, module in list(sys.modules.items())
        if name.startswith("shardscope_target_") and getattr(module, "__file__", None)
    }
    return pickle.dumps((modules, packed))


def _unpack(path: str) -> SendableVersion:
    modules, packed = pickle.loads(Path(path).read_bytes())
    for name, file in modules.items():
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    version: SendableVersion = pickle.loads(packed)
    return version


def _run_rank_process(
    rank: int, size: int, payload: str, store: str, folder: str, pipe: Connection
) -> None:
    """Run as a rank until the parent closes the pipe."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        version = _unpack(payload)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=_TIMEOUT
        )
        axes = version.axes
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        while True:
            run, variant, probe_spec = pipe.recv()
            with torch.compiler.set_stance("force_eager"):
                steps = version.run_as_rank(mesh, variant, probe_spec)
            torch.save(steps, Path(folder, f"outcome-{run}-{rank}"))
            pipe.send(None)
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001 - sent to the parent and raised there
        is_shardscope_error = isinstance(error, ShardscopeError)
        with suppress(OSError):
            pipe.send(str(error) if is_shardscope_error else f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
