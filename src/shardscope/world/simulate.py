"""A world of any size in one process: this process is one of its ranks, and no data is sent."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from shardscope._torch.collectives.hooks import intercept
from shardscope._torch.cuda.gpus import DEFAULT_GPU
from shardscope._torch.cuda.inductor_dry_run import inductor_without_codegen
from shardscope._torch.cuda.kernel_choices import foreach_by_default
from shardscope._torch.cuda.simulated import (
    recompiles_across_devices,
    simulated_cuda,
    tensors_without_modes,
)
from shardscope._torch.cuda.triton_kernels import OnKernel, skipped_triton_kernels
from shardscope._torch.fsdp import empty_on_device
from shardscope._torch.private import moved_names_explained, without_if_moved
from shardscope._torch.process_groups.host_data import (
    HostData,
    OnRead,
    inference_as_no_grad,
    modes_in_threads,
)
from shardscope._torch.process_groups.known_values import KnownValues
from shardscope._torch.process_groups.launched import OnJoin, joined_at_once
from shardscope._torch.process_groups.simulated import (
    answered_collectives,
    coalesced_ops_on_fake_tensors,
    isolated_stages,
    shared_rank_maps,
    simulated_group,
)
from shardscope._torch.process_groups.simulated_tensors import (
    explained_lack_of_data,
    fake_tensors,
    meshes_with_data,
    refused_nested_tensors,
)
from shardscope._torch.process_groups.symmetric_memory import simulated_symmetric_memory
from shardscope.errors import WorldError
from shardscope.record.ranks import MAX_RANKS
from shardscope.world.checks import CollectiveChecker
from shardscope.world.objects import Mailbox, simulated_object_collectives

Materialized = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By the identity of a tensor on meta: that tensor, and what has taken its place."""


@contextmanager
def preserved_ties(model: nn.Module, materialized: Materialized) -> Iterator[None]:
    """Restore tied parameters and buffers after `to_empty()` has created a tensor for each.

    `materialized` has the tensors so far, by id, for models that share tensors with this one.
    """
    attributes = [(*attribute, getattr(*attribute)) for attribute in _tensor_attributes(model)]
    yield
    for module, name, before in attributes:
        now = getattr(module, name)
        if now is not before:
            _, first = materialized.setdefault(id(before), (before, now))
            if first is not now:
                setattr(module, name, first)


def _tensor_attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for name, _ in chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield module, name


ModelT = TypeVar("ModelT", bound=nn.Module)

_current: World | None = None
_world_lock = threading.Lock()


@final
class World:
    """A simulated world, seen from one of its ranks: `mesh`, `axes`, `rank` and `size`.

    Without a mesh, the program that runs in it makes its own.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        *,
        rank: int,
        size: int,
        device_type: str,
        mesh: DeviceMesh | None,
    ) -> None:
        self.axes = dict(axes)
        self.rank = rank
        self.size = size
        self.device_type = device_type
        self._mesh = mesh
        self._made: list[DeviceMesh] = []
        self._stack = ExitStack()
        self.known: KnownValues | None = None  # of a launched program
        self.host: HostData | None = None  # if tensors on the CPU have data, and others have not
        self._is_fake = False
        self._materialized: Materialized = {}
        self._has_ended = False

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes.items()) or "no mesh"
        return f"World({mesh}; rank {self.rank} of {self.size})"

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks."""
        if self._mesh is None:
            raise WorldError(
                f"{self!r} has no mesh of its own: the program that runs in it makes its meshes. "
                "Use one of those."
            )
        return self._mesh

    @property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The mesh of all ranks, or those that the program has made."""
        return tuple(self._made) if self._mesh is None else (self._mesh,)

    def materialize(self, model: ModelT) -> ModelT:
        """Give a model that was built on meta tensors with shapes but no data, and return it.

        From here to the end of the world every new tensor has a shape but no data, so that a step
        of a model of any size needs neither memory nor computation. Shard the model and slice
        meshes before, not after.

        Args:
            model: The sharded model, on the meta device.

        Examples:
            >>> model = world.materialize(model)
        """
        self._check_can_materialize(model)
        self._drop_data()
        device = self.device_type
        with preserved_ties(model, self._materialized):
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                empty_on_device(model, device)
        return model

    def _drop_data(self, host: HostData | None = None) -> None:
        """From now on, create every new tensor without data; with `host`, only off the CPU."""
        if not self._is_fake:
            self._stack.enter_context(meshes_with_data())
            mode = self._stack.enter_context(fake_tensors(host))
            self._stack.enter_context(tensors_without_modes(mode))
            self._stack.enter_context(refused_nested_tensors())
            self._stack.enter_context(inductor_without_codegen())
            if host is not None:
                self._stack.enter_context(modes_in_threads(mode))
            self._is_fake, self.host = True, host

    def _check_can_materialize(self, model: nn.Module) -> None:
        if self._has_ended:
            raise WorldError(
                f"materialize() was called on {self!r} after its `with simulate(…)` block had "
                "ended. Call it inside the block."
            )
        if not isinstance(model, nn.Module):
            raise WorldError(
                f"materialize() got {model!r:.60}, which is not a module. Give it the model itself."
            )
        is_in_ddp = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        if is_in_ddp and not self._is_fake:
            raise WorldError(
                "materialize() got a model wrapped in DistributedDataParallel, whose reducer holds "
                "tensors with data. Wrap the model after materialize(), or run it in the simulated "
                "world without materialize()."
            )

        lazy = next(
            (name for name, parameter in model.named_parameters() if is_lazy(parameter)), None
        )
        if lazy is not None:
            raise WorldError(
                f"materialize() got a model whose parameter '{lazy}' has no shape yet. Give its "
                "layer its sizes (Linear for LazyLinear), or call the model on meta tensors first."
            )

    def _close(self) -> None:
        self._has_ended = True
        self._stack.close()


def current_world() -> World | None:
    """The simulated world that this process is in, or None.

    Examples:
        >>> world = current_world()
    """
    return _current


@contextmanager
def simulate(
    mesh: Mapping[str, int], *, rank: int = 0, device: str | torch.device = "cpu"
) -> Iterator[World]:
    """Make this process one rank of a simulated world.

    `torch.distributed` behaves as on that rank, at any size, but sends nothing; what a real process
    group would refuse is refused. When the context ends, also by an exception, everything is
    restored.

    With `device="cuda"` torch makes the decisions that it makes on a GPU: which collectives DTensor
    issues, which kernels are selected. This needs no GPU; without one, tensors have shapes but no
    data from the start.

    Args:
        mesh: Axis names and sizes of the mesh.
        rank: The rank that this process is.
        device: The device type of the mesh: "cpu" or "cuda".

    Examples:
        >>> with simulate(mesh={"dp": 128, "tp": 8}, device="cuda") as world:
        ...     with torch.device("meta"):
        ...         model = fully_shard(build(), mesh=world.mesh["dp"])
        ...     model = world.materialize(model)
    """
    axes = _checked_axes(mesh)
    rank = _checked_rank(rank, axes)
    device_type = _checked_device(device)
    with ExitStack() as stack:
        stack.enter_context(moved_names_explained())
        stack.enter_context(_exclusive_world())
        stack.enter_context(without_if_moved(recompiles_across_devices()))
        is_fake = device_type == "cuda" and not torch.cuda.is_available()
        if is_fake:
            stack.enter_context(simulated_cuda())
        elif device_type == "cuda":  # a real GPU is there: torch's other decisions need no patch
            stack.enter_context(without_if_moved(foreach_by_default(device_type)))
        backend = "nccl" if device_type == "cuda" else "gloo"
        stack.enter_context(simulated_group(rank, math.prod(axes.values()), backend=backend))
        stack.enter_context(without_if_moved(shared_rank_maps()))
        device_mesh = init_device_mesh(
            device_type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
        if device_type == "cpu" and not torch.cuda.is_available():
            stack.enter_context(_refuse_cuda_meshes())
        stack.enter_context(_collectives_without_peers())
        world = World(
            axes, rank=rank, size=device_mesh.size(), device_type=device_type, mesh=device_mesh
        )
        stack.callback(world._close)
        if is_fake:
            world._drop_data()
        with _as_current(world), explained_lack_of_data():
            yield world


@contextmanager
def launched_rank(
    rank: int,
    size: int,
    *,
    num_devices: int,
    gpu: str = DEFAULT_GPU,
    mailbox: Mailbox,
    on_join: OnJoin,
    on_read: OnRead,
    on_kernel: OnKernel,
) -> Iterator[World]:
    """Make this process one rank of a simulated cluster, for a program that starts its own groups.

    Until the program calls `init_process_group`, there is none. The device is a simulated GPU;
    tensors on the CPU have data, tensors on the GPU have none.

    Args:
        rank: The rank that this process is.
        size: The number of ranks.
        num_devices: The number of GPUs of the host.
        gpu: The GPU: h200, h100, a100 or b200.
        mailbox: Carries objects to and from ranks that run as other processes.
        on_join: Called with the rank and size of the default group when the program makes it.
        on_read: Called when the program reads a value of a tensor without data, or a time.
        on_kernel: Called when the program launches a Triton kernel, which is skipped.
    """
    with ExitStack() as stack:
        stack.enter_context(moved_names_explained())
        stack.enter_context(_exclusive_world())
        stack.enter_context(without_if_moved(recompiles_across_devices()))
        stack.enter_context(
            simulated_cuda(num_devices, gpu, is_initialized=False, on_unknown=on_read)
        )
        stack.enter_context(joined_at_once(rank, size, on_join))
        stack.enter_context(without_if_moved(shared_rank_maps()))
        world = World({}, rank=rank, size=size, device_type="cuda", mesh=None)
        world.known = KnownValues()
        stack.enter_context(_collectives_without_peers(mailbox, world.known))
        stack.callback(world._close)
        stack.enter_context(_noted_meshes(world))
        stack.enter_context(intercept(world.known, report_missing=lambda sentence: None))
        stack.enter_context(inference_as_no_grad())
        world._drop_data(HostData(on_read))
        stack.enter_context(skipped_triton_kernels(on_kernel))
        with _as_current(world):
            yield world


@contextmanager
def _noted_meshes(world: World) -> Iterator[None]:
    """Collect the meshes with named axes that the program makes."""
    make = DeviceMesh.__init__

    @functools.wraps(make)
    def make_and_note(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.mesh_dim_names:
            world._made.append(self)

    DeviceMesh.__init__ = make_and_note  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.__init__ = make  # type: ignore[method-assign]


@contextmanager
def _collectives_without_peers(
    mailbox: Mailbox | None = None, known: KnownValues | None = None
) -> Iterator[None]:
    """Check collectives and fill their results without the other ranks."""
    with ExitStack() as stack:
        stack.enter_context(coalesced_ops_on_fake_tensors())
        stack.enter_context(answered_collectives())
        stack.enter_context(without_if_moved(simulated_symmetric_memory()))
        stack.enter_context(simulated_object_collectives(mailbox, known))
        stack.enter_context(without_if_moved(isolated_stages(can_ask=mailbox is not None)))
        # Collectives that this torch does not let us see pass unchecked; its recordings have a gap.
        stack.enter_context(intercept(CollectiveChecker(), report_missing=lambda sentence: None))
        yield


@contextmanager
def _exclusive_world() -> Iterator[None]:
    """Refuse a second world in this process: all threads share the default process group."""
    if not _world_lock.acquire(blocking=False):
        raise WorldError(
            f"simulate() was called inside another simulated world ({_current or 'being set up'}). "
            "Leave that one first: worlds cannot be nested."
        )
    try:
        if dist.is_initialized():
            raise WorldError(
                "simulate() needs a process without a process group, and this one has one "
                f"({dist.get_backend()}, {dist.get_world_size()} ranks). Call "
                "torch.distributed.destroy_process_group() first, or trace() the real run instead."
            )
        yield
    finally:
        _world_lock.release()


@contextmanager
def _refuse_cuda_meshes() -> Iterator[None]:
    """Refuse CUDA meshes without a real or simulated GPU; torch would fail at first use."""
    make = DeviceMesh.__init__

    @functools.wraps(make)
    def refuse(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            raise WorldError(
                'A mesh on "cuda" was made in a world that is simulated on "cpu", on a machine '
                'without a GPU. Simulate with device="cuda", which needs none.'
            )
        make(self, device_type, *args, **kwargs)

    DeviceMesh.__init__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.__init__ = make  # type: ignore[method-assign]


@contextmanager
def _as_current(world: World) -> Iterator[None]:
    global _current
    _current = world
    try:
        yield
    finally:
        _current = None


def _checked_axes(mesh: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(mesh, Mapping) or not mesh:
        raise WorldError(
            f"simulate() got mesh={mesh!r}, which names no axis. "
            'Give axis names and sizes, for example mesh={"dp": 8, "tp": 4}.'
        )
    axes = {name: _as_index(size) for name, size in mesh.items()}
    for name, size in axes.items():
        if not isinstance(name, str) or not name:
            raise WorldError(f"simulate() got the axis name {name!r}. Axis names are strings.")
        if size is None or size < 1:
            raise WorldError(
                f"simulate() got the size {mesh[name]!r} for axis {name!r}. "
                "An axis has a whole number of ranks, at least one."
            )
    sizes = {name: size for name, size in axes.items() if size is not None}
    if math.prod(sizes.values()) > MAX_RANKS:
        raise WorldError(
            f"simulate() got a mesh of {math.prod(sizes.values()):,} ranks ({_shape(sizes)}). "
            f"Choose at most {MAX_RANKS:,}."
        )
    return sizes


def _checked_rank(rank: int, axes: Mapping[str, int]) -> int:
    number, size = _as_index(rank), math.prod(axes.values())
    if number is None or not 0 <= number < size:
        raise WorldError(
            f"simulate() got rank={rank!r}, but the mesh {_shape(axes)} has ranks 0 to {size - 1}. "
            "Choose one of those."
        )
    return number


def _checked_device(device: str | torch.device) -> str:
    name = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if name in ("cpu", "cuda"):
        return name
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and name == accelerator.type:
        return name
    raise WorldError(
        f"simulate() got device={device!r}, which it cannot simulate. Use 'cuda', which needs no "
        "GPU, or 'cpu'."
    )


def _as_index(value: object) -> int | None:
    """An integer of any type, also numpy's; None for everything else."""
    is_number = hasattr(value, "__index__") and not isinstance(value, bool | torch.Tensor)
    return operator.index(value) if is_number else None  # type: ignore[arg-type]


def _shape(axes: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in axes.items())
