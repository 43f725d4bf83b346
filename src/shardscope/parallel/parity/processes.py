"""The parallel version as real ranks: processes of their own that meet in a gloo group."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardscope.errors import ParityError, RankError, ShardscopeError
from shardscope.parallel.parity.looks import Look
from shardscope.parallel.parity.outcome import Outcome
from shardscope.parallel.parity.ranks import share
from shardscope.parallel.parity.task import Task
from shardscope.parallel.parity.variants import AS_IT_IS, Variant

__all__ = ["Processes"]

_TIMEOUT = timedelta(minutes=5)  # for a rank that waits for another
_PATIENCE_S = 10  # for a process that was told to end
_MOMENT_S = 0.5  # for others to say what happened to them


class Living(Protocol):
    """A version that can be sent to another process, to be one of its ranks there."""

    @property
    def model(self) -> nn.Module:
        """The original."""

    @property
    def axes(self) -> Mapping[str, int]:
        """Of the mesh."""

    @property
    def task(self) -> Task:
        """What a step is."""

    @property
    def batch_axes(self) -> Sequence[str]:
        """Those along which the batch is sharded."""

    @property
    def batch_dim(self) -> int:
        """The dim of the inputs that is sharded there."""

    def live(
        self, mesh: DeviceMesh, variant: Variant = AS_IT_IS, look: Look | None = None
    ) -> Outcome:
        """Be one rank."""


@final
class Processes:
    """A version whose ranks are processes; they are begun when first needed, and kept."""

    def __init__(self, version: Living) -> None:
        self._version = version
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="shardscope-")
        self._num_runs = 0

    @property
    def model(self) -> nn.Module:
        """The original."""
        return self._version.model

    @property
    def axes(self) -> Mapping[str, int]:
        """Of the mesh."""
        return self._version.axes

    @property
    def task(self) -> Task:
        """What a step is."""
        return self._version.task

    @property
    def batch_axes(self) -> Sequence[str]:
        """Those along which the batch is sharded."""
        return self._version.batch_axes

    @property
    def batch_dim(self) -> int:
        """The dim of the inputs that is sharded there."""
        return self._version.batch_dim

    def run(self, variant: Variant = AS_IT_IS, look: Look | None = None) -> list[Outcome]:
        """What each rank gave."""
        if not self._ranks:
            self._start()
        self._num_runs += 1
        for _, pipe in self._ranks:
            with suppress(OSError):  # one that has ended says so below
                pipe.send((self._num_runs, variant, look))
        self._await()
        first: dict[Any, torch.Tensor] = {}
        return [
            share(_load(self._outcome(self._num_runs, rank)), first)
            for rank in range(len(self._ranks))
        ]

    def close(self) -> None:
        """End the ranks, and remove what they wrote."""
        self._end()
        self._folder.cleanup()

    @contextmanager
    def closing(self) -> Iterator[Processes]:
        """Close when the context ends."""
        try:
            yield self
        finally:
            self.close()

    def _start(self) -> None:
        payload = Path(self._folder.name, "payload")
        payload.write_bytes(_pack(self._version))
        context = get_context("spawn")
        store = Path(self._folder.name, f"store-{self._num_runs}")
        size = _size(self._version.axes)
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, str(payload), str(store), self._folder.name, theirs)
            process = context.Process(target=_live, args=args, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _await(self) -> None:
        """Wait until all ranks have run, or one has failed; then the others end too."""
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        failures: dict[int, str] = {}
        while pending:
            # Those that lose a peer fail too: who fails at the same moment is heard as well.
            ready = wait(list(pending), _MOMENT_S if failures else None)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank, said = pending.pop(pipe), _receive(pipe)
                if said is not None:
                    failures[rank] = said
            if failures and not ready:
                break
        if failures:
            self._end()
            rank = min(failures, key=lambda one: (_is_consequence(failures[one]), one))
            raise RankError(f"rank {rank} failed: {failures[rank]}", rank=rank)

    def _end(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.terminate()
        for process, _ in self._ranks:
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
        self._ranks.clear()

    def _outcome(self, run: int, rank: int) -> Path:
        return Path(self._folder.name, f"outcome-{run}-{rank}")


def _receive(pipe: Connection) -> str | None:
    """How a rank failed, or None."""
    try:
        said: str | None = pipe.recv()
    except (EOFError, OSError):
        return "its process ended"
    return said


def _is_consequence(failure: str) -> bool:
    return any(words in failure for words in ("by peer", "Broken pipe", "Timed out"))


def _size(axes: Mapping[str, int]) -> int:
    size = 1
    for one in axes.values():
        size *= one
    return size


def _load(path: Path) -> Outcome:
    outcome: Outcome = torch.load(path, weights_only=False)
    path.unlink()
    return outcome


def _pack(version: Living) -> bytes:
    """What a rank needs, and the files of modules that it could not import by their names."""
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


def _unpack(path: str) -> Living:
    modules, packed = pickle.loads(Path(path).read_bytes())
    for name, file in modules.items():
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    version: Living = pickle.loads(packed)
    return version


def _live(rank: int, size: int, payload: str, store: str, folder: str, pipe: Connection) -> None:
    """Be a rank until nobody asks any more."""
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
            run, variant, look = pipe.recv()
            with torch.compiler.set_stance("force_eager"):
                outcome = version.live(mesh, variant, look)
            torch.save(outcome, Path(folder, f"outcome-{run}-{rank}"))
            pipe.send(None)
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001 - it is told, and raised where it was asked for
        is_ours = isinstance(error, ShardscopeError)
        with suppress(OSError):
            pipe.send(str(error) if is_ours else f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
