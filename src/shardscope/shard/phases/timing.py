"""The stack of open spans of each thread or task, and the summed times of ended spans."""

from __future__ import annotations

import operator
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from io import StringIO
from threading import get_ident
from types import TracebackType
from typing import NamedTuple, Self, final
from weakref import ref

import torch.distributed as dist
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardscope.attribution.call_sites import thread_name
from shardscope.attribution.program_records import is_simulated, read_identity
from shardscope.attribution.spans import (
    DEVICE_CLOCK,
    SUBSCRIPTIONS,
    DeviceStart,
    Subscription,
    Timing,
    subscribe,
)
from shardscope.errors import PhaseError
from shardscope.record import SIMULATION_TIME, PhaseTotal, Span, guard_line, sanitize_text

HOST = "cpu"


class _Recipient(NamedTuple):
    """A subscription that a span is reported to, and how deep the span is among its spans."""

    subscription: Subscription
    depth: int
    is_inner: bool


@final
class OpenSpan:
    """One span of a phase, until the host's and the device's clock have measured it."""

    __slots__ = (
        "device_inner_ns",
        "device_start",
        "has_ended",
        "inner_ns",
        "name",
        "parent",
        "phase",
        "recipients",
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
        self.recipients: list[_Recipient] = []
        self.thread = ""
        self.thread_id = get_ident()
        self.has_ended = False
        self.inner_ns = 0  # the time of the spans inside it
        self.device_inner_ns = 0
        self.device_start: DeviceStart | None = None
        self.start_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether it has not ended and still can.

        An exception from a signal handler may prevent `end`, but then the phase is collected.
        """
        return not self.has_ended and self.phase() is not None

    def begin(self, device: str | None) -> None:
        """Notify the subscribers to beginnings, and start the clocks."""
        for subscription in self.subscriptions:
            if subscription.on_span_begin is not None:
                subscription.on_span_begin(self.name, time.perf_counter_ns(), thread_name())
        self.device_start = None if device == HOST else DEVICE_CLOCK.begin(device)
        self.start_ns = time.perf_counter_ns()  # last, so that our own work is not included

    def end(self, end_ns: int) -> None:
        """Report the host's time to the open subscriptions; the device's time follows."""
        self.has_ended = True
        self.recipients = [
            self._make_recipient(subscription)
            for subscription in self.subscriptions
            if subscription.is_open
        ]
        if not self.recipients:
            return
        self.thread = thread_name()
        duration_ns = max(0, end_ns - self.start_ns)  # clocks may be set back
        parent = self._parent_on_thread()
        if parent is not None:
            parent.inner_ns += duration_ns
        self._report(self.start_ns, duration_ns, self.inner_ns, HOST)
        if self.device_start is not None:
            DEVICE_CLOCK.end(self.device_start, self)

    def settle(self, start_ns: int, duration_ns: int) -> None:
        """Report the time that the device measured."""
        assert self.device_start is not None
        parent = self._parent_on_thread()
        outer_start = None if parent is None else parent.device_start
        # Work on another stream runs concurrently, not inside it.
        if (
            parent is not None
            and outer_start is not None
            and outer_start.queue == self.device_start.queue
        ):
            parent.device_inner_ns += duration_ns
        self._report(start_ns, duration_ns, self.device_inner_ns, self.device_start.device)

    def is_for(self, subscriber: object) -> bool:
        """Whether the span is reported to `subscriber`."""
        return any(recipient.subscription.subscriber is subscriber for recipient in self.recipients)

    def _report(self, start_ns: int, duration_ns: int, inner_ns: int, device: str) -> None:
        self_ns = max(0, duration_ns - inner_ns)  # tasks within it may have run side by side
        for subscription, depth, is_inner in self.recipients:
            subscription.subscriber.on_span(
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

    def _make_recipient(self, subscription: Subscription) -> _Recipient:
        outer_names = [
            span.name for span in self._enclosing_spans() if subscription in span.subscriptions
        ]
        return _Recipient(subscription, len(outer_names), self.name in outer_names)

    def _enclosing_spans(self) -> Iterator[OpenSpan]:
        span = self._parent_on_thread()
        while span is not None:
            if span.is_open:
                yield span
            span = span._parent_on_thread()

    def _parent_on_thread(self) -> OpenSpan | None:
        """The enclosing span, if it is on the same thread."""
        parent = self.parent
        return parent if parent is not None and parent.thread_id == self.thread_id else None


TOP: ContextVar[OpenSpan | None] = ContextVar("shardscope_top_span", default=None)


def open_span(phase: object, name: str, device: str | None) -> None:
    """Open a span of `phase`, also without subscribers, so that its end does not end another."""
    span = OpenSpan(phase, name, _find_open(TOP.get()))
    TOP.set(span)
    if span.subscriptions:
        span.begin(device)


def close_span(phase: object) -> None:
    """End the innermost open span of `phase`."""
    end_ns = time.perf_counter_ns()
    span = TOP.get()
    while span is not None and (span.has_ended or span.phase() is not phase):
        span = span.parent
    if span is not None:
        span.end(end_ns)
        # Not its parent: a generator may end its span before a span that began later.
        TOP.set(_find_open(TOP.get()))


def _find_open(span: OpenSpan | None) -> OpenSpan | None:
    while span is not None and not span.is_open:
        span = span.parent
    return span


_MAX_TOTALS = 1000  # a program may generate names without end
_OTHERS = "(other phases)"
_HEADERS = ("phase", "clock", "calls", "total ms", "self ms", "mean ms", "max ms")


@final
class PhaseTimes:
    """The times of every phase that began and ended inside the context, on any thread of this rank.

    Entering it again continues. It can be read at any time without waiting: spans that a device
    has not finished are not included yet, and `num_running` counts them.
    """

    def __init__(self, *, keep: int) -> None:
        self._spans: deque[Span] = deque(maxlen=_read_keep(keep))
        self._totals: dict[tuple[str, str], PhaseTotal] = {}
        self._num_spans = 0
        self._is_simulated = False
        self._rank, self._has_rank = read_identity()[0], dist.is_initialized()
        self._start_ns: int | None = None
        self._depth = 0
        self._exit = ExitStack()
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        with self._lock:
            if self._depth == 0:
                self._exit.enter_context(subscribe(self))
            self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0:
                self._exit.close()

    @property
    def rank(self) -> int:
        """The rank that was timed."""
        return self._rank

    @property
    def totals(self) -> tuple[PhaseTotal, ...]:
        """A total for each phase and clock, in the order in which they first ended."""
        DEVICE_CLOCK.settle()
        with self._lock:
            return tuple(replace(total, rank=self._rank) for total in self._totals.values())

    @property
    def spans(self) -> tuple[Span, ...]:
        """The last spans, in the order in which they ended; times count from the first's start."""
        DEVICE_CLOCK.settle()
        with self._lock:
            since_ns = min((span.start_ns for span in self._spans), default=0)
            return tuple(
                replace(span, rank=self._rank, start_ns=span.start_ns - since_ns)
                for span in self._spans
            )

    @property
    def num_dropped(self) -> int:
        """The number of spans that are in the totals but no longer in `spans`."""
        return self._num_spans - len(self._spans)

    @property
    def num_running(self) -> int:
        """The number of spans that a device has not finished, and that are not counted yet."""
        DEVICE_CLOCK.settle()
        return DEVICE_CLOCK.num_waiting(self)

    def __getitem__(self, name: str) -> PhaseTotal:
        """The total of a phase, by the device's clock if it was timed there; 0 if it never ran."""
        totals = [total for total in self.totals if total.name == name]
        return totals[-1] if totals else PhaseTotal(name=name, rank=self._rank)

    def reset(self) -> None:
        """Clear totals and spans; spans that are open now count when they end."""
        with self._lock:
            self._totals.clear()
            self._spans.clear()
            self._num_spans = 0

    def on_span(self, timing: Timing) -> None:
        """Add a span to the totals."""
        with self._lock:
            self._note_rank()
            self._is_simulated |= is_simulated()
            span = timing.as_span(rank=self._rank, since_ns=0)
            key = (span.name, span.device)
            if key not in self._totals and len(self._totals) >= _MAX_TOTALS:
                key = (_OTHERS, span.device)
            known = self._totals.get(key) or PhaseTotal(name=key[0], device=key[1])
            self._totals[key] = known.add(span)
            self._spans.append(span)
            self._num_spans += 1

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False, title=self._describe(), title_justify="left")
        for number, header in enumerate(_HEADERS):
            table.add_column(header, justify="left" if number < 2 else "right")
        for total in sorted(self.totals, key=lambda total: -total.total_ns):
            times = (total.total_ns, total.self_ns, total.mean_ns, total.max_ns)
            figures = (f"{total.count:,}", *(f"{ns / 1e6:,.3f}" for ns in times))
            table.add_row(Text(sanitize_text(total.name)), total.device, *figures)
        return table

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=120, color_system=None, legacy_windows=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(guard_line(line.rstrip()) for line in capture.get().splitlines())

    def _describe(self) -> str:
        running = self.num_running
        facts = [
            f"rank {self.rank}",
            f"{running:,} still running" if running else "",
            SIMULATION_TIME if self._is_simulated else "",
        ]
        return ", ".join(filter(None, facts))

    def _note_rank(self) -> None:
        """Read the rank once there is a process group, which may be created later than this."""
        if not self._has_rank and dist.is_initialized():
            self._rank, self._has_rank = dist.get_rank(), True


def _read_keep(keep: object) -> int:
    try:
        number = operator.index(keep)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise PhaseError(
            f"keep must be a whole number of 0 or more; got {keep!r}. "
            "Write phases.record(keep=10_000), or leave keep out."
        )
    return min(number, sys.maxsize)
