"""What phases took, added up as they end: data, and a table when printed."""

from __future__ import annotations

import operator
import sys
import threading
from collections import deque
from contextlib import ExitStack
from io import StringIO
from types import TracebackType
from typing import Self, final

import torch.distributed as dist
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardscope.comm.device_clock import DEVICE_CLOCK
from shardscope.comm.run import is_simulated, read_identity
from shardscope.comm.spans import Timing, listening
from shardscope.errors import PhaseError
from shardscope.record import SIMULATION_TIME, PhaseTotal, Span, guard_line, make_inert

__all__ = ["PhaseTimes"]

_MAX_TOTALS = 1000  # names may be made up as a run goes on
_OTHERS = "(other phases)"
_HEADERS = ("phase", "clock", "calls", "total ms", "self ms", "mean ms", "max ms")


@final
class PhaseTimes:
    """Every phase that began and ended inside the context, on any thread of this rank.

    Entering again continues. Asking is possible at any time and waits for nothing: what a device
    has not finished is not in the figures yet, and `num_running` says how much that is.
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
                self._exit.enter_context(listening(self))
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
        """Whose times they are."""
        return self._rank

    @property
    def totals(self) -> tuple[PhaseTotal, ...]:
        """One for each phase and clock, in the order in which they first ended."""
        DEVICE_CLOCK.settle()
        with self._lock:
            return tuple(replace(one, rank=self._rank) for one in self._totals.values())

    @property
    def spans(self) -> tuple[Span, ...]:
        """The last that were kept, in the order in which they ended, since the first began."""
        DEVICE_CLOCK.settle()
        with self._lock:
            since_ns = min((span.start_ns for span in self._spans), default=0)
            return tuple(
                replace(span, rank=self._rank, start_ns=span.start_ns - since_ns)
                for span in self._spans
            )

    @property
    def num_dropped(self) -> int:
        """Spans that are in the totals and not kept any more."""
        return self._num_spans - len(self._spans)

    @property
    def num_running(self) -> int:
        """Spans that a device has not finished, and that are in no figure yet."""
        DEVICE_CLOCK.settle()
        return DEVICE_CLOCK.num_waiting(self)

    def __getitem__(self, name: str) -> PhaseTotal:
        """The total of one phase, by the device's clock where it was timed by that; may be 0."""
        found = [one for one in self.totals if one.name == name]
        return found[-1] if found else PhaseTotal(name=name, rank=self._rank)

    def reset(self) -> None:
        """Start from nothing; spans that are open now will count when they end."""
        with self._lock:
            self._totals.clear()
            self._spans.clear()
            self._num_spans = 0

    def hear(self, timing: Timing) -> None:
        """Add one span."""
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
        for one in sorted(self.totals, key=lambda one: -one.total_ns):
            times = (one.total_ns, one.self_ns, one.mean_ns, one.max_ns)
            figures = (f"{one.count:,}", *(f"{ns / 1e6:,.3f}" for ns in times))
            table.add_row(Text(make_inert(one.name)), one.device, *figures)
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
        """The rank, once there is a process group: it may be younger than we are."""
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
