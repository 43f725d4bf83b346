"""Torch's own logs: those that we write to in its place, and those that say what we say too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FAKE_TENSOR_LOG", "SIMPLE_PROFILER_LOG", "failed_ops_unlogged"]

SIMPLE_PROFILER_LOG = "torch.distributed.fsdp._debug_utils"
"""Where torch's SimpleProfiler writes its lines."""

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""Where torch logs what an op on tensors without data raises."""


@contextmanager
def failed_ops_unlogged() -> Iterator[None]:
    """Keep torch from logging, with a traceback, what an op on tensors without data raises.

    For who catches the exception and reports it in a sentence of its own.
    """
    log = logging.getLogger(FAKE_TENSOR_LOG)
    log.addFilter(_has_no_exception)
    try:
        yield
    finally:
        log.removeFilter(_has_no_exception)


def _has_no_exception(record: logging.LogRecord) -> bool:
    return not record.exc_info
