"""The records that describe a program: its run, mesh axes, modules and gaps."""

from __future__ import annotations

import math
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, final

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardscope._torch.collectives.schema import num_bytes
from shardscope._torch.fsdp import meshes_of, sharded_parameters, user_class
from shardscope._torch.mesh import (
    axis_names,
    choose_mesh,
    describe_axes,
    describe_placements,
    local_shape,
)
from shardscope._torch.modules import own_parameters
from shardscope._torch.private import missing_names, warn_if_untested
from shardscope._torch.spmd_types import AxisType, read_annotation
from shardscope.attribution.module_names import ModuleNames
from shardscope.record import (
    Axis,
    Gap,
    Module,
    Parameter,
    RankProcess,
    RankSpan,
    Recording,
    RunInfo,
    replace_surrogates,
)
from shardscope.version import __version__
from shardscope.world import current_world

_FAKE_BACKEND = "fake"
_DEVICES = {"nccl": "cuda", "gloo": "cpu", "mpi": "cpu", "xccl": "xpu"}  # by backend


def read_identity() -> tuple[int, int]:
    """This process's rank and world size; before initialization, from the environment."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
        return int(rank), int(size)
    return 0, 1


def is_simulated() -> bool:
    """Whether no other rank exists: the world is simulated, or torch's fake backend is used."""
    return current_world() is not None or (
        dist.is_initialized() and str(dist.get_backend()) == _FAKE_BACKEND
    )


def describe_run(rank: int, world_size: int, axes: tuple[Axis, ...], *, instrument: str) -> RunInfo:
    """The record of the run that this process is a rank of.

    Every instrument calls this, so the warning about an untested torch version is given here.
    """
    warn_if_untested()
    return RunInfo(
        torch_version=str(torch.__version__),
        shardscope_version=__version__,
        world_size=world_size,
        ranks=(RankSpan(rank),),
        axes=axes,
        is_simulated=is_simulated(),
        command=_describe_command(),
        instruments=(instrument,),
        device_type=_find_device_type(),
        ranks_per_node=_read_node_size(world_size),
    )


# How many ranks launchers say there are in all, and on this node: torchrun, Open MPI, MPICH, Slurm.
_LAUNCHERS = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
_SAME_NUMBER = re.compile(r"([1-9]\d{0,8})(\(x\d+\))?")  # Slurm's `8(x16)`: 8 on each of 16 nodes


def _read_node_size(world_size: int) -> int | None:
    """How many ranks share a node, as their launcher says; None if nothing says so."""
    for total, on_node in _LAUNCHERS:
        match = _SAME_NUMBER.fullmatch(os.environ.get(on_node, ""))
        if match and os.environ.get(total) == str(world_size):
            return int(match[1])
    return None


def describe_process(rank: int, *, started_unix_ns: int) -> RankProcess:
    """The record of this process, which runs as a rank."""
    return RankProcess(
        rank=rank,
        host=replace_surrogates(socket.gethostname()),
        pid=os.getpid(),
        started_unix_ns=started_unix_ns,
    )


def _find_device_type() -> str | None:
    """The device type of the simulated world, or the one that the backend of the group implies."""
    world = current_world()
    if world is not None:
        return world.device_type
    return _DEVICES.get(str(dist.get_backend())) if dist.is_initialized() else None


def find_torch_gaps(rank: int | None = None) -> tuple[Gap, ...]:
    """A gap for each private torch name that this torch version lacks."""
    return tuple(Gap(place="torch", fact=fact, rank=rank) for fact in missing_names())


def _describe_command() -> str:
    if not sys.argv or not sys.argv[0]:
        return ""
    return replace_surrogates(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))


class Reporter(Protocol):
    """Has the rank of this process, and collects gaps for what cannot be described."""

    rank: int

    def report_gap(self, place: str, fact: str) -> None:
        """Add a gap to the recording."""


@final
class Inventory:
    """Creates the record of each named module once, in the order in which modules are found."""

    def __init__(self, names: ModuleNames, recorder: Reporter) -> None:
        self._names = names
        self._recorder = recorder
        self._report_gap = recorder.report_gap
        self._num_described = 0
        self._lazy: list[int] = []  # modules with uninitialized (lazy) parameters

    def describe_new(self) -> Iterator[Module]:
        """Records of the modules found since the last call; a shared module has one record."""
        first, self._num_described = self._num_described, len(self._names.names)
        new, self._lazy = [*self._lazy, *range(first, self._num_described)], []
        if not new:
            return
        sharded = self._sharded_parameters()
        for index in new:
            module = self._names.module(index)
            if module is not None and any(is_lazy(p) for _, p in own_parameters(module)):
                self._lazy.append(index)
            elif module is not None and not self._names.is_alias(index):
                try:
                    yield self._describe(index, module, sharded)
                except Exception as error:  # noqa: BLE001 - tracing must not fail the run
                    fact = f"a module could not be described ({error!r})"
                    self._report_gap(self._names.names[index], fact)

    def _sharded_parameters(self) -> dict[tuple[int, str], torch.Tensor]:
        """The sharded parameters of FSDP modules; a module shows the full tensor while gathered."""
        sharded: dict[tuple[int, str], torch.Tensor] = {}
        for root in self._names.roots():
            try:
                sharded |= sharded_parameters(root)
            except Exception as error:  # noqa: BLE001 - tracing must not fail the run
                self._report_gap("FSDP", f"its shards could not be read ({error!r})")
        return sharded

    def _describe(
        self, index: int, module: nn.Module, sharded: dict[tuple[int, str], torch.Tensor]
    ) -> Module:
        return Module(
            name=self._names.names[index],
            type=user_class(module).__name__,
            ranks=(RankSpan(self._recorder.rank),),
            parameters=tuple(_describe_parameters(module, sharded)),
            aliases=self._names.aliases(index),
        )


def _describe_parameters(
    module: nn.Module, sharded: dict[tuple[int, str], torch.Tensor]
) -> Iterator[Parameter]:
    for name, parameter in own_parameters(module):
        yield describe_parameter(name, sharded.get((id(module), name), parameter))


def describe_parameter(name: str, parameter: torch.Tensor) -> Parameter:
    """The record of a parameter or buffer, without the fields that only `audit` fills."""
    types = read_annotation(parameter)
    if types:
        return _describe_annotated(_describe_tensor(name, parameter), types)
    return _describe_tensor(name, parameter)


def add_types(record: Parameter, types: Mapping[str, str]) -> Parameter:
    """Add the types that a parameter had along the axes of its mesh before FSDP sharded it."""
    placed = zip(record.axes, record.placements, strict=True)
    placements = tuple(
        "Invariant" if (types.get(axis), placement) == ("I", "Replicate") else placement
        for axis, placement in placed
    )
    return replace(record, placements=placements, is_annotated=True)


def _describe_annotated(record: Parameter, types: tuple[AxisType, ...]) -> Parameter:
    """The record of a plain tensor with its global shape, all shards being of the same size."""
    shape = list(record.shape)
    for axis_type in types:
        if axis_type.dim is not None:
            shape[axis_type.dim] *= axis_type.size
    num_parts = math.prod(axis_type.size for axis_type in types if axis_type.dim is not None)
    return replace(
        record,
        shape=tuple(shape),
        placements=tuple(axis_type.name for axis_type in types),
        axes=tuple(axis_type.axis for axis_type in types),
        global_bytes=(record.local_bytes or 0) * num_parts,
        is_annotated=True,
    )


def _describe_tensor(name: str, parameter: torch.Tensor) -> Parameter:
    placed = parameter if isinstance(parameter, DTensor) else None
    local, itemsize = local_shape(parameter), parameter.dtype.itemsize
    return Parameter(
        name=name,
        shape=tuple(map(int, parameter.shape)),  # nested tensors have symbolic sizes
        local_shape=local,
        dtype=str(parameter.dtype).removeprefix("torch."),
        placements=() if placed is None else describe_placements(placed.placements),
        axes=() if placed is None else axis_names(placed.device_mesh),
        is_trainable=parameter.requires_grad,
        global_bytes=num_bytes(parameter) if placed is None else parameter.numel() * itemsize,
        local_bytes=num_bytes(parameter) if placed is None else math.prod(local) * itemsize,
    )


@final
class ProgramRecords:
    """A recording's run, modules and gaps, for instruments that record no collectives."""

    def __init__(self, names: ModuleNames, *, instrument: str) -> None:
        self.rank, world_size = read_identity()
        self._gaps: dict[tuple[str, str], Gap] = {}
        axes = read_axes(names, self.report_gap)
        self._run = describe_run(self.rank, world_size, axes, instrument=instrument)
        for gap in find_torch_gaps():
            self.report_gap(gap.place, gap.fact)
        self._inventory = Inventory(names, self)
        # Before a module is called: during the call FSDP has gathered its parameters.
        self._modules: list[Module] = list(self._inventory.describe_new())

    def report_gap(self, place: str, fact: str) -> None:
        """Add a gap, unless the same gap was added before."""
        self._gaps.setdefault((place, fact), Gap(place=place, fact=fact, rank=self.rank))

    def recording(self) -> Recording:
        """A recording without collectives, findings or spans."""
        self._modules += self._inventory.describe_new()
        gaps = tuple(self._gaps.values())
        return Recording(
            run=self._run,
            groups=(),
            modules=tuple(self._modules),
            collectives=(),
            findings=(),
            gaps=gaps,
        )


def read_axes(
    names: ModuleNames,
    report_gap: Callable[[str, str], None],
    *,
    mesh: DeviceMesh | None = None,
    on_mesh: Callable[[DeviceMesh], None] | None = None,
) -> tuple[Axis, ...]:
    """The axes of a run: those of `mesh`, the models' meshes or the world's, by `choose_mesh`.

    Args:
        names: The models, by the names of their modules.
        report_gap: Called with a place and a fact for each mesh that cannot be read.
        mesh: A mesh that the user named.
        on_mesh: Called with every mesh.
    """
    world = current_world()
    named = [] if mesh is None else [mesh]
    known = [*named, *(() if world is None else world.meshes)]
    used: list[DeviceMesh] = []
    try:
        used += (mesh for model in names.roots() for mesh in meshes_of(model))
    except Exception as error:  # noqa: BLE001 - tracing must not fail the run
        report_gap("mesh", f"the model's meshes could not be read ({error!r})")
    try:
        if on_mesh is not None:
            for candidate in {id(mesh): mesh for mesh in (*named, *used, *known)}.values():
                on_mesh(candidate)
        chosen = choose_mesh(used, known)
    except Exception as error:  # noqa: BLE001 - tracing must not fail the run
        report_gap("mesh", f"a mesh could not be read ({error!r})")
        return ()
    return () if chosen is None else describe_axes(chosen)
