"""Subscriptions to spans (the measured phases of a run), and the clock of the device that
times them.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from msgspec import Struct

from shardscope._torch.cuda.runtime import has_cuda
from shardscope.record import Span, replace_surrogates


class Timing(Struct, frozen=True, gc=False):
    """A measured span, on the clock of `time.perf_counter_ns`."""

    name: str
    start_ns: int
    duration_ns: int
    self_ns: int
    device: str
    thread: str
    depth: int
    is_inner: bool

    def as_span(self, *, rank: int, since_ns: int) -> Span:
        """The record of this span, with times relative to the start of a recording."""
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


class SpanSubscriber(Protocol):
    """Receives each span that began and ended during its subscription."""

    def on_span(self, timing: Timing) -> None:
        """Called with each span, on any thread; later than its end if a device timed it."""


SpanBeginCallback = Callable[[str, int, str], None]  # name, start (perf_counter_ns), thread


@final
class Subscription:
    """An entry of `SUBSCRIPTIONS`, open until its context ends."""

    __slots__ = ("is_open", "on_span_begin", "subscriber")

    def __init__(self, subscriber: SpanSubscriber, on_span_begin: SpanBeginCallback | None) -> None:
        self.subscriber = subscriber
        self.on_span_begin = on_span_begin
        self.is_open = True


SUBSCRIPTIONS: list[Subscription] = []


@contextmanager
def subscribe(
    subscriber: SpanSubscriber, *, on_span_begin: SpanBeginCallback | None = None
) -> Iterator[None]:
    """Until the context ends, pass the spans measured in this process to `subscriber`.

    `on_span_begin` is called when a span begins, for streams of processes that may be killed.
    """
    subscription = Subscription(subscriber, on_span_begin)
    SUBSCRIPTIONS.append(subscription)
    try:
        yield
    finally:
        subscription.is_open = False
        SUBSCRIPTIONS.remove(subscription)


_MAX_WAITING = 4096  # spans whose end events have not been observed yet
_QUERY_EVERY = 512  # spans: rarely within a step, and few pending in a long run
_MAX_FREE = 1024  # events kept for reuse
_MAX_DRIFT_PPM = 50  # of the device's clock against the host's
_MAX_FROM_ANCHOR_MS = 10_000.0  # elapsed_time is a float32: beyond, µs are lost


class Event(Protocol):
    """The part of `torch.cuda.Event` that the clock uses."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class Device(Protocol):
    """What `DeviceClock` needs of a device type: streams and events."""

    def current_stream(self, name: str | None) -> tuple[str, Any] | None:
        """Name of the device and its current stream; None if the device cannot be used now."""

    def make_event(self) -> Event:
        """A new event that records time."""

    def can_query(self) -> bool:
        """Whether events may be queried now."""


class TimedSpan(Protocol):
    """A span that waits for its times on the device."""

    def settle(self, start_ns: int, duration_ns: int) -> None:
        """Receive the duration on the device, and the start on the host's clock."""

    def is_for(self, subscriber: object) -> bool:
        """Whether `subscriber` waits for this span."""


@final
class DeviceStart:
    """The start of a span: an event on a stream of a device."""

    __slots__ = ("device", "event", "stream")

    def __init__(self, device: str, stream: Any, event: Event) -> None:
        self.device = device
        self.stream = stream
        self.event = event

    @property
    def queue(self) -> tuple[str, Any]:
        """The device and the stream."""
        return self.device, self.stream


@final
class _PendingInterval:
    __slots__ = ("end", "host_ns", "span", "start")

    def __init__(self, start: DeviceStart, end: Event, host_ns: int, span: TimedSpan) -> None:
        self.start = start
        self.end = end
        self.host_ns = host_ns  # host time when the end event was recorded
        self.span = span


@final
class _Anchor:
    """The event that a device's times are relative to, with its time on the host's clock."""

    def __init__(self, event: Event, host_ns: int) -> None:
        self.event = event
        self._device_ns = self._last_ns = 0
        self._ahead_ns = host_ns  # host time minus device time, which is 0 at the first anchor

    def end_ns(self, interval: _PendingInterval) -> int:
        """The end of an interval on the device's clock; also improves the clock offset."""
        elapsed_ms = self.event.elapsed_time(interval.end)
        device_ns = self._device_ns + int(elapsed_ms * 1e6)
        # Clocks drift apart, so an older bound on the offset is looser.
        aged_ns = max(0, device_ns - self._last_ns) * _MAX_DRIFT_PPM // 1_000_000
        self._ahead_ns = max(self._ahead_ns - aged_ns, interval.host_ns - device_ns)
        self._last_ns = max(self._last_ns, device_ns)
        if elapsed_ms > _MAX_FROM_ANCHOR_MS:
            self.event, self._device_ns = interval.end, device_ns
        return device_ns

    def to_host(self, device_ns: int) -> int:
        return device_ns + self._ahead_ns


@final
class DeviceClock:
    """Times spans on device streams. Device errors lose times (`num_lost`), never the run."""

    def __init__(self, device: Device) -> None:
        self.num_lost = 0
        self._device = device
        self._waiting: deque[_PendingInterval] = deque()
        self._free: dict[str, list[Event]] = defaultdict(list)
        self._anchors: dict[str, _Anchor] = {}
        self._lock = threading.RLock()  # a signal handler may interrupt `settle`

    def begin(self, device: str | None = None) -> DeviceStart | None:
        """Start a span on the current stream; None if it cannot be timed."""
        try:
            current = self._device.current_stream(device)
            if current is None:
                return None
            if len(self._waiting) >= _MAX_WAITING:
                self.num_lost += 1
                return None
            name, stream = current
            event = self._put_event(name, stream)
            if name not in self._anchors:
                self._anchors.setdefault(name, _Anchor(event, time.perf_counter_ns()))
            return DeviceStart(name, stream, event)
        except RuntimeError:  # the device failed; the user's own next call raises it
            self.num_lost += 1
            return None

    def end(self, start: DeviceStart, span: TimedSpan) -> None:
        """End a span on the stream it began on; `settle` passes the times to `span` later."""
        try:
            host_ns = time.perf_counter_ns()
            event = self._put_event(start.device, start.stream)
        except RuntimeError:
            self.num_lost += 1
            return
        self._waiting.append(_PendingInterval(start, event, host_ns, span))
        if len(self._waiting) % _QUERY_EVERY == 0:
            self.settle()

    def settle(self) -> None:
        """Pass their times to all spans that the device has finished."""
        with self._lock:
            if not self._waiting or not self._device.can_query():
                return
            done = self._take_done()
            measured = [(interval, self._measure(interval)) for interval in done]
            # Measure all before passing any on: a later interval may improve the clock offset.
            for interval, times in measured:
                if times is not None:
                    anchor = self._anchors[interval.start.device]
                    device_ns, duration_ns = times
                    interval.span.settle(anchor.to_host(device_ns) - duration_ns, duration_ns)
                self._free_events(interval)

    def num_waiting(self, subscriber: object) -> int:
        """The number of unfinished spans that `subscriber` waits for, as of the last query."""
        return sum(interval.span.is_for(subscriber) for interval in tuple(self._waiting))

    def _take_done(self) -> list[_PendingInterval]:
        done: list[_PendingInterval] = []
        pending: list[_PendingInterval] = []
        busy: set[tuple[str, Any]] = set()
        for _ in range(len(self._waiting)):
            interval = self._waiting.popleft()
            # A stream runs in order: behind an unfinished interval, none needs a query.
            is_done = interval.start.queue not in busy and _has_ended(interval)
            if not is_done:
                busy.add(interval.start.queue)
            (done if is_done else pending).append(interval)
        self._waiting.extendleft(reversed(pending))
        return done

    def _measure(self, interval: _PendingInterval) -> tuple[int, int] | None:
        """The end on the device's clock and the duration, in ns; None if the device failed."""
        try:
            duration_ns = int(interval.start.event.elapsed_time(interval.end) * 1e6)
            return self._anchors[interval.start.device].end_ns(interval), max(0, duration_ns)
        except RuntimeError:
            self.num_lost += 1
            return None

    def _put_event(self, device: str, stream: Any) -> Event:
        try:
            event = self._free[device].pop()
        except IndexError:
            event = self._device.make_event()
        event.record(stream)
        return event

    def _free_events(self, interval: _PendingInterval) -> None:
        free, anchor = self._free[interval.start.device], self._anchors[interval.start.device]
        for event in (interval.start.event, interval.end):
            if event is not anchor.event and len(free) < _MAX_FREE:
                free.append(event)


def _has_ended(interval: _PendingInterval) -> bool:
    try:
        return interval.end.query()
    except RuntimeError:
        return True  # unknown forever; `_measure` reports it as lost


@final
class _Cuda:
    """CUDA or ROCm, once the program itself uses it."""

    def current_stream(self, name: str | None) -> tuple[str, Any] | None:
        if not self.can_query():
            return None
        stream = torch.cuda.current_stream(name)
        return f"cuda:{stream.device_index}", stream

    def make_event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def can_query(self) -> bool:
        # During CUDA graph capture a query is an error, and an event becomes part of the graph.
        return has_cuda() and not torch.cuda.is_current_stream_capturing()


DEVICE_CLOCK = DeviceClock(_Cuda())
