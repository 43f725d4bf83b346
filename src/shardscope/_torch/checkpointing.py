"""Which modules have activation checkpointing applied to them."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

__all__ = ["is_checkpoint_wrapper", "is_checkpointed"]


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether `module` is what checkpointing puts around a module."""
    return isinstance(module, CheckpointWrapper)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether checkpointing was applied to `module` itself, by a wrapper or in place.

    A call of `torch.utils.checkpoint` in a forward is not to be seen before it runs.
    """
    return is_checkpoint_wrapper(module) or "checkpoint" in (_get_registry(module) or {})
