"""What is running around a frame: an optimizer's step, something that torch.compile has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch.autograd.graph import save_on_cpu

from shardscope._torch.frames import optimizer_code
from shardscope._torch.private import find_code

__all__ = ["is_compiled_running", "is_optimizer_running", "watched_offloading"]

_COMPILED = find_code(
    "torch._dynamo.eval_frame._TorchDynamoContext.__call__",
    "recognise compiled code on the stack",
    inner="compile_wrapper",
)


def is_optimizer_running(frame: FrameType | None) -> bool:
    """Whether an optimizer is stepping: one that raised has not said that it ended."""
    return _is_around(frame, optimizer_code())


def is_compiled_running(frame: FrameType | None) -> bool:
    """Whether a compiled function is running, even if as it is."""
    return _is_around(frame, _COMPILED)


@contextmanager
def watched_offloading(tell: Callable[[], None]) -> Iterator[None]:
    """Tell when activations begin to be kept on the host."""
    enter = save_on_cpu.__enter__

    def enter_and_tell(self: Any) -> Any:
        tell()
        return enter(self)

    save_on_cpu.__enter__ = enter_and_tell
    try:
        yield
    finally:
        del save_on_cpu.__enter__  # it is inherited


def _is_around(frame: FrameType | None, code: CodeType | None) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
