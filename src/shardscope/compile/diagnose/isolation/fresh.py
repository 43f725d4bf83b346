"""Runs one script in a process that has imported torch and done nothing else.

It is started by its path and must import nothing of ours: a repro has to fail without us.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import runpy
import signal
import sys

__all__ = ["end_with_parent", "run_one_script"]

_PR_SET_PDEATHSIG = 1
_IMPORTED = ("torch", "torch._dynamo")  # what any script that compiles imports, and takes long


def end_with_parent(parent: int, *, is_tied: bool) -> None:
    """Die when the process that began this one dies, however it does; leave no core files.

    The kernel ties a process to the thread that began it, so only a main thread may ask for it.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if is_tied and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before it was watched
        os._exit(1)


def run_one_script(requests: int, replies: int) -> None:
    """Import torch, say so, wait for the name of a script, and run it as Python would."""
    for name in _IMPORTED:
        importlib.import_module(name)
    os.close(replies)
    with os.fdopen(requests, "rb") as file:
        asked = file.read()
    if not asked:  # nobody wants anything
        return
    path, *arguments = json.loads(asked)
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]), is_tied=sys.argv[4] == "tied")
    run_one_script(int(sys.argv[1]), int(sys.argv[2]))
