"""What was done to each module to shard it, compile it or hold less of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.checkpointing import is_checkpointed
from shardscope._torch.ddp import is_replicated
from shardscope._torch.fsdp_groups import ManagedGroup, modules_under_fsdp
from shardscope._torch.modules import every_module, is_compiled, unwrap
from shardscope._torch.styles import parallel_styles
from shardscope.record import Mark, MarkKind

__all__ = ["read_marks"]


def read_marks(model: nn.Module, groups: Iterable[ManagedGroup]) -> dict[int, list[Mark]]:
    """By the identity of the user's module, what was done to it, from the outside inwards."""
    marks: defaultdict[int, list[Mark]] = defaultdict(list)
    for group in groups:
        for module in group.modules:
            marks[id(unwrap(module))].append(_describe_group(group))
    for module, kind in modules_under_fsdp(model):
        own = marks[id(unwrap(module))]
        if all(mark.kind is not kind for mark in own):
            own.append(Mark(kind=kind))
    for module in every_module(model):
        marks[id(unwrap(module))] += _read_own(module)
    return marks


def _describe_group(group: ManagedGroup) -> Mark:
    return Mark(
        kind=group.kind,
        detail=group.policy,
        axes=group.axes,
        num_parameters=len(group.places),
    )


def _read_own(module: nn.Module) -> Iterator[Mark]:
    if isinstance(module, DistributedDataParallel):
        trained = sum(parameter.requires_grad for parameter in module.module.parameters())
        yield Mark(kind=MarkKind.DDP, num_parameters=trained)
    elif is_replicated(module):
        trained = sum(parameter.requires_grad for parameter in module.parameters())
        yield Mark(kind=MarkKind.DDP, num_parameters=trained)
    if is_compiled(module):
        yield Mark(kind=MarkKind.COMPILED)
    if is_checkpointed(module):
        yield Mark(kind=MarkKind.CHECKPOINTED)
    for style, axes in parallel_styles(module).items():
        yield Mark(kind=MarkKind.TENSOR_PARALLEL, detail=style, axes=axes)
