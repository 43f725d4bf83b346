"""What a profile does not say of a step, and advice depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardscope._torch.fsdp import fsdp_meshes
from shardscope._torch.meshes import axis_names
from shardscope._torch.modules import every_module
from shardscope._torch.storages import plain_tensors
from shardscope._torch.workspaces import CUBLAS_BYTES
from shardscope.comm.names import NO_MODULE, ModuleNames
from shardscope.record import MemoryKind, Phase
from shardscope.shard.ledger import Allocation, Ledger

__all__ = ["Circumstances", "StepFacts"]


class Circumstances(NamedTuple):
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
class StepFacts:
    """Gathers them while a step runs."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._output_bytes: dict[str, int] = {}
        self._works_on_lists = False
        self._can_fuse = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what layers return until the context ends."""
        hooks = [layer.register_forward_hook(self._note_output) for layer in self._layers()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """See how it works: one tensor after the other, on lists of them, or fused."""
        for group in optimizer.param_groups:
            if group.get("foreach", False) is not False and not group.get("fused"):
                self._works_on_lists = True
                self._can_fuse |= "fused" in group

    def read(self, ledger: Ledger, peak_order: int) -> Circumstances:
        """All of them, for a peak after this event."""
        roots = list(self._names.roots())
        meshes = [mesh for root in roots for mesh in fsdp_meshes(root)]
        wrappers = [one for root in roots for one in every_module(root) if _is_ddp(one)]
        phases = {event.allocation.place.phase for event in ledger.events}
        return Circumstances(
            output_bytes=self._output_bytes,
            loss_bytes=_find_loss(ledger, peak_order),
            is_recomputing=Phase.RECOMPUTE in phases,
            fsdp_axes=frozenset(name for mesh in meshes for name in axis_names(mesh)),
            is_ddp=bool(wrappers),
            copies_gradients=any(not one.gradient_as_bucket_view for one in wrappers),
            works_on_lists=self._works_on_lists,
            can_fuse=self._can_fuse,
        )

    def _layers(self) -> Iterator[nn.Module]:
        """The modules that are one of a list or sequence, by their names."""
        for index, name in enumerate(self._names.names):
            module = self._names.module(index)
            if module is not None and name.rpartition(".")[2].isdecimal():
                yield module

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.name(self._names.find(module))
        if name is not None:
            held = sum(one.numel() * one.element_size() for one in _kept_tensors(output))
            self._output_bytes[name] = max(held, self._output_bytes.get(name, 0))


def _is_ddp(module: Any) -> bool:
    return isinstance(module, DistributedDataParallel)


def _kept_tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors that the next module's checkpoint would keep."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield from plain_tensors(output)
    elif isinstance(output, Mapping):
        yield from _kept_tensors(list(output.values()))
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _kept_tensors(one)


def _find_loss(ledger: Ledger, peak_order: int) -> int:
    """What is held outside of modules and was made after the last of them ran, not before."""
    forwards = [
        event.allocation.start
        for event in ledger.events[: peak_order + 1]
        if event.is_start and event.allocation.place.phase is Phase.FORWARD
    ]
    last = max((one for one in forwards), default=-1)
    held = (event.allocation for event in ledger.events[: peak_order + 1] if event.is_start)
    return sum(one.num_bytes for one in held if _is_of_loss(one, last, peak_order))


def _is_of_loss(allocation: Allocation, last_forward: int, peak_order: int) -> bool:
    is_held = allocation.end is None or allocation.end > peak_order
    is_workspace = allocation.end is None and allocation.num_bytes == CUBLAS_BYTES
    is_made_there = allocation.place.phase in (Phase.OUTSIDE, Phase.BACKWARD)
    return (
        is_held
        and not is_workspace
        and is_made_there
        and allocation.owner == NO_MODULE
        and allocation.start > last_forward
        and allocation.kind in (MemoryKind.TEMPORARIES, MemoryKind.ACTIVATIONS)
    )
