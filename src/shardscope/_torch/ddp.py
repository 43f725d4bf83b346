"""The buckets into which DDP's reducer, written in C++, gathers gradients."""

from __future__ import annotations

from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.fakes import FakeTensorMode
from shardscope._torch.private import find_class

__all__ = ["REPLICATED", "Bucket", "is_in_comm_hook", "is_replicated", "read_buckets"]

REPLICATED = find_class(
    "torch.distributed._composable.replicate.DDP",
    "recognise modules that `replicate` was applied to",
)
"""What `replicate`, the DDP that is no wrapper, adds to the classes of modules."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket: gradients that are reduced together."""

    index: int
    num_elements: int
    parameters: tuple[torch.Tensor, ...]


def is_replicated(module: nn.Module) -> bool:
    """Whether `replicate`, the DDP that is no wrapper, was applied to `module`."""
    return isinstance(module, REPLICATED)


def read_buckets(module: DistributedDataParallel) -> list[Bucket]:
    """The buckets as they stand. Not to be called in backward: the reducer holds its lock then."""
    # The reducer hands out buckets only as zero tensors of their size: without data they are free.
    with FakeTensorMode(allow_non_fake_inputs=True):
        buckets = module.reducer._get_zeros_like_grad_buckets()
    return [
        Bucket(bucket.index(), bucket.buffer().numel(), tuple(bucket.parameters()))
        for bucket in buckets
    ]


def is_in_comm_hook(frame: FrameType | None) -> bool:
    """Whether around `frame` runs a function that DDP has handed a bucket, to reduce it."""
    while frame is not None:
        if any(type(value) is dist.GradBucket for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False
