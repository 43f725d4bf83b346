"""Spans that have begun and not ended, each on the stack of its own thread or task.

The stack is a linked list in a context variable: threads have one each, and a task of asyncio's
goes on from that of the task that made it, so that tasks taking turns do not end each other's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextvars import ContextVar
from threading import get_ident
from typing import NamedTuple, final
from weakref import ref

from shardscope.comm.device_clock import DEVICE_CLOCK, Mark
from shardscope.comm.spans import SUBSCRIPTIONS, Subscription, Timing
from shardscope.comm.threads import thread_name

__all__ = ["TOP", "OpenSpan", "close_span", "open_span"]

HOST = "cpu"


class _Hearing(NamedTuple):
    """Who hears of a span, and where it lies among those that they hear of."""

    subscription: Subscription
    depth: int
    is_inner: bool


@final
class OpenSpan:
    """One stretch of a phase, until the last clock has told how long it took."""

    __slots__ = (
        "device_inner_ns",
        "has_ended",
        "hearings",
        "inner_ns",
        "mark",
        "name",
        "parent",
        "phase",
        "start_ns",
        "subscriptions",
        "thread",
        "thread_id",
    )

    def __init__(self, phase: object, name: str, parent: OpenSpan | None) -> None:
        self.phase = ref(phase)
        self.name = name
        self.parent = parent
        self.subscriptions = tuple(SUBSCRIPTIONS)
        self.hearings: list[_Hearing] = []
        self.thread = ""
        self.thread_id = get_ident()
        self.has_ended = False
        self.inner_ns = 0  # what spans within it took
        self.device_inner_ns = 0
        self.mark: Mark | None = None
        self.start_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether it has not ended and still can.

        An exception out of a signal's handler may keep the end from us, but not the phase alive.
        """
        return not self.has_ended and self.phase() is not None

    def begin(self, device: str | None) -> None:
        """Tell who wants to know now, and start the clocks."""
        for one in self.subscriptions:
            if one.hear_begin is not None:
                one.hear_begin(self.name, time.perf_counter_ns(), thread_name())
        self.mark = None if device == HOST else DEVICE_CLOCK.begin(device)
        self.start_ns = time.perf_counter_ns()  # last, so that what we do is not in it

    def end(self, end_ns: int) -> None:
        """Tell who still listens, and have the device tell them too."""
        self.has_ended = True
        self.hearings = [self._place(one) for one in self.subscriptions if one.is_open]
        if not self.hearings:
            return
        self.thread = thread_name()
        duration_ns = max(0, end_ns - self.start_ns)  # clocks may be set back
        parent = self._parent_here()
        if parent is not None:
            parent.inner_ns += duration_ns
        self._tell(self.start_ns, duration_ns, self.inner_ns, HOST)
        if self.mark is not None:
            DEVICE_CLOCK.end(self.mark, self)

    def settle(self, start_ns: int, duration_ns: int) -> None:
        """The device has told how long it took."""
        assert self.mark is not None
        parent = self._parent_here()
        around = None if parent is None else parent.mark
        # Work on another stream runs beside it, not within it.
        if parent is not None and around is not None and around.place == self.mark.place:
            parent.device_inner_ns += duration_ns
        self._tell(start_ns, duration_ns, self.device_inner_ns, self.mark.device)

    def is_for(self, listener: object) -> bool:
        """Whether `listener` waits for it."""
        return any(one.subscription.listener is listener for one in self.hearings)

    def _tell(self, start_ns: int, duration_ns: int, inner_ns: int, device: str) -> None:
        self_ns = max(0, duration_ns - inner_ns)  # tasks within it may have run side by side
        for subscription, depth, is_inner in self.hearings:
            subscription.listener.hear(
                Timing(
                    self.name,
                    start_ns,
                    duration_ns,
                    self_ns,
                    device,
                    self.thread,
                    depth,
                    is_inner,
                )
            )

    def _place(self, subscription: Subscription) -> _Hearing:
        around = [one.name for one in self._around() if subscription in one.subscriptions]
        return _Hearing(subscription, len(around), self.name in around)

    def _around(self) -> Iterator[OpenSpan]:
        span = self._parent_here()
        while span is not None:
            if span.is_open:
                yield span
            span = span._parent_here()

    def _parent_here(self) -> OpenSpan | None:
        """The span it was begun in, if on the same thread."""
        parent = self.parent
        return parent if parent is not None and parent.thread_id == self.thread_id else None


TOP: ContextVar[OpenSpan | None] = ContextVar("shardscope_top_span", default=None)


def open_span(phase: object, name: str, device: str | None) -> None:
    """`phase` begins. Without listeners too, so that its end does not end another."""
    span = OpenSpan(phase, name, _find_open(TOP.get()))
    TOP.set(span)
    if span.subscriptions:
        span.begin(device)


def close_span(phase: object) -> None:
    """The innermost stretch of `phase` ends."""
    end_ns = time.perf_counter_ns()
    span = TOP.get()
    while span is not None and (span.has_ended or span.phase() is not phase):
        span = span.parent
    if span is not None:
        span.end(end_ns)
        # Not its parent: a generator may end its span before one that was begun after it.
        TOP.set(_find_open(TOP.get()))


def _find_open(span: OpenSpan | None) -> OpenSpan | None:
    while span is not None and not span.is_open:
        span = span.parent
    return span
