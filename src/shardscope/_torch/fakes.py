"""Tensors with shapes and no data, and the exceptions by which they say that they have none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

__all__ = ["NO_DATA", "is_fake", "without_data"]

NO_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What is raised where a program looks at values, or at sizes that depend on them."""


@contextmanager
def without_data() -> Iterator[None]:
    """Until the context ends new tensors have no data; a mode that does so already is kept."""
    log = logging.getLogger(FakeTensorMode.__module__)
    is_disabled, log.disabled = log.disabled, True  # what an op raises, it also logs
    try:
        with nullcontext() if detect_fake_mode() else FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = is_disabled


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data."""
    return isinstance(tensor, FakeTensor)
