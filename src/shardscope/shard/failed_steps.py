"""A step that fails for want of data: what failed, where, and what to do instead."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardscope.errors import MemoryProfileError, ShardscopeError
from shardscope.record.words import describe_error
from shardscope.shard.watcher import Watcher

__all__ = ["explained_failures"]

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_WITH_DATA = (
    'or run it with data: in a simulated world, `with simulate(mesh={"dp": 1})`, without '
    "materialize()"
)
_NO_WORKERS = "Take the batch before memory() is called, or use a DataLoader with num_workers=0"
_NO_CUDA = "Remove calls of torch.cuda where there is no GPU"
_REMEDIES = {  # words of torch's own, and what they mean for tensors without data
    "DataLoader worker process": _NO_WORKERS,
    "Attempted to set the storage of a tensor on device": _NO_WORKERS,
    "Torch not compiled with CUDA enabled": _NO_CUDA,
    "not linked with support for cuda": _NO_CUDA,
    "Found no NVIDIA driver": _NO_CUDA,
    "shape_env must not be None": "Nested tensors need data: pad them",
    "have been used in the graph": (
        "Take parameters from the model in the step, not before memory() is called"
    ),
}


@contextmanager
def explained_failures(watcher: Watcher) -> Iterator[None]:
    """Turn what the lack of data has caused, or may have, into a sentence; pass all else on."""
    try:
        yield
    except Exception as error:
        remedy = _find_remedy(error)
        if remedy:
            raise MemoryProfileError(
                f"the step failed on tensors without data: {_describe(error)}. {remedy}, "
                f"{_WITH_DATA}."
            ) from error
        if watcher.num_values_read and not isinstance(error, ShardscopeError):
            raise MemoryProfileError(
                "the step failed after it had read values of tensors that have none, which "
                f"read as zero: {_describe(error)}. Remove what depends on values, {_WITH_DATA}."
            ) from error
        raise


def _find_remedy(error: Exception) -> str:
    if isinstance(error, ShardscopeError):
        return ""
    text = str(error)
    return next((remedy for words, remedy in _REMEDIES.items() if words in text), "")


def _describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if not one.filename.startswith(("<", _TORCH, _OURS))]
    where = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return describe_error(error).rstrip(" .") + where
