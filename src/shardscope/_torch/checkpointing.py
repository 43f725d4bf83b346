"""Which modules have activation checkpointing applied to them."""

from __future__ import annotations

from torch import nn

from shardscope._torch.private import find_class, find_name, is_missing

__all__ = ["is_checkpoint_wrapper", "is_checkpointed"]

_get_registry = find_name(
    "torch.distributed._composable.contract._get_registry",
    "recognise modules that are checkpointed in place",
)
CheckpointWrapper = find_class(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
    "recognise modules with a checkpoint wrapper",
)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether `module` is what checkpointing puts around a module."""
    return isinstance(module, CheckpointWrapper)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether checkpointing was applied to `module` itself, by a wrapper or in place.

    A call of `torch.utils.checkpoint` in a forward is not to be seen before it runs.
    """
    if is_checkpoint_wrapper(module) or is_missing(_get_registry):
        return is_checkpoint_wrapper(module)
    return "checkpoint" in (_get_registry(module) or {})
