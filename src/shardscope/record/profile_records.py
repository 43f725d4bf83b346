"""Records of `memory` and `phases`: memory profiles, and measured spans of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from shardscope.record.base import Phase, Record, Source
from shardscope.record.ranks import Natural, Rank

NO_POSITION = -1
"""In a column of positions: none, as of an allocation that belongs to no module."""


class MemoryKind(StrEnum):
    """What memory is used for."""

    PARAMETERS = "parameters"  # and buffers
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"  # kept for backward, and the step's inputs
    GATHERED = "gathered"  # parameters that FSDP has gathered
    COMMUNICATION = "communication"  # what collectives read and write
    TEMPORARIES = "temporaries"  # everything else, including workspaces of kernels


class MemoryUse(Record, frozen=True, kw_only=True, gc=False):
    """Bytes of one kind that belong to one module, or to none."""

    kind: MemoryKind
    module: str | None
    num_bytes: Natural


class MemorySample(Record, frozen=True, kw_only=True, gc=False):
    """Memory at one moment; `order` counts allocations and releases."""

    order: Natural
    phase: Phase
    module: str | None
    num_bytes: tuple[Natural, ...]  # one for each kind, in the order of MemoryKind


class SegmentTable(Record, frozen=True, kw_only=True, gc=False):
    """The segments that the allocator has reserved on the device, in columns, by address."""

    address: tuple[Natural, ...] = ()
    num_bytes: tuple[Natural, ...] = ()
    order: tuple[Natural, ...] = ()  # event that made the allocator reserve it


class Allocation(Record, frozen=True, kw_only=True, gc=False):
    """Memory in use from event `start` until event `end` of a step: a row of `AllocationTable`."""

    start: int
    end: Natural
    num_bytes: Natural
    address: Natural
    kind: MemoryKind
    phase: Phase
    module: str | None = None
    source: Source | None = None


class AllocationTable(Record, frozen=True, kw_only=True, gc=False):
    """Every allocation that was in use during a step, in columns, in the order of `start`.

    Events count allocations and releases, as `order` of a sample does; those of the step are
    `first_order` to `last_order`. An allocation is in use from event `start` until event `end`,
    which is `last_order + 1` if it outlives the step. A `start` before `first_order` means that it
    was there when the step began; a negative one, that it was there before any step.

    Rows with the same `start` are parts of one allocation, such as a bucket that has gradients of
    several modules; they have the same `address`. `kind` and `phase` are positions in `MemoryKind`
    and `Phase`, `module` and `source` positions in `modules` and `sources`. The phase is the one
    that allocated it. Bytes are those of the allocator's blocks, so that the rows in use at a
    sample sum to it, except for `num_left_out` allocations: a large step has more than a file
    should, and then the smallest are left out.
    """

    first_order: Natural
    last_order: Natural
    start: tuple[int, ...] = ()
    end: tuple[Natural, ...] = ()
    num_bytes: tuple[Natural, ...] = ()
    address: tuple[Natural, ...] = ()
    kind: tuple[Natural, ...] = ()
    phase: tuple[Natural, ...] = ()
    module: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    segments: SegmentTable = SegmentTable()
    num_left_out: Natural = 0
    max_left_out_bytes: Natural = 0  # of the largest allocation that was left out

    def list_allocations(self) -> Iterator[Allocation]:
        """The rows."""
        kinds, phases = tuple(MemoryKind), tuple(Phase)
        columns = zip(
            self.start,
            self.end,
            self.num_bytes,
            self.address,
            self.kind,
            self.phase,
            self.module,
            self.source,
            strict=True,
        )
        for start, end, num_bytes, address, kind, phase, module, source in columns:
            yield Allocation(
                start=start,
                end=end,
                num_bytes=num_bytes,
                address=address,
                kind=kinds[kind],
                phase=phases[phase],
                module=None if module == NO_POSITION else self.modules[module],
                source=None if source == NO_POSITION else self.sources[source],
            )


class MemoryProfile(Record, frozen=True, kw_only=True, gc=False):
    """A step's memory on one rank.

    Bytes are those of the allocator's blocks, as `torch.cuda.max_memory_allocated` counts them.
    `peak_bytes` and the fields below it are those of a step that starts with optimizer state;
    `first_peak_bytes` is that of the first step, which creates it. `reserved_bytes` is the most
    that the allocator has reserved on the device in both, which is more where free blocks do not
    fit. None means not recorded. `is_live` means that a step of a training run was observed, with
    data; otherwise the step ran on tensors without data.
    """

    rank: Rank
    peak_bytes: Natural
    peak_order: Natural
    peak_phase: Phase
    peak_module: str | None = None
    at_peak: tuple[MemoryUse, ...] = ()
    samples: tuple[MemorySample, ...] = ()
    first_peak_bytes: Natural | None = None
    reserved_bytes: Natural | None = None
    needed_bytes: Natural | None = None  # of a device: the peak, and what CUDA takes beside it
    device_bytes: Natural | None = None  # what the device has, if that was asked
    allocations: AllocationTable | None = None
    is_live: bool = False


class Span(Record, frozen=True, kw_only=True, gc=False):
    """A span of a phase on one rank; times count from the start of the recording.

    `device` is the clock: "cpu", or "cuda:0" where events on a stream timed it. A phase that was
    timed on both has a span for each.
    """

    rank: Rank
    name: str
    start_ns: Natural
    duration_ns: Natural
    self_ns: Natural  # without the spans inside it
    device: str = "cpu"
    thread: str = ""  # empty is the main one
    depth: Natural = 0  # how many spans of the same thread it is inside of
    is_inner: bool = False  # whether one of them has the same name


class SpanBegin(Record, frozen=True, kw_only=True, gc=False):
    """The start of a span, shortly before its `start_ns`. Only streams have these.

    If no such span follows, the rank was killed in this phase.
    """

    rank: Rank
    name: str
    start_ns: Natural
    thread: str = ""


class PhaseTotal(Record, frozen=True, kw_only=True, gc=False):
    """The sum of the spans of one phase, on one rank and one clock.

    `total_ns` counts time once if a phase is inside itself; the time of several threads is added
    up.
    """

    name: str
    rank: Rank = 0
    device: str = "cpu"
    count: Natural = 0
    num_inner: Natural = 0  # of them, those within a span of the same name
    total_ns: Natural = 0
    self_ns: Natural = 0
    max_ns: Natural = 0

    @property
    def mean_ns(self) -> int:
        """The mean of the spans that are not inside a span of the same name."""
        num_outer = self.count - self.num_inner
        return self.total_ns // num_outer if num_outer else 0

    def add(self, span: Span) -> PhaseTotal:
        """The total with one more span."""
        return PhaseTotal(
            name=self.name,
            rank=self.rank,
            device=self.device,
            count=self.count + 1,
            num_inner=self.num_inner + span.is_inner,
            total_ns=self.total_ns + (0 if span.is_inner else span.duration_ns),
            self_ns=self.self_ns + span.self_ns,
            max_ns=max(self.max_ns, span.duration_ns),
        )


def sum_spans(spans: Iterable[Span]) -> tuple[PhaseTotal, ...]:
    """Add up spans for each rank, phase and clock, in the order in which they first occur.

    Args:
        spans: The spans.

    Examples:
        >>> sum_spans(recording.spans)
    """
    totals: dict[tuple[int, str, str], PhaseTotal] = {}
    for span in spans:
        key = (span.rank, span.name, span.device)
        known = totals.get(key) or PhaseTotal(name=span.name, rank=span.rank, device=span.device)
        totals[key] = known.add(span)
    return tuple(totals.values())
