"""Which parameters a bucket that DDP reduces holds.

DDP rebuilds its buckets in its second forward, so they are read at the end of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.ddp import Bucket, read_buckets
from shardscope.comm.names import ModuleNames
from shardscope.record import BucketReduce

__all__ = ["BucketBook", "common_module"]


@final
class BucketBook:
    """The buckets of every DDP module called, to be told when such a call ends."""

    def __init__(self, names: ModuleNames, report_gap: Callable[[str, str], None]) -> None:
        self._names = names
        self._report_gap = report_gap
        self._buckets: WeakKeyDictionary[nn.Module, list[Bucket]] = WeakKeyDictionary()
        self._last: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def exit(self, module: nn.Module) -> None:
        """Read the buckets of `module`, if it is a DDP module whose forward has ended."""
        if isinstance(module, DistributedDataParallel) and not is_in_backward():
            try:
                self._buckets[module] = read_buckets(module)
            except Exception as error:  # noqa: BLE001 - watching must not kill
                self._report_gap("DDP", f"its buckets could not be read ({error})")
            self._last[module] = -1

    def find(self, num_elements: int, parameter: torch.Tensor | None) -> BucketReduce | None:
        """The same as a record, with the names of its parameters."""
        bucket = self.find_bucket(num_elements, parameter)
        if bucket is None:
            return None
        return BucketReduce(bucket=bucket.index, parameters=self._parameter_names(bucket))

    def find_bucket(self, num_elements: int, parameter: torch.Tensor | None) -> Bucket | None:
        """The bucket of this size that is due when `parameter`, or all, have got their gradient."""
        for module, buckets in self._buckets.items():
            if parameter is not None and not _hold(buckets, parameter):
                continue
            fitting = [bucket for bucket in buckets if bucket.num_elements == num_elements]
            due = [bucket for bucket in fitting if bucket.index > self._last[module]]
            for bucket in due or fitting:
                self._last[module] = bucket.index
                return bucket
        return None

    def _parameter_names(self, bucket: Bucket) -> tuple[str, ...]:
        names = (self._names.parameter_name(parameter) for parameter in bucket.parameters)
        return tuple(name if name is not None else "?" for name in names)


def _hold(buckets: list[Bucket], parameter: torch.Tensor) -> bool:
    return any(parameter is known for bucket in buckets for known in bucket.parameters)


def common_module(names: Sequence[str]) -> str:
    """The innermost module that has all of these, which are parameters or modules below it."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
