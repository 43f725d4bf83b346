"""`trace(model)`: a context in which every collective is recorded, with who, when and why."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.intercept import intercept
from shardscope._torch.meshes import axis_names, meshes_of, root_mesh
from shardscope._torch.module_calls import watch_module_calls
from shardscope.comm.findings import find_comm_problems
from shardscope.comm.groups import GroupBook
from shardscope.comm.inventory import Inventory
from shardscope.comm.names import Models, ModuleNames
from shardscope.comm.recorder import Recorder
from shardscope.errors import TraceError
from shardscope.record import Axis, Module, RankSpan, Recording, RunInfo, StreamWriter, save
from shardscope.record.stream import StreamRecord
from shardscope.version import __version__
from shardscope.world import current_world

__all__ = ["Trace", "trace"]


def trace(
    models: Models = None,
    *,
    mesh: DeviceMesh | None = None,
    stream: str | Path | None = None,
    force: bool = False,
) -> Trace:
    """Record every collective issued inside the context.

    >>> with trace(model) as t:
    ...     step()
    >>> t.recording

    `models` gives modules their names: a model, a list or dict of models, or nothing to name
    modules by the class of the outermost one called. `mesh` names axes that the parameters do not
    show. `stream` appends each event to a file as it happens, so that a killed rank leaves a
    recording; `{rank}` in the path becomes this rank. Entering again continues the recording.
    """
    return Trace(models, mesh=mesh, stream=stream, force=force)


class Trace:
    """A trace: `recording` is what it saw, so far or in all."""

    def __init__(
        self, models: Models, *, mesh: DeviceMesh | None, stream: str | Path | None, force: bool
    ) -> None:
        self._names = ModuleNames(models)
        self._models = models
        self._mesh = mesh
        self._stream = stream
        self._force = force
        self._depth = 0
        self._exit = ExitStack()
        self._recorder: Recorder | None = None
        self._run: RunInfo | None = None
        self._inventory: Inventory | None = None
        self._modules: list[Module] = []
        self._writer: StreamWriter | None = None

    def __enter__(self) -> Self:
        if self._depth == 0:
            recorder = self._recorder or self._start()
            if self._writer is not None:
                self._writer.reopen()
            with ExitStack() as stack:
                stack.enter_context(recorder.calls.watching())
                stack.enter_context(watch_module_calls(recorder.calls))
                stack.enter_context(intercept(recorder))
                self._exit = stack.pop_all()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._exit.close()
        if self._recorder is not None:
            self._recorder.write()
        if error is not None and self._recorder is not None:
            self._recorder.report_gap("step", f"it ended early with {_sentence(error)}")
        self._describe_modules()
        if self._writer is not None:
            self._writer.close()
            if self._writer.failure is not None and self._recorder is not None:
                self._recorder.report_gap("stream", self._writer.failure)

    @property
    def recording(self) -> Recording:
        """What was seen: so far while the trace runs, all of it afterwards."""
        if self._recorder is None or self._run is None:
            raise TraceError(
                "There is no recording yet, because the trace was not entered. "
                "Run the step inside the context: with trace(model) as t: step()"
            )
        self._describe_modules()
        recording = Recording(
            run=self._run,
            groups=self._recorder.groups.groups,
            modules=tuple(self._modules),
            collectives=tuple(self._recorder.collectives),
            gaps=tuple(self._recorder.gaps),
        )
        return msgspec.structs.replace(recording, findings=find_comm_problems(recording))

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the recording to `path`, in which `{rank}` becomes this rank."""
        return save(self.recording, self._ranked(path), force=force)

    def _start(self) -> Recorder:
        meshes, failure = self._find_meshes()
        self._run = _run_info(meshes)
        if self._stream is not None:
            path = self._ranked(self._stream)
            self._writer = StreamWriter(path, self._run, force=self._force)
        emit = None if self._writer is None else self._emit
        self._recorder = Recorder(self._rank, self._names, GroupBook(meshes), emit)
        if failure is not None:
            self._recorder.report_gap("mesh", f"the model's meshes could not be read ({failure!r})")
        self._inventory = Inventory(self._names, self._rank, self._recorder.report_gap)
        # Now, not when a module is called: by then FSDP has gathered its parameters.
        self._describe_modules()
        return self._recorder

    @property
    def _rank(self) -> int:
        assert self._run is not None
        return self._run.ranks[0].first

    def _ranked(self, path: str | Path) -> Path:
        return Path(str(path).replace("{rank}", str(self._rank)))

    def _find_meshes(self) -> tuple[list[DeviceMesh], Exception | None]:
        """Every mesh there is to be found, and what went wrong if not all could be."""
        world = current_world()
        given = (self._mesh, None if world is None else world.mesh)
        meshes = [mesh for mesh in given if mesh is not None]
        try:
            for model in self._names.roots():
                meshes.extend(meshes_of(model))
        except Exception as error:  # noqa: BLE001 - watching must not kill
            return meshes, error
        return meshes, None

    def _describe_modules(self) -> None:
        """Write down the modules that have turned up since the last time."""
        assert self._inventory is not None
        for module in self._inventory.describe_new():
            self._modules.append(module)
            self._emit(module)

    def _emit(self, record: StreamRecord) -> None:
        if self._writer is not None:
            self._writer.write(record)


def _run_info(meshes: list[DeviceMesh]) -> RunInfo:
    world = current_world()
    is_distributed = dist.is_available() and dist.is_initialized()
    root = max((root_mesh(mesh) for mesh in meshes), key=lambda mesh: mesh.size(), default=None)
    axes = () if root is None else zip(axis_names(root), root.shape, strict=True)
    return RunInfo(
        torch_version=str(torch.__version__),
        shardscope_version=__version__,
        world_size=dist.get_world_size() if is_distributed else 1,
        ranks=(RankSpan(dist.get_rank() if is_distributed else 0),),
        axes=tuple(Axis(name=name, size=size) for name, size in axes),
        is_simulated=world is not None,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv[0] else "",
    )


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
