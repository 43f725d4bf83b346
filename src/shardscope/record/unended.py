"""Which spans had begun and not ended where a stream stops: what a killed rank was doing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import final

from shardscope.record.spans import Span, SpanBegin

__all__ = ["UnendedSpans"]

_MAX_NAMES = 20  # of a thread
_MAX_THREADS = 20
HOST = "cpu"


@final
class UnendedSpans:
    """Told of begins and spans in the order of the stream."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[int]] = {}  # when, by thread and name

    def begin(self, begin: SpanBegin) -> None:
        """One has begun."""
        self._open.setdefault((begin.thread, begin.name), []).append(begin.start_ns)

    def end(self, span: Span) -> None:
        """One has ended: of those on its thread, the last to begin before it."""
        starts = self._open.get((span.thread, span.name))
        if starts is None or span.device != HOST:
            return
        for index in range(len(starts) - 1, -1, -1):
            if starts[index] <= span.start_ns:
                del starts[index]
                break
        if not starts:
            del self._open[span.thread, span.name]

    def forget(self) -> None:
        """Nobody will hear the end of those that are open."""
        self._open.clear()

    def describe(self) -> str | None:
        """Them, by thread, outermost first; None if there are none."""
        if not self._open:
            return None
        lines = [_describe_thread(thread, names) for thread, names in _by_thread(self._open)]
        if len(lines) > _MAX_THREADS:
            lines[_MAX_THREADS:] = [f"{len(lines) - _MAX_THREADS:,} more threads"]
        return f"begun and not ended where the stream stops, outermost first: {'; '.join(lines)}"


def _by_thread(spans: dict[tuple[str, str], list[int]]) -> Iterator[tuple[str, list[str]]]:
    """The main thread first; of each, in the order in which they began."""
    threads: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for (thread, name), starts in spans.items():
        threads[thread].extend((start_ns, name) for start_ns in starts)
    for thread in sorted(threads):
        yield thread, [name for _, name in sorted(threads[thread])]


def _describe_thread(thread: str, names: list[str]) -> str:
    if len(names) > _MAX_NAMES:
        half = _MAX_NAMES // 2
        names[half:-half] = [f"… {len(names) - 2 * half:,} more …"]
    # Without their times, so that ranks that hang in the same place are shown as one.
    return " > ".join(names) + (f" (thread {thread})" if thread else "")
