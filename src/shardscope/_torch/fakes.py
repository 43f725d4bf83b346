"""Tensors with shapes and no data, and the exceptions by which they say that they have none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from shardscope._torch.dispatch import DataDependentOutputException, detect_fake_mode
from shardscope._torch.logs import FAKE_TENSOR_LOG
from shardscope._torch.private import find_exception, find_name

__all__ = ["NO_DATA", "FakeTensor", "FakeTensorMode", "is_fake", "without_data"]

FakeTensor = find_name("torch._subclasses.fake_tensor.FakeTensor", "recognise tensors without data")
FakeTensorMode = find_name(
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "read DDP's buckets and run ops without allocating data",
)

NO_DATA = (
    DataDependentOutputException,
    find_exception(
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "run models that read values on data",
    ),
    find_exception(
        "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
        "run models that need data on data",
    ),
)
"""What is raised where a program looks at values, or at sizes that depend on them."""


@contextmanager
def without_data() -> Iterator[None]:
    """Until the context ends new tensors have no data; a mode that does so already is kept."""
    log = logging.getLogger(FAKE_TENSOR_LOG)
    is_disabled, log.disabled = log.disabled, True  # what an op raises, it also logs
    try:
        with nullcontext() if detect_fake_mode() else FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = is_disabled


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data."""
    return isinstance(tensor, FakeTensor)
