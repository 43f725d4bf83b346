"""What a trace records in one process: its collectives, phases, modules and groups."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import DeviceMesh

from shardscope.attribution.module_names import ModuleNames
from shardscope.attribution.program_records import (
    Inventory,
    describe_process,
    describe_run,
    find_torch_gaps,
    read_axes,
    read_identity,
)
from shardscope.attribution.spans import DEVICE_CLOCK, SpanBeginCallback, Timing
from shardscope.comm.collective_facts import GroupRegistry
from shardscope.comm.findings import find_comm_problems
from shardscope.comm.recorder import Recorder, raise_if_from_signal
from shardscope.comm.value_sampler import ValueSampler, describe_simulation
from shardscope.comm.value_selection import ValueSamples
from shardscope.errors import OutputError, TraceError
from shardscope.record import (
    Axis,
    Collective,
    CollectiveKind,
    Finding,
    Gap,
    Module,
    RankProcess,
    RankSpan,
    Recording,
    Redistribute,
    RunInfo,
    Span,
    SpanBegin,
    Stop,
    replace_surrogates,
)
from shardscope.record.rank_stream import RankStream
from shardscope.record.stream_lines import StreamRecord
from shardscope.record.text import describe_error
from shardscope.world import current_world

_MAX_SPANS = 100_000


@final
class _SpanRecorder:
    """Records the first 100,000 spans of a trace; a stream, if there is one, gets all.

    With `max_spans=0`, only the stream gets them.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        emit: Callable[[Span], None] | None,
        emit_begin: Callable[[SpanBegin], None] | None,
        max_spans: int = _MAX_SPANS,
    ) -> None:
        self.spans: list[Span] = []
        self._max_spans = max_spans
        self.has_rank = False  # whether a span was recorded in a world, so that its rank is fixed
        self._num_lost = 0
        self._recorder = recorder
        self._emit = emit
        self._emit_begin = emit_begin
        self._lock = threading.RLock()

    def on_span(self, timing: Timing) -> None:
        """Record a span, if it belongs to the world of this trace."""
        try:
            if not self._recorder.is_in_its_world():
                return
            self._recorder.read_clock()
            span = timing.as_span(rank=self._recorder.rank, since_ns=self._recorder.start_ns)
            with self._lock:
                self.has_rank = self.has_rank or dist.is_initialized()
                self._keep(span)
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            raise_if_from_signal(error)
            fact = f"a span could not be recorded ({error!r})"
            self._recorder.report_gap("phases", fact, is_loss=True)

    @property
    def on_span_begin(self) -> SpanBeginCallback | None:
        """The callback for starts of spans; None without a stream."""
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
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            raise_if_from_signal(error)
            fact = f"the beginning of a span could not be recorded ({error!r})"
            self._recorder.report_gap("phases", fact)

    def set_rank(self, rank: int) -> None:
        """Assign the rank, now known, to the spans recorded so far."""
        with self._lock:
            self.spans[:] = [replace(span, rank=rank) for span in self.spans]

    def find_gaps(self) -> Iterator[Gap]:
        """Gaps for spans that the device has not finished and for spans above the limit."""
        if num_waiting := DEVICE_CLOCK.num_waiting(self):
            fact = (
                f"the device has not finished {num_waiting:,} of the spans that it times: call "
                "torch.cuda.synchronize() before asking for the recording"
            )
            yield Gap(place="phases", fact=fact, rank=self._recorder.rank)
        if self._num_lost and self._max_spans:
            where = "are in the stream only" if self._emit is not None else "are lost"
            fact = f"the first {_MAX_SPANS:,} spans are kept; {self._num_lost:,} later ones {where}"
            yield Gap(place="phases", fact=fact, rank=self._recorder.rank)

    def _keep(self, span: Span) -> None:
        if len(self.spans) < self._max_spans:
            self.spans.append(span)
        else:
            self._num_lost += 1
        if self._emit is not None:
            self._emit(span)


@final
class TraceSession:
    """The state of a trace. If the world is initialized after the trace began, it is read then."""

    def __init__(
        self,
        names: ModuleNames,
        *,
        mesh: DeviceMesh | None,
        stream: str | Path | None,
        force: bool,
        samples: ValueSamples | None = None,
        step: int = 1,
        stream_bytes: int | None = None,
    ) -> None:
        self._names = names
        self._mesh = mesh
        self._stream_path = stream
        self._stream: RankStream | None = None
        self._process: RankProcess | None = None  # of a rank that is not simulated
        self._modules: list[Module] = []
        self._findings: tuple[Finding, ...] = ()
        self._error: str | None = None  # the exception that last ended the trace
        self._lock = threading.RLock()
        rank, world_size = read_identity()
        self.recorder = Recorder(
            names,
            GroupRegistry(),
            rank=rank,
            emit=None if stream is None else self._emit,
            enter_world=self._enter_world,
        )
        self.recorder.keeps_records = stream_bytes is None
        self.spans = _SpanRecorder(
            self.recorder,
            emit=None if stream is None else self._emit,
            emit_begin=None if stream is None else self._emit_begin,
            max_spans=_MAX_SPANS if stream_bytes is None else 0,
        )
        self.values = None if samples is None else self._make_sampler(samples, step)
        self._run = describe_run(rank, world_size, self._read_axes(), instrument="trace")
        if dist.is_initialized():
            self.recorder.join_world()  # now, to make the first collective cheaper
        self._is_simulated_cpu = _is_simulated_cpu()
        for gap in find_torch_gaps():
            self.recorder.report_gap(gap.place, gap.fact)
        self._inventory = Inventory(names, self.recorder)
        is_rank_known = dist.is_initialized() or "RANK" in os.environ
        if stream is not None:
            self._stream = self.recorder.stream = RankStream(
                stream,
                self._run,
                force=force,
                is_rank_known=is_rank_known,
                max_bytes=stream_bytes,
            )
            for gap in self.recorder.gaps:
                self._emit(gap)
        if is_rank_known:
            self._describe_process()
        # Before a module is called: during the call FSDP has gathered its parameters.
        self._describe_modules()

    def _make_sampler(self, samples: ValueSamples, step: int) -> ValueSampler:
        sampler = ValueSampler(
            samples,
            self._names,
            self.recorder.calls,
            first_step=step,
            report=lambda fact: self.recorder.report_gap("values", fact),
            emit=None if self._stream_path is None else self._emit,
        )
        sampler.rank = self.recorder.rank
        sampler.keeps_records = self.recorder.keeps_records
        return sampler

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.recorder.rank

    @property
    def _has_rank(self) -> bool:
        """Whether collectives or spans were recorded for the current rank, so that it is fixed."""
        return self.recorder.has_collectives or self.spans.has_rank

    def recording(self) -> Recording:
        """The recording so far, with the spans that the device has finished."""
        DEVICE_CLOCK.settle()
        return self._make_recording()

    def _make_recording(self) -> Recording:
        self._describe_modules()
        self._report_cpu_gathers()
        recording = Recording(
            run=self._count_forwards(),
            groups=self.recorder.groups.groups,
            modules=tuple(self._modules),
            collectives=tuple(self.recorder.collectives),
            findings=(),
            gaps=self._gaps(),
            stops=self._stops(),
            spans=tuple(self.spans.spans),
            values=() if self.values is None else tuple(self.values.records),
            processes=() if self._process is None else (self._process,),
        )
        if not self.recorder.keeps_records:
            recording = self._add_kept(recording)
        try:
            return replace(recording, findings=find_comm_problems(recording))
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            self.recorder.report_gap("findings", f"they could not be inspected ({error!r})")
            return replace(recording, gaps=self._gaps())

    def _add_kept(self, recording: Recording) -> Recording:
        """Add what a stream of limited size has kept, and how much it has not."""
        assert self._stream is not None
        try:
            kept = self._stream.read_back()
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            fact = f"its stream, which alone has the records, could not be read: {error}"
            gap = Gap(place="stream", fact=fact, rank=self.rank, is_loss=True)
            return replace(recording, gaps=(*recording.gaps, gap))
        known = {*recording.gaps}
        # The stream has no end yet: that is no gap of this recording.
        dropped = [gap for gap in kept.gaps if gap not in known and gap.place == "stream"]
        return replace(
            recording,
            collectives=kept.collectives,
            gaps=(*recording.gaps, *dropped),
            spans=kept.spans,
            values=kept.values,
            dropped=kept.dropped,
        )

    def _describe_process(self) -> None:
        """Record the process of this rank, unless the world is simulated."""
        written, self._process = self._process, None
        if not self._run.is_simulated:
            started_unix_ns = self.recorder.started_unix_ns
            self._process = describe_process(self.rank, started_unix_ns=started_unix_ns)
            if written is None or written.pid != self._process.pid:
                self._emit(self._process)

    def _count_forwards(self) -> RunInfo:
        """The run with its number of forwards: the most that any of the models has."""
        counts = self.recorder.calls.num_forwards
        roots = [counts.get(self._names.find(root), 0) for root in self._names.roots()]
        most = max(roots, default=0) or max(counts.values(), default=0)
        return replace(self._run, num_forwards=most or None)

    def _report_cpu_gathers(self) -> None:
        """Report, for a simulated CPU, collectives that DTensor would not issue on a GPU."""
        if self._is_simulated_cpu and any(map(_replaces_all_to_all, self.recorder.collectives)):
            self.recorder.report_gap(
                "DTensor",
                "it gathered tensors to move a shard from one dim to another, as it does on CPU "
                "meshes; on CUDA meshes it issues an all_to_all, of fewer bytes: simulate with "
                'device="cuda"',
            )

    def _gaps(self) -> tuple[Gap, ...]:
        return (*self.recorder.gaps, *self.spans.find_gaps())

    def _stops(self) -> tuple[Stop, ...]:
        if self._error is None:
            return ()
        is_gapless = not any(gap.is_loss for gap in self._gaps())
        return (Stop(rank=self.rank, error=self._error, is_gapless=is_gapless),)

    def resume(self) -> None:
        """Continue after `pause`, in the same world."""
        now = read_identity()
        then = (self.rank, self._run.world_size)
        if now != then and self._has_rank:
            raise TraceError(
                f"This trace began as rank {then[0]} of {then[1]} and is entered again as rank "
                f"{now[0]} of {now[1]}. Make a new trace for each world."
            )
        self._error = None
        if self._stream is not None:
            self._stream.reopen()

    def pause(self, error: BaseException | None) -> None:
        """Write all pending records, and the error that ended the step, if any."""
        self.recorder.make_records()
        if self.values is not None:
            self._end_values(self.values)
        if error is not None:
            self._error = describe_error(error)
            self.recorder.report_gap("step", f"it ended early with {self._error}")
        self._describe_modules()
        self._report_cpu_gathers()
        if self._stream is None:
            return
        DEVICE_CLOCK.settle()
        if DEVICE_CLOCK.num_waiting(self.spans):
            self.recorder.report_gap(
                "phases",
                "the stream has no spans that the device had not finished when the trace ended: "
                "call torch.cuda.synchronize() before that",
            )
        try:
            self._stream.rename()  # if no world began, this process is rank 0
        except OutputError as error:
            self.recorder.report_gap("stream", str(error))
        self._emit_findings()
        self._stream.describe_run(self._count_forwards())
        self._stream.close(self._error)
        if self._stream.failure is not None:
            self.recorder.report_gap("stream", self._stream.failure)

    def _end_values(self, values: ValueSampler) -> None:
        if (fact := describe_simulation()) is not None:
            self.recorder.report_gap("values", fact)
        values.pause()

    def _enter_world(self) -> bool:
        """Called before the first collective in a new world: whether the trace records it."""
        rank, world_size = read_identity()
        if (rank, world_size) != (self.rank, self._run.world_size):
            if self._has_rank:
                self.recorder.report_gap(
                    "world",
                    f"the world changed to rank {rank} of {world_size}, of which nothing is "
                    "recorded: use one trace per world",
                )
                return False
            self._set_rank(rank)
        self._run = describe_run(rank, world_size, self._read_axes(), instrument="trace")
        self._is_simulated_cpu = _is_simulated_cpu()
        if self._stream is not None:
            early: tuple[StreamRecord, ...]
            early = (*self._modules, *self.recorder.gaps, *self.spans.spans)
            try:
                self._stream.set_run(self._run, early)
            except OutputError as error:
                self.recorder.report_gap("stream", str(error))
        self._describe_process()
        return True

    def _set_rank(self, rank: int) -> None:
        """Assign the rank, now known, to everything recorded so far."""
        self.recorder.rank = rank
        self.recorder.gaps[:] = [replace(gap, rank=rank) for gap in self.recorder.gaps]
        self._modules = [replace(module, ranks=(RankSpan(rank),)) for module in self._modules]
        self.spans.set_rank(rank)
        if self.values is not None:
            self.values.set_rank(rank)

    def _read_axes(self) -> tuple[Axis, ...]:
        """The axes of the largest mesh; groups along axes of any mesh get the axes' names."""
        recorder = self.recorder
        return read_axes(
            self._names, recorder.report_gap, mesh=self._mesh, on_mesh=recorder.groups.add_mesh
        )

    def _describe_modules(self) -> None:
        """Record the modules that were found since the last call."""
        with self._lock:
            for module in self._inventory.describe_new():
                self._modules.append(module)
                self._emit(module)

    def _emit(self, record: StreamRecord) -> None:
        if self._stream is not None:
            self._stream.write(record)

    def _emit_begin(self, begin: SpanBegin) -> None:
        if self._stream is not None:
            self._stream.write_begin(begin)

    def _emit_findings(self) -> None:
        """Write the findings that are not in the stream yet; it may be closed and reopened."""
        # Without DEVICE_CLOCK.settle(), whose subscribers may wait for our lock.
        if not self.recorder.keeps_records:
            return  # those of what is kept are found when it is read
        written, self._findings = self._findings, self._make_recording().findings
        for finding in self._findings:
            if finding not in written:
                self._emit(finding)


def _is_simulated_cpu() -> bool:
    world = current_world()
    return world is not None and world.device_type == "cpu"


def _replaces_all_to_all(collective: Collective) -> bool:
    """Whether DTensor all-gathers a tensor to change one Shard(dim) into another."""
    cause = collective.cause
    if collective.kind is not CollectiveKind.ALL_GATHER or not isinstance(cause, Redistribute):
        return False
    moves = zip(cause.before, cause.after, strict=False)
    return any(
        before != after and before.startswith("Shard") and after.startswith("Shard")
        for before, after in moves
    )
