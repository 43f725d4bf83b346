"""What the later lines of a stream depend on: spans that have begun, and what earlier lines had."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, final

from msgspec.structs import replace

from shardscope.record.base import CollectiveKind
from shardscope.record.profile_records import Span, SpanBegin
from shardscope.record.ranks import RankSpan, count_ranks
from shardscope.record.recording import (
    Collective,
    DroppedCollectives,
    Finding,
    Gap,
    Group,
    Module,
    RankProcess,
    RunInfo,
)
from shardscope.record.stream_lines import StreamPart, StreamRecord
from shardscope.record.value_records import ValueSample

_P2P = (CollectiveKind.SEND, CollectiveKind.RECV)
_MAX_OPEN = 20  # phases of a thread, and threads, that are named and kept
_HOST = "cpu"


@final
class Tally:
    """The collectives of one kind in one group, or with one peer, that a stream had so far."""

    __slots__ = ("input_bytes", "num_collectives", "wire_bytes")

    def __init__(self) -> None:
        self.num_collectives = self.input_bytes = self.wire_bytes = 0

    def add(self, num_bytes: tuple[int, int, int]) -> None:
        """Add a collective with these bytes of input, output and traffic."""
        self.num_collectives += 1
        self.input_bytes += num_bytes[0]
        self.wire_bytes += num_bytes[2]


@final
class StreamState:
    """What a stream had so far, as far as later lines depend on it."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        # Records that stay in the stream when its oldest lines are dropped.
        self.lasting: list[Group | Module | Finding | Gap | RankProcess] = []
        # By group, kind, and peer of a send or receive.
        self._tallies: dict[tuple[str, CollectiveKind, int | None], Tally] = {}
        self._num_spans = self._num_values = 0
        self._open_spans = OpenSpans()

    def tally(self, call: Collective) -> Tally:
        """The tally of all collectives of the same kind in the same group as `call`.

        Sends and receives are counted by their peer: those of two ranks are paired in order.
        """
        peer = call.peer if call.kind in _P2P else None
        return self._tallies.setdefault((call.group, call.kind, peer), Tally())

    def add(self, record: StreamRecord) -> None:
        """Count a record, or keep it if it lasts. Collectives are counted by their tally."""
        if isinstance(record, Span):
            self._num_spans += 1
            self._open_spans.end(record)
        elif isinstance(record, ValueSample):
            self._num_values += 1
        elif not isinstance(record, Collective):
            self.lasting.append(record)

    def begin(self, begin: SpanBegin) -> None:
        """Remember a span that has begun."""
        self._open_spans.begin(begin)

    def set_run(self, run: RunInfo) -> None:
        """Set the run, and its rank in records that were written before the rank was known."""
        self.lasting[:] = assign_rank(self.lasting, self.run, run)
        self.run = run

    def describe(self) -> StreamPart:
        """What was in the stream so far."""
        rank = only_rank(self.run) or 0
        dropped = tuple(
            DroppedCollectives(
                rank=rank,
                group=group,
                kind=kind,
                num_collectives=tally.num_collectives,
                input_bytes=tally.input_bytes,
                wire_bytes=tally.wire_bytes,
                peer=peer,
            )
            for (group, kind, peer), tally in self._tallies.items()
            if tally.num_collectives
        )
        num_collectives = sum(record.num_collectives for record in dropped)
        return StreamPart(
            num_records=num_collectives + self._num_spans + self._num_values,
            dropped=dropped,
            num_spans=self._num_spans,
            num_values=self._num_values,
            open_spans=self._open_spans.as_records(rank),
        )


def only_rank(run: RunInfo) -> int | None:
    """The rank of a run of which a single rank was recorded."""
    return run.ranks[0].first if count_ranks(run.ranks) == 1 else None


_RecordT = TypeVar("_RecordT", bound=StreamRecord)


def assign_rank(records: Iterable[_RecordT], old: RunInfo, new: RunInfo) -> list[_RecordT]:
    """The records of a rank of the run `old`, as records of the rank of `new`."""
    old_rank, new_rank = only_rank(old), only_rank(new)
    if old_rank is None or new_rank is None or old_rank == new_rank:
        return list(records)
    return [_assign_rank(record, old_rank, new_rank) for record in records]


def _assign_rank(record: _RecordT, old: int, new: int) -> _RecordT:
    changes: dict[str, Any] = {}
    if isinstance(record, Module):
        if record.ranks == (RankSpan(old),):
            changes = {"ranks": (RankSpan(new),)}
    elif isinstance(record, Gap | Span | ValueSample | RankProcess) and record.rank == old:
        changes = {"rank": new}
    return replace(record, **changes) if changes else record


@final
class OpenSpans:
    """Phases that were entered and not left where a stream stops, such as on a killed rank."""

    def __init__(self) -> None:
        # Start times by thread and name, sorted: a hostile stream may have very many.
        self._starts: dict[tuple[str, str], list[int]] = {}

    def begin(self, begin: SpanBegin) -> None:
        """Add a phase that was entered."""
        insort(self._starts.setdefault((begin.thread, begin.name), []), begin.start_ns)

    def end(self, span: Span) -> None:
        """Remove a phase that was left: of those on its thread, the last to begin before it."""
        key = (span.thread, span.name)
        starts = self._starts.get(key)
        if starts is None or span.device != _HOST:
            return
        # The first, if all began later: a clock may be set back.
        del starts[max(0, bisect_right(starts, span.start_ns) - 1)]
        if not starts:
            del self._starts[key]

    def clear(self) -> None:
        """Remove all: the trace was left while they were open, so their ends are not recorded."""
        self._starts.clear()

    def as_records(self, rank: int) -> tuple[SpanBegin, ...]:
        """The open phases as records, at most as many as `describe` names."""
        return tuple(
            SpanBegin(rank=rank, name=name, start_ns=start_ns, thread=thread)
            for thread, opened in self._by_thread()[:_MAX_OPEN]
            for start_ns, name in opened[-_MAX_OPEN:]
        )

    def describe(self) -> str | None:
        """A sentence with the open phases by thread, outermost first; None if there are none."""
        threads = self._by_thread()
        if not threads:
            return None
        lines = [_describe_thread(thread, opened) for thread, opened in threads[:_MAX_OPEN]]
        if len(threads) > _MAX_OPEN:
            lines.append(f"{len(threads) - _MAX_OPEN:,} more threads")
        return f"still open where the stream stops, outermost first: {'; '.join(lines)}"

    def _by_thread(self) -> list[tuple[str, list[tuple[int, str]]]]:
        """Open phases by thread, the main thread first, as sorted pairs of start time and name."""
        threads: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for (thread, name), starts in self._starts.items():
            threads[thread].extend((start_ns, name) for start_ns in starts)
        return [(thread, sorted(threads[thread])) for thread in sorted(threads)]


def _describe_thread(thread: str, opened: Sequence[tuple[int, str]]) -> str:
    names = [name for _, name in opened]
    if len(names) > _MAX_OPEN:
        half = _MAX_OPEN // 2
        names[half:-half] = [f"… {len(names) - 2 * half:,} more …"]
    # Without their times, so that ranks that hang in the same place are shown together.
    return " > ".join(names) + (f" (thread {thread})" if thread else "")
