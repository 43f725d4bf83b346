"""Which parameters a bucket that DDP reduces holds.

DDP rebuilds its buckets in its second forward, so they are read at the end of each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.ddp import Bucket, read_buckets
from shardscope.comm.names import ModuleNames
from shardscope.record import BucketReduce

__all__ = ["BucketBook"]


class BucketBook:
    """A watcher of module calls that keeps the buckets of every DDP module called."""

    def __init__(self, names: ModuleNames, report_gap: Callable[[str, str], None]) -> None:
        self._names = names
        self._report_gap = report_gap
        self._buckets: dict[int, list[Bucket]] = {}
        self._last: dict[int, int] = {}

    def enter(self, _: nn.Module) -> None:
        """Buckets are read when a call ends."""

    def exit(self, module: nn.Module) -> None:
        """Read the buckets of a DDP module whose forward has ended."""
        if isinstance(module, DistributedDataParallel) and not is_in_backward():
            try:
                self._buckets[id(module)] = read_buckets(module)
            except Exception as error:  # noqa: BLE001 - watching must not kill
                self._report_gap("DDP", f"its buckets could not be read ({error})")
            self._last[id(module)] = -1

    def find(self, num_elements: int, parameter: torch.Tensor) -> BucketReduce | None:
        """The bucket of this size that is due when `parameter` has got its gradient."""
        for key, buckets in self._buckets.items():
            if not any(parameter is p for bucket in buckets for p in bucket.parameters):
                continue
            fitting = [bucket for bucket in buckets if bucket.num_elements == num_elements]
            due = [bucket for bucket in fitting if bucket.index > self._last[key]]
            for bucket in due or fitting:
                self._last[key] = bucket.index
                return BucketReduce(bucket=bucket.index, parameters=self._parameter_names(bucket))
        return None

    def _parameter_names(self, bucket: Bucket) -> tuple[str, ...]:
        names = (self._names.parameter_name(parameter) for parameter in bucket.parameters)
        return tuple(name if name is not None else "?" for name in names)


def common_module(parameters: tuple[str, ...]) -> str:
    """The innermost module that holds all these parameters."""
    paths = [name.split(".")[:-1] for name in parameters]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
