"""Who wants to hear of measured stretches of time, and those that a trace has heard of.

Whoever measures looks here for listeners: without any, nothing is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, final

import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from shardscope.comm.device_clock import DEVICE_CLOCK
from shardscope.comm.recorder import Recorder
from shardscope.comm.signals import raise_if_from_signal
from shardscope.record import Gap, Span, SpanBegin, replace_surrogates

__all__ = [
    "SUBSCRIPTIONS",
    "HearBegin",
    "Listener",
    "SpanBook",
    "Subscription",
    "Timing",
    "listening",
]

_MAX_KEPT = 100_000


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


@final
class SpanBook:
    """The spans of one trace. The first are kept; a stream, if there is one, gets them all."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        emit: Callable[[Span], None] | None,
        emit_begin: Callable[[SpanBegin], None] | None,
    ) -> None:
        self.spans: list[Span] = []
        self.has_rank = False  # whether any was heard in a world, and so cannot be another rank's
        self._num_lost = 0
        self._recorder = recorder
        self._emit = emit
        self._emit_begin = emit_begin
        self._lock = threading.RLock()

    def hear(self, timing: Timing) -> None:
        """Write it down, if it is of this trace's world."""
        try:
            if not self._recorder.is_in_its_world():
                return
            span = timing.as_span(rank=self._recorder.rank, since_ns=self._recorder.start_ns)
            with self._lock:
                self.has_rank = self.has_rank or dist.is_initialized()
                self._keep(span)
        except Exception as error:  # noqa: BLE001 - watching must not kill
            raise_if_from_signal(error)
            fact = f"a span could not be written down ({error!r})"
            self._recorder.report_gap("phases", fact, is_loss=True)

    @property
    def hear_begin(self) -> HearBegin | None:
        """Wanted if there is a stream."""
        return None if self._emit_begin is None else self._write_begin

    def _write_begin(self, name: str, start_ns: int, thread: str) -> None:
        assert self._emit_begin is not None
        try:
            if not self._recorder.is_in_its_world():
                return
            begin = SpanBegin(
                rank=self._recorder.rank,
                name=replace_surrogates(name),
                start_ns=max(0, start_ns - self._recorder.start_ns),
                thread=replace_surrogates(thread),
            )
            self._emit_begin(begin)
        except Exception as error:  # noqa: BLE001 - watching must not kill
            raise_if_from_signal(error)
            fact = f"the beginning of a span could not be written down ({error!r})"
            self._recorder.report_gap("phases", fact)

    def become(self, rank: int) -> None:
        """What was written down before the rank was known is this rank's."""
        with self._lock:
            self.spans[:] = [replace(span, rank=rank) for span in self.spans]

    def gaps(self) -> tuple[Gap, ...]:
        """That some are missing, if so."""
        return (*self._find_waiting(), *self._find_lost())

    def _find_waiting(self) -> Iterator[Gap]:
        if num_waiting := DEVICE_CLOCK.num_waiting(self):
            fact = (
                f"the device has not finished {num_waiting:,} of the spans that it times: call "
                "torch.cuda.synchronize() before asking for the recording"
            )
            yield Gap(place="phases", fact=fact, rank=self._recorder.rank)

    def _find_lost(self) -> Iterator[Gap]:
        if not self._num_lost:
            return
        where = "are in the stream only" if self._emit is not None else "are lost"
        fact = f"the first {_MAX_KEPT:,} spans are kept; {self._num_lost:,} later ones {where}"
        yield Gap(place="phases", fact=fact, rank=self._recorder.rank)

    def _keep(self, span: Span) -> None:
        if len(self.spans) < _MAX_KEPT:
            self.spans.append(span)
        else:
            self._num_lost += 1
        if self._emit is not None:
            self._emit(span)
