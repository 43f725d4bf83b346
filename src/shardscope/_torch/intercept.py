"""Every collective of this process, shown to observers before it is issued.

By doors that no ordinary op passes, so that ordinary ops pay nothing: at the methods of process
groups and the callables of ops, where Python asks for collectives, and before c10d's kernels, where
C++ code (DDP's reducer) does too. An op that calls another is one collective, under the name of the
outermost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from shardscope._torch.dispatch import NEEDED_OF_MODES
from shardscope._torch.issuing import AUDIENCE, NEEDED_TO_ISSUE, Issued, Observer
from shardscope._torch.kernel_doors import kernel_doors
from shardscope._torch.method_doors import method_doors
from shardscope._torch.op_doors import op_doors
from shardscope._torch.private import moved_names_explained, require
from shardscope.errors import TorchVersionError

__all__ = ["Issued", "Observer", "intercept"]

_installed: ExitStack | None = None
_missing: list[str] = []  # what this torch lacks of the names that the installed doors need
_lock = threading.RLock()


@contextmanager
def intercept(
    observer: Observer, *, report_missing: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Show `observer` every collective of this process, on any thread, until the context ends.

    Where this torch lacks a name that some of the doors need, `report_missing` is given a sentence
    for each, and the other doors show what passes them; without it, TorchVersionError is raised.
    """
    global _installed
    with _lock:
        if _installed is None:
            _installed = _install()
        AUDIENCE.set((*AUDIENCE.current[0], observer))
    try:
        for sentence in _missing:
            if report_missing is None:
                raise TorchVersionError(sentence)
            report_missing(sentence)
        yield
    finally:
        with _lock:
            AUDIENCE.set(tuple(other for other in AUDIENCE.current[0] if other is not observer))
            if not AUDIENCE.current[0] and _installed is not None:
                installed, _installed = _installed, None
                installed.close()


def _install() -> ExitStack:
    _missing.clear()
    with ExitStack() as stack:
        for doors in (kernel_doors, op_doors, method_doors):
            try:
                require(*NEEDED_TO_ISSUE, *NEEDED_OF_MODES)
                with moved_names_explained():
                    stack.enter_context(doors())
            except TorchVersionError as error:
                _missing.append(str(error))
        return stack.pop_all()
