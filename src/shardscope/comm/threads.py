"""What the running thread is called."""

from __future__ import annotations

import threading
from threading import get_ident

from shardscope._torch.autograd import is_in_backward

__all__ = ["thread_name"]

_MAIN_THREAD = threading.main_thread().ident


def thread_name() -> str:
    """Its name; empty for the main thread."""
    identity = get_ident()
    if identity == _MAIN_THREAD:
        return ""
    # Not current_thread(): it would leave an object behind for a thread that C++ started.
    named = (thread.name for thread in threading.enumerate() if thread.ident == identity)
    return next(named, "autograd" if is_in_backward() else "unnamed")
