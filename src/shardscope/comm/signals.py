"""Exceptions that a handler of signals raised while we were at work: those are the user's."""

from __future__ import annotations

import functools
import signal
import traceback
from types import CodeType
from typing import Any

__all__ = ["raise_if_from_signal"]


def raise_if_from_signal(error: Exception) -> None:
    """Raise `error` again if a handler of signals raised it, as programs do to end a wait."""
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    if not codes.isdisjoint(_handler_codes()):
        raise error


def _handler_codes() -> set[CodeType]:
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return {code for code in (_code(handler) for handler in handlers) if code is not None}


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler) or isinstance(handler, signal.Handlers):
        return None
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = type(handler).__call__
    return getattr(function, "__code__", None)
