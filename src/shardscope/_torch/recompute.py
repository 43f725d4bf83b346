"""Whether a checkpointed function is being run again in backward, and which."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from shardscope._torch.frames import engine_code, recompute_code, reentrant_code

__all__ = ["find_recomputed", "method_owner", "reentrant_nodes"]

_ENGINE, _REENTRANT, _NON_REENTRANT = engine_code(), reentrant_code(), recompute_code()


def find_recomputed(frame: FrameType | None) -> Any:
    """The function that is run again around `frame`, or None. The backward around it is the end."""
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code is _NON_REENTRANT:
            return frame.f_locals["fn"]
        if frame.f_code is _REENTRANT:
            return frame.f_locals["ctx"].run_function
        frame = frame.f_back
    return None


def reentrant_nodes(frame: FrameType | None) -> Iterator[Any]:
    """The autograd nodes whose functions were run again and are, around `frame`, in backward."""
    while frame is not None:
        if frame.f_code is _REENTRANT:
            yield frame.f_locals["ctx"]
        frame = frame.f_back


def method_owner(function: Any) -> nn.Module | None:
    """The module whose method `function` is."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
