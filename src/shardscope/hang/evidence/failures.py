"""What the error of a rank means: a failure of its own, or one that follows from another rank's."""

from __future__ import annotations

import re

from shardscope.hang.evidence.facts import EventKind

# Errors by which a user, a scheduler or a launcher ends a rank that hangs.
_INTERRUPTIONS = ("KeyboardInterrupt", "SystemExit", "SignalException")
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|DefaultCPUAllocator: (?:can't|not enough)|MemoryError\b"
    r"|[Oo]ut of (?:host )?memory|oom-kill|Cannot allocate memory|alloc_cpu|std::bad_alloc"
    r"|HIP out of memory|XPU out of memory",
)
_TIMEOUT = re.compile(
    r"Timed out waiting|collective operation timeout|[Ww]ait timeout|timed out after \d"
    r"|TimeoutError|timeout in \w*barrier|failed to pass monitoredBarrier|operation timed out",
)
_CONNECTION = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|Connection closed by remote|ncclRemoteError|remote process exited"
    r"|Application timeout caused pair closure|Socket closed|recvBytes failed|sendBytes failed",
)
_GPU = re.compile(
    r"illegal memory access|device-side assert|uncorrectable (?:ECC|NVLink)|unspecified launch"
    r"|CUDA error: (?!out of memory)|NVRM: Xid|misaligned address|ECC error",
)
_NETWORK = re.compile(
    r"NET/IB ?:? .*(?:status|error|vendor err)|ibv_\w+ (?:failed|error)|Got completion .*status"
    r"|No route to host|Network is unreachable|Connection timed out|NET/Socket .*(?:failed|error)"
    r"|IBV_WC_|link (?:is )?down|port error|transport retry counter",
)


def classify_error(text: str) -> EventKind:
    """What an error means, by its type and message.

    Args:
        text: The type and the message, as in the last line of a traceback.

    Examples:
        >>> classify_error("RuntimeError: Connection closed by peer [10.0.0.3]:3141")
        <EventKind.CONNECTION: 'connection'>
    """
    if text.startswith(_INTERRUPTIONS):
        return EventKind.INTERRUPTED
    for pattern, kind in _PATTERNS:
        if pattern.search(text):
            return kind
    return EventKind.EXCEPTION


_PATTERNS = (
    (_OUT_OF_MEMORY, EventKind.OUT_OF_MEMORY),
    (_GPU, EventKind.GPU),
    (_NETWORK, EventKind.NETWORK),
    (_TIMEOUT, EventKind.TIMEOUT),
    (_CONNECTION, EventKind.CONNECTION),
)

CONSEQUENCES = frozenset({EventKind.TIMEOUT, EventKind.CONNECTION, EventKind.INTERRUPTED})
"""Events of a rank that waited for another, or that was ended from outside."""


def is_failure(error: str | None) -> bool:
    """Whether the rank failed by itself and was not interrupted."""
    return error is not None and not error.startswith(_INTERRUPTIONS)
