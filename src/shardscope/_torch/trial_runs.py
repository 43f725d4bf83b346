"""Ops that DTensor runs only to learn the shape of their result, on whole tensors without data."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from shardscope._torch.private import find_name

__all__ = ["TrialRuns"]

ShardingPropagator = find_name(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    "recognise DTensor's shape propagation, which allocates no memory",
)


@final
class TrialRuns:
    """Knows whether the op at hand is such a trial."""

    def __init__(self) -> None:
        self._threads: set[int] = set()

    def is_on(self) -> bool:
        """Whether this thread is trying an op out."""
        return threading.get_ident() in self._threads

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Know until the context ends."""
        run = ShardingPropagator._propagate_tensor_meta_non_cached

        @functools.wraps(run)
        def run_and_tell(*args: Any, **kwargs: Any) -> Any:
            self._threads.add(threading.get_ident())
            try:
                return run(*args, **kwargs)
            finally:
                self._threads.discard(threading.get_ident())

        ShardingPropagator._propagate_tensor_meta_non_cached = run_and_tell
        try:
            yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = run
