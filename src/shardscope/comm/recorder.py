"""Observes collectives and turns each into a record with its phase, owner, trigger and cause."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, final

from msgspec.structs import replace

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import BATCH, UNREAD
from shardscope._torch.mesh import default_group
from shardscope.attribution.call_sites import Stack, read_stack
from shardscope.attribution.module_names import ModuleNames
from shardscope.attribution.program_records import is_simulated
from shardscope.comm.collective_facts import GroupRegistry, Sizes
from shardscope.comm.notes import Note, NoteTaker
from shardscope.comm.repeats import RepeatFinder, Template
from shardscope.record import Collective, Gap, Group
from shardscope.record.rank_stream import RankStream


def raise_if_from_signal(error: Exception) -> None:
    """Raise `error` again if a signal handler raised it: a program may end a wait that way."""
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    if not codes.isdisjoint(_handler_codes()):
        raise error


def _handler_codes() -> set[CodeType]:
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return {code for code in (_code(handler) for handler in handlers) if code is not None}


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler) or isinstance(handler, signal.Handlers):
        return None
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = type(handler).__call__
    return getattr(function, "__code__", None)


Emit = Callable[[Group | Collective | Gap], None]

_UNREAD_FACT = (
    "it was issued, but it is not a known collective (it may be one-sided, or newer than "
    "this version of shardscope): what it sends is not recorded"
)

_TOO_DEEP_FACT = (
    "it was issued near the end of the call stack, where there was no room left to describe it: "
    "raise the limit with sys.setrecursionlimit"
)

_MAX_GAPS = 10_000
# After a wait that takes longer than writing a line: the program may hang before the next line.
_URGENT_NS = 100_000
_MAX_UNRETURNED = 1000  # calls whose return may still be observed: a thread waits in one at a time


@final
class _Issued:
    """A collective that was written to the stream."""

    __slots__ = ("group_order", "order", "returned_ns", "sizes", "start_ns", "template")

    def __init__(
        self,
        template: Template,
        sizes: Sizes,
        start_ns: int | None,
        positions: tuple[int, int],
    ) -> None:
        self.template, self.sizes, self.start_ns = template, sizes, start_ns
        self.order, self.group_order = positions
        self.returned_ns: int | None = None


_Noted = Note | _Issued | list[Note] | list[_Issued]
"""What is noted of a collective, or of each in a batch."""


@final
class Recorder:
    """Records collectives. Errors in here become gaps, never exceptions in the user's program.

    With a `stream`, each collective is written to it before it is issued. With `emit` only, each
    record is made at once and passed to it; without either, records are made when they are first
    read. `emit` also gets groups and gaps. `enter_world` is called before the first collective in a
    world other than that of `join_world`, and returns whether to record it.
    """

    def __init__(
        self,
        names: ModuleNames,
        groups: GroupRegistry,
        *,
        rank: int,
        emit: Emit | None = None,
        enter_world: Callable[[], bool] = lambda: True,
    ) -> None:
        self.gaps: list[Gap] = []
        self.groups = groups
        self.rank = rank
        self.stream: RankStream | None = None
        self.keeps_records = True  # in memory, also of what is in the stream
        self._taker = NoteTaker(names, groups, self)
        self.calls = self._taker.calls
        self._repeats = RepeatFinder(self._taker)
        self._collectives: list[Collective] = []
        # Those that have no record yet; threads append while another makes records.
        self._noted: deque[Note | _Issued] = deque()
        self._unreturned: dict[int, Note | _Issued] = {}  # by index in `_collectives`
        self._has_streamed = False
        self._too_deep: list[str] = []  # ops of collectives that no stack was left to describe
        self._emit = emit
        self._enter_world = enter_world
        self._world: Callable[[], object] = object  # returns no process group
        self._lock = threading.RLock()
        self._known_gaps: set[tuple[str, str]] = set()
        self.started_unix_ns = time.time_ns()
        self.start_ns = self._latest_ns = time.perf_counter_ns()
        self._is_simulated = is_simulated()

    # ── While a collective is issued ─────────────────────────────────────────────────────────

    def before(self, event: CollectiveEvent) -> _Noted | None:
        """Note a collective before it is issued, so that one that hangs is recorded too.

        Returns what `after` needs, unless the world is simulated, which has no times.
        """
        try:
            frame = sys._getframe(2).f_back  # the hook's caller, or None if C++ called the hook
            if event.layout is UNREAD:
                self._report_unread(event.op, read_stack(frame))
                return None
            if default_group() is not self._world() and not self._enter():
                return None
            # Times of a simulated run are not those of a real run.
            start_ns = None if self._is_simulated else max(0, self.read_clock() - self.start_ns)
            noted: _Noted
            if self.stream is None:
                noted = self._note(event, read_stack(frame), start_ns)
            elif event.layout is BATCH:
                stack = read_stack(frame)
                found = [self._repeats.find_anew(e, stack, self.rank) for e in event.singles()]
                noted = [self._write(self.stream, *call, start_ns) for call in found]
            else:
                template, sizes = self._repeats.find(event, frame, self.rank)
                noted = self._write(self.stream, template, sizes, start_ns)
            return None if start_ns is None else noted
        except RecursionError:
            self._too_deep.append(event.op)  # a call of a Python function might raise again
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            raise_if_from_signal(error)
            self._report_loss(event.op, error)
        return None

    def after(self, noted: _Noted) -> None:
        """Note when the call of a collective has returned to the program."""
        try:
            now_ns = max(0, self.read_clock() - self.start_ns)
            calls: Sequence[Note | _Issued] = noted if isinstance(noted, list) else (noted,)
            for issued in calls:
                issued.returned_ns = now_ns
                if self.stream is not None and type(issued) is _Issued:
                    is_urgent = now_ns - (issued.start_ns or 0) > _URGENT_NS
                    self.stream.writer.write_returned(issued.order, now_ns, is_urgent=is_urgent)
        except RecursionError:
            pass  # the time stays unknown
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            raise_if_from_signal(error)
            self.report_gap("collectives", f"the time of a return is not recorded ({error!r})")

    def _note(self, event: CollectiveEvent, stack: Stack, start_ns: int | None) -> list[Note]:
        """Note a collective, and emit its record if that is asked for."""
        notes = [self._taker.take(single, stack, start_ns) for single in event.singles()]
        if self._emit is None:
            self._noted.extend(notes)
        else:
            for note in notes:
                with self._lock:
                    self._add_record(note)
                    self._emit(self._collectives[-1])
        return notes

    def _write(
        self, stream: RankStream, template: Template, sizes: Sizes, start_ns: int | None
    ) -> _Issued:
        """Write a collective to the stream."""
        num_bytes = template.num_bytes
        if sizes != template.sizes:
            num_bytes = template.payload.compute_bytes(sizes)
        positions = stream.writer.write_call(template.in_stream, start_ns, num_bytes)
        issued = _Issued(template, sizes, start_ns, positions)
        self._has_streamed = True
        if self.keeps_records:
            self._noted.append(issued)
        return issued

    # ── Records ──────────────────────────────────────────────────────────────────────────────

    @property
    def has_collectives(self) -> bool:
        """Whether any collective was noted."""
        return bool(self._has_streamed or self._noted or self._collectives)

    @property
    def collectives(self) -> list[Collective]:
        """The records of all collectives noted so far; empty if none are kept in memory."""
        self.make_records()
        return self._collectives

    def make_records(self) -> None:
        """Make a record of every collective that was noted, and add the times of their returns."""
        with self._lock:
            while self._too_deep:
                self.report_gap(self._too_deep.pop(), _TOO_DEEP_FACT, is_loss=True)
            for index, noted in tuple(self._unreturned.items()):
                if noted.returned_ns is not None:
                    del self._unreturned[index]
                    record = replace(self._collectives[index], returned_ns=noted.returned_ns)
                    self._collectives[index] = record
            while self._noted:
                noted = self._noted.popleft()
                try:
                    self._add_record(noted)
                except Exception as error:  # noqa: BLE001 - tracing must not fail the run
                    raise_if_from_signal(error)
                    op = noted.payload.op if isinstance(noted, Note) else noted.template.record.op
                    self._report_loss(op, error)

    def _add_record(self, noted: Note | _Issued) -> None:
        if isinstance(noted, Note):
            trigger = self._taker.find_trigger(noted)
            record = replace(
                self._taker.make_record(noted, trigger, rank=self.rank),
                order=len(self._collectives),
                group_order=self.groups.next_order(noted.payload.group.record),
                start_ns=noted.start_ns,
                returned_ns=noted.returned_ns,
            )
        else:
            record = _complete(noted)
        if noted.returned_ns is None and noted.start_ns is not None:
            self._unreturned[len(self._collectives)] = noted
            if len(self._unreturned) > _MAX_UNRETURNED:
                del self._unreturned[next(iter(self._unreturned))]
        self._collectives.append(record)

    # ── Gaps ─────────────────────────────────────────────────────────────────────────────────

    def report_gap(self, place: str, fact: str, *, is_loss: bool = False) -> None:
        """Add a gap, unless the same gap was added before; `is_loss` if records are missing."""
        if (place, fact) in self._known_gaps:
            return
        if len(self._known_gaps) >= _MAX_GAPS:
            place, fact, is_loss = "gaps", f"{_MAX_GAPS:,} are listed; there were more", True
            if self.gaps and self.gaps[-1].place == place:
                return
        self._known_gaps.add((place, fact))
        gap = Gap(place=place, fact=fact, rank=self.rank, is_loss=is_loss)
        self.gaps.append(gap)
        if self._emit is not None:
            self._emit(gap)

    def _report_unread(self, op: str, stack: Stack) -> None:
        source = stack.source
        line = "" if source is None else f" ({source.file}:{source.line})"
        self.report_gap(op, f"{_UNREAD_FACT}{line}", is_loss=True)

    def _report_loss(self, op: str, error: Exception) -> None:
        self.report_gap(op, f"it was issued but not understood ({error!r})", is_loss=True)

    def read_clock(self) -> int:
        """The host's clock, in ns; if it was set back during the trace, report a gap."""
        latest_ns = self._latest_ns  # before the clock: another thread may read it in between
        now_ns = time.perf_counter_ns()
        if now_ns < latest_ns:
            fact = "the host's clock was set back during the trace: times after that are wrong"
            self.report_gap("clock", fact)
            return now_ns
        self._latest_ns = now_ns
        return now_ns

    def emit_group(self, group: Group) -> None:
        """Pass on a group in which no collective was issued before."""
        if self._emit is not None:
            self._emit(group)

    # ── Worlds ───────────────────────────────────────────────────────────────────────────────

    def join_world(self) -> None:
        """Record the world that this process is in now."""
        self.groups.start_world()
        self._is_simulated = is_simulated()
        default = default_group()
        self._world = (lambda: None) if default is None else weakref.ref(default)

    def is_in_its_world(self) -> bool:
        """Whether this process is in the recorded world; True before any world."""
        group = default_group()
        return group is None or group is self._world() or self._enter()

    def _enter(self) -> bool:
        with self._lock:
            if not self._enter_world():
                return False
            self.join_world()
            return True


def _complete(issued: _Issued) -> Collective:
    """The record of a collective: that of its template, with its own positions, times and sizes."""
    template = issued.template
    record = replace(
        template.record,
        order=issued.order,
        group_order=issued.group_order,
        start_ns=issued.start_ns,
        returned_ns=issued.returned_ns,
    )
    if issued.sizes == template.sizes:
        return record
    input_bytes, output_bytes, wire_bytes = template.payload.compute_bytes(issued.sizes)
    return replace(
        record, input_bytes=input_bytes, output_bytes=output_bytes, wire_bytes=wire_bytes
    )
