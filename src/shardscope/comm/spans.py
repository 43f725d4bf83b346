"""Subscriptions to spans, the measured phases of a run.

Code that measures spans looks here for subscribers; without any, it measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, final

from msgspec import Struct

from shardscope.record import Span, replace_surrogates

__all__ = [
    "SUBSCRIPTIONS",
    "HearBegin",
    "Listener",
    "Subscription",
    "Timing",
    "listening",
]


class Timing(Struct, frozen=True, gc=False):
    """A stretch of time as it was measured, on the clock of `time.perf_counter_ns`."""

    name: str
    start_ns: int
    duration_ns: int
    self_ns: int
    device: str
    thread: str
    depth: int
    is_inner: bool

    def as_span(self, *, rank: int, since_ns: int) -> Span:
        """The same, counted from the beginning of a recording."""
        return Span(
            rank=rank,
            name=replace_surrogates(self.name),
            start_ns=max(0, self.start_ns - since_ns),
            duration_ns=max(0, self.duration_ns),
            self_ns=max(0, self.self_ns),
            device=self.device,
            thread=replace_surrogates(self.thread),
            depth=self.depth,
            is_inner=self.is_inner,
        )


class Listener(Protocol):
    """Is told of each stretch that began and ended while it listened."""

    def hear(self, timing: Timing) -> None:
        """One of them; on whichever thread, and late where a device timed it."""


HearBegin = Callable[[str, int, str], None]  # name, when by time.perf_counter_ns, thread


@final
class Subscription:
    """One time of listening."""

    __slots__ = ("hear_begin", "is_open", "listener")

    def __init__(self, listener: Listener, hear_begin: HearBegin | None) -> None:
        self.listener = listener
        self.hear_begin = hear_begin
        self.is_open = True


SUBSCRIPTIONS: list[Subscription] = []


@contextmanager
def listening(listener: Listener, *, hear_begin: HearBegin | None = None) -> Iterator[None]:
    """Until the context ends, `listener` hears of what is measured in this process.

    `hear_begin` is told as it begins, for those who may not live to hear the end.
    """
    subscription = Subscription(listener, hear_begin)
    SUBSCRIPTIONS.append(subscription)
    try:
        yield
    finally:
        subscription.is_open = False
        SUBSCRIPTIONS.remove(subscription)
