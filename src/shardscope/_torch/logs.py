"""Names of torch's loggers that we write to or silence. Does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SIMPLE_PROFILER_LOG = "torch.distributed.fsdp._debug_utils"
"""The logger of torch's SimpleProfiler."""

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The logger of errors of ops on fake tensors."""


@contextmanager
def failed_ops_unlogged() -> Iterator[None]:
    """Keep torch from logging errors of ops on fake tensors with a traceback.

    For callers that catch the exception and report it themselves.
    """
    log = logging.getLogger(FAKE_TENSOR_LOG)
    log.addFilter(_has_no_exception)
    try:
        yield
    finally:
        log.removeFilter(_has_no_exception)


def _has_no_exception(record: logging.LogRecord) -> bool:
    return not record.exc_info
