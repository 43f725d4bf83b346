"""Facts about a step that its memory profile does not contain and that advice depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardscope._torch.cuda.workspaces import CUBLAS_BYTES
from shardscope._torch.fsdp import fsdp_meshes
from shardscope._torch.mesh import axis_names
from shardscope._torch.modules import every_module
from shardscope._torch.storage import plain_tensors
from shardscope.attribution.module_names import NO_MODULE, ModuleNames
from shardscope.attribution.tensors import tensors_in
from shardscope.record import MemoryKind, Phase
from shardscope.shard.memory.allocations import Allocation, AllocationLog


class StepFacts(NamedTuple):
    """Facts about a step and its model."""

    output_bytes: Mapping[str, int]  # of layers, by name
    loss_bytes: int  # at the peak, of what was computed after the modules had run
    is_recomputing: bool
    fsdp_axes: frozenset[str]
    is_ddp: bool
    copies_gradients: bool  # into DDP's buckets
    works_on_lists: bool  # an optimizer
    can_fuse: bool


@final
class StepFactsCollector:
    """Collects `StepFacts` while a step runs."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._output_bytes: dict[str, int] = {}
        self._works_on_lists = False
        self._can_fuse = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe what layers return until the context ends."""
        hooks = [layer.register_forward_hook(self._note_output) for layer in self._layers()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def observe_optimizer(self, optimizer: Optimizer) -> None:
        """Note how an optimizer works: tensor by tensor, on lists of tensors, or fused."""
        for group in optimizer.param_groups:
            if group.get("foreach", False) is not False and not group.get("fused"):
                self._works_on_lists = True
                self._can_fuse |= "fused" in group

    def read(self, allocation_log: AllocationLog, peak_order: int) -> StepFacts:
        """The facts, for a peak after the event `peak_order`."""
        roots = list(self._names.roots())
        meshes = [mesh for root in roots for mesh in fsdp_meshes(root)]
        wrappers = [wrapper for root in roots for wrapper in every_module(root) if _is_ddp(wrapper)]
        phases = {event.allocation.charged_to.phase for event in allocation_log.events}
        return StepFacts(
            output_bytes=self._output_bytes,
            loss_bytes=_find_loss(allocation_log, peak_order),
            is_recomputing=Phase.RECOMPUTE in phases,
            fsdp_axes=frozenset(name for mesh in meshes for name in axis_names(mesh)),
            is_ddp=bool(wrappers),
            copies_gradients=any(not wrapper.gradient_as_bucket_view for wrapper in wrappers),
            works_on_lists=self._works_on_lists,
            can_fuse=self._can_fuse,
        )

    def _layers(self) -> Iterator[nn.Module]:
        """The modules that are items of a list or sequence, recognized by their names."""
        for index, name in enumerate(self._names.names):
            module = self._names.module(index)
            if module is not None and name.rpartition(".")[2].isdecimal():
                yield module

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.name(self._names.find(module))
        if name is not None:
            output_bytes = sum(
                tensor.numel() * tensor.element_size() for tensor in _saved_tensors(output)
            )
            self._output_bytes[name] = max(output_bytes, self._output_bytes.get(name, 0))


def _is_ddp(module: Any) -> bool:
    return isinstance(module, DistributedDataParallel)


def _saved_tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors that a checkpoint around the next module would save."""
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            yield from plain_tensors(tensor)


def _find_loss(allocation_log: AllocationLog, peak_order: int) -> int:
    """Bytes at the peak that were allocated outside of modules after the last forward."""
    forwards = [
        event.allocation.start
        for event in allocation_log.events[: peak_order + 1]
        if event.is_start and event.allocation.charged_to.phase is Phase.FORWARD
    ]
    last = max((start for start in forwards), default=-1)
    allocations = (
        event.allocation for event in allocation_log.events[: peak_order + 1] if event.is_start
    )
    return sum(start.num_bytes for start in allocations if _is_of_loss(start, last, peak_order))


def _is_of_loss(allocation: Allocation, last_forward: int, peak_order: int) -> bool:
    is_allocated = allocation.end is None or allocation.end > peak_order
    is_workspace = allocation.end is None and allocation.num_bytes == CUBLAS_BYTES
    is_outside_forward = allocation.charged_to.phase in (Phase.OUTSIDE, Phase.BACKWARD)
    return (
        is_allocated
        and not is_workspace
        and is_outside_forward
        and allocation.owner == NO_MODULE
        and allocation.start > last_forward
        and allocation.kind in (MemoryKind.TEMPORARIES, MemoryKind.ACTIVATIONS)
    )
