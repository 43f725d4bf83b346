"""When a device reached a point in its work, told without ever waiting for it.

Events are put on the stream that is current; whether they have happened is asked when somebody
wants to know, or when many are waiting. The device's clock is set by the host's: no event can
happen before it was put there, so the tightest of these bounds is the difference between the two.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from typing import Any, Protocol, final

import torch

from shardscope._torch.cuda_runtime import has_cuda

__all__ = ["DEVICE_CLOCK", "Device", "DeviceClock", "Event", "Mark", "Stretch"]

_MAX_WAITING = 4096  # stretches whose events have not been seen to happen
_ASK_EVERY = 512  # of them, so that a step is asked for little and a long run holds little
_MAX_FREE = 1024  # events kept for use again
_MAX_DRIFT_PPM = 50  # of the device's clock against the host's
_MAX_FROM_ANCHOR_MS = 10_000.0  # torch tells milliseconds in 32 bits: beyond, µs are lost


class Event(Protocol):
    """As torch's."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class Device(Protocol):
    """What a clock needs of the kind of device that it reads."""

    def current_stream(self, name: str | None) -> tuple[str, Any] | None:
        """Name of the device, and the stream to put events on; None if there is none now."""

    def make_event(self) -> Event:
        """One that takes the time."""

    def may_ask(self) -> bool:
        """Whether events may be asked about at this moment."""


class Stretch(Protocol):
    """Who wants to know how long it took."""

    def settle(self, start_ns: int, duration_ns: int) -> None:
        """It took so long on the device, from then on by the host's clock."""

    def is_for(self, listener: object) -> bool:
        """Whether `listener` waits for it."""


@final
class Mark:
    """Where a stretch began on a stream."""

    __slots__ = ("device", "event", "stream")

    def __init__(self, device: str, stream: Any, event: Event) -> None:
        self.device = device
        self.stream = stream
        self.event = event

    @property
    def place(self) -> tuple[str, Any]:
        """The device and the stream."""
        return self.device, self.stream


@final
class _Waiting:
    __slots__ = ("end", "host_ns", "mark", "stretch")

    def __init__(self, mark: Mark, end: Event, host_ns: int, stretch: Stretch) -> None:
        self.mark = mark
        self.end = end
        self.host_ns = host_ns  # when the end was put on the stream
        self.stretch = stretch


@final
class _Anchor:
    """An event from which a device's others are counted, and where it lies on the host's clock."""

    def __init__(self, event: Event, host_ns: int) -> None:
        self.event = event
        self._device_ns = self._last_ns = 0
        self._ahead_ns = host_ns  # of the device's clock, which is 0 at the first anchor

    def place(self, waiting: _Waiting) -> int:
        """When the stretch ended by the device's clock."""
        elapsed_ms = self.event.elapsed_time(waiting.end)
        device_ns = self._device_ns + int(elapsed_ms * 1e6)
        # Clocks drift apart, so a bound is worth less the older it is.
        aged_ns = max(0, device_ns - self._last_ns) * _MAX_DRIFT_PPM // 1_000_000
        self._ahead_ns = max(self._ahead_ns - aged_ns, waiting.host_ns - device_ns)
        self._last_ns = max(self._last_ns, device_ns)
        if elapsed_ms > _MAX_FROM_ANCHOR_MS:
            self.event, self._device_ns = waiting.end, device_ns
        return device_ns

    def to_host(self, device_ns: int) -> int:
        return device_ns + self._ahead_ns


@final
class DeviceClock:
    """Times stretches of a stream. Trouble with the device loses times, never the run."""

    def __init__(self, device: Device) -> None:
        self.num_lost = 0
        self._device = device
        self._waiting: deque[_Waiting] = deque()
        self._free: dict[str, list[Event]] = defaultdict(list)
        self._anchors: dict[str, _Anchor] = {}
        self._lock = threading.RLock()  # settling may be interrupted by a signal's handler

    def begin(self, device: str | None = None) -> Mark | None:
        """A stretch begins on the current stream; None if there is none to time."""
        try:
            found = self._device.current_stream(device)
            if found is None:
                return None
            if len(self._waiting) >= _MAX_WAITING:
                self.num_lost += 1
                return None
            name, stream = found
            event = self._put_event(name, stream)
            if name not in self._anchors:
                self._anchors.setdefault(name, _Anchor(event, time.perf_counter_ns()))
            return Mark(name, stream, event)
        except RuntimeError:  # the device failed, which is the user's to hear of, not ours to tell
            self.num_lost += 1
            return None

    def end(self, mark: Mark, stretch: Stretch) -> None:
        """The stretch ends, on the stream that it began on; it will be told how long it took."""
        try:
            host_ns = time.perf_counter_ns()
            event = self._put_event(mark.device, mark.stream)
        except RuntimeError:
            self.num_lost += 1
            return
        self._waiting.append(_Waiting(mark, event, host_ns, stretch))
        if len(self._waiting) % _ASK_EVERY == 0:
            self.settle()

    def settle(self) -> None:
        """Tell the stretches that have ended how long they took."""
        with self._lock:
            if not self._waiting or not self._device.may_ask():
                return
            done = self._take_done()
            placed = [(one, self._place(one)) for one in done]
            # All are placed before any is told: a later one may have set the clock better.
            for one, times in placed:
                if times is not None:
                    anchor = self._anchors[one.mark.device]
                    device_ns, duration_ns = times
                    one.stretch.settle(anchor.to_host(device_ns) - duration_ns, duration_ns)
                self._free_events(one)

    def num_waiting(self, listener: object) -> int:
        """How many stretches that `listener` waits for had not ended when last asked about."""
        return sum(one.stretch.is_for(listener) for one in tuple(self._waiting))

    def _take_done(self) -> list[_Waiting]:
        done: list[_Waiting] = []
        kept: list[_Waiting] = []
        busy: set[tuple[str, Any]] = set()
        for _ in range(len(self._waiting)):
            one = self._waiting.popleft()
            # What a stream was given later, it does later: no need to ask.
            is_done = one.mark.place not in busy and _has_ended(one)
            if not is_done:
                busy.add(one.mark.place)
            (done if is_done else kept).append(one)
        self._waiting.extendleft(reversed(kept))
        return done

    def _place(self, one: _Waiting) -> tuple[int, int] | None:
        """When it ended on the device's clock, and how long it took."""
        try:
            duration_ns = int(one.mark.event.elapsed_time(one.end) * 1e6)
            return self._anchors[one.mark.device].place(one), max(0, duration_ns)
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

    def _free_events(self, one: _Waiting) -> None:
        free, anchor = self._free[one.mark.device], self._anchors[one.mark.device]
        for event in (one.mark.event, one.end):
            if event is not anchor.event and len(free) < _MAX_FREE:
                free.append(event)


def _has_ended(one: _Waiting) -> bool:
    try:
        return one.end.query()
    except RuntimeError:
        return True  # it will never be known; _place finds that out


@final
class _Cuda:
    """CUDA, and what plays it (ROCm), once the program itself uses it."""

    def current_stream(self, name: str | None) -> tuple[str, Any] | None:
        if not self.may_ask():
            return None
        stream = torch.cuda.current_stream(name)
        return f"cuda:{stream.device_index}", stream

    def make_event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def may_ask(self) -> bool:
        # While a graph is captured, a question would spoil it, and an event be a part of it.
        return has_cuda() and not torch.cuda.is_current_stream_capturing()


DEVICE_CLOCK = DeviceClock(_Cuda())
