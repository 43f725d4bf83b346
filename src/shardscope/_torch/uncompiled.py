"""Keeps torch.compile off our own code, which runs wherever a graph breaks."""

from __future__ import annotations

from types import CodeType

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

__all__ = ["keep_uncompiled"]


def keep_uncompiled(code: CodeType) -> None:
    """Run `code`, and whatever it calls, as it is, even where torch.compile is at work."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
