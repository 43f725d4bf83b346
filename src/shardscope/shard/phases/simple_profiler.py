"""A drop-in for FSDP's `SimpleProfiler` whose sections are also recorded as phases."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import ClassVar

import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from shardscope._torch.logs import SIMPLE_PROFILER_LOG
from shardscope.shard.phases.phases import phases

# Torch's own logger, so that its level and handlers apply to our lines too.
_LOGGER = logging.getLogger(SIMPLE_PROFILER_LOG)


class SimpleProfiler:
    """Sums seconds by type, for this process; a drop-in for FSDP's class of this name.

    A type may not be profiled inside itself. Inside a `trace`, profiled sections are also in the
    recording.

    Examples:
        >>> with SimpleProfiler.profile(SimpleProfiler.Type.ALL_GATHER):
        ...     gather()
    """

    class Type(str, Enum):  # noqa: UP042 - torch's prints as an Enum does
        """The types that torch defines; `profile` accepts any other text too."""

        ALL = "all"
        ALLGATHER = "all_gather"
        ALLGATHER_OBJ = "all_gather_object"
        RESHARDING = "resharding"
        H2D = "H2D"
        D2H = "D2H"

    results: ClassVar[dict[str, float]] = defaultdict(float)
    profiling: ClassVar[set[str]] = set()

    @classmethod
    def reset(cls) -> None:
        """Clear the results and the types that are being profiled."""
        cls.results.clear()
        cls.profiling.clear()

    @classmethod
    @contextmanager
    def profile(cls, profile_type: str) -> Iterator[None]:
        """Add the time inside the context to `profile_type`."""
        if profile_type in cls.profiling:
            raise AssertionError(
                f"{profile_type} is already being profiled. SimpleProfiler does not support "
                "profiling multiple instances at the same time. "
            )
        cls.profiling.add(profile_type)
        begin = time.monotonic()
        try:
            with phases(_name(profile_type)):
                yield
        finally:
            cls.results[profile_type] += time.monotonic() - begin
            cls.profiling.remove(profile_type)

    @classmethod
    def dump_and_reset(cls, msg: str) -> None:
        """Log the results on rank 0 at debug level INFO, and clear them.

        Not at level DETAIL, which checks every collective and so spoils the times.
        """
        if dist.get_rank() == 0 and get_debug_level() == DebugLevel.INFO:
            _LOGGER.info("%s %s", msg, cls.results)
        cls.reset()


def _name(profile_type: object) -> str:
    return str(profile_type.value if isinstance(profile_type, Enum) else profile_type)
