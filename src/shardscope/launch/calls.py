"""The instrument "calls": every collective of a program from its first line on."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed import distributed_c10d

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.hooks import intercept
from shardscope._torch.collectives.schema import read_exchange
from shardscope._torch.collectives.transfers import awaited_transfers
from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.fake import is_fake
from shardscope._torch.module_calls import replaced_outermost_calls
from shardscope._torch.process_groups.value_sharing import DATA, SharingTracker, ValueMode
from shardscope.attribution.module_names import ModuleNames
from shardscope.attribution.program_records import read_axes
from shardscope.comm.trace import Trace, trace
from shardscope.hang import P2P_KINDS, is_blocking_transfer
from shardscope.launch.decision_log import DecisionLog, find_line, is_of_package, read_start
from shardscope.launch.decisions import Exchange
from shardscope.launch.instrument import Instrument
from shardscope.launch.interventions import VariedCalls, VariedValues, varied_surroundings
from shardscope.launch.lockstep import Arrival, Lockstep, has_run_enough
from shardscope.launch.steps import EndOfRun, StepsDone
from shardscope.record import (
    Axis,
    Call,
    Collective,
    CollectiveKind,
    Group,
    Phase,
    Recording,
    Source,
    Stop,
    compress_ranks,
    expand_ranks,
)
from shardscope.record.text import describe_error
from shardscope.world import current_world

_MAX_COUNTED = 64  # elements of a tensor whose different values are counted
_DIVERGED = "the ranks do not issue the same collectives"
NEW_GROUP = "new_group"
"""The op of a call that creates a group, which waits for all ranks of the world."""
CALLS = "calls"
"""The name of the instrument."""


@final
class RanksDiverged(EndOfRun):
    """Ends a rank because the ranks do not issue the same collectives."""


@final
class CallsInstrument(Instrument):
    """Records collectives; in `lockstep`, each is reported before it is issued.

    A recording ends where the program is asked to end: what it issues after that is left out.
    """

    is_from_start = True

    def __init__(
        self,
        stream: Path,
        lockstep: Lockstep | None = None,
        log: DecisionLog | None = None,
        max_ops: int = 0,
    ) -> None:
        self._max_ops = max_ops
        self._stream = stream
        self._lockstep = lockstep
        self._log = log
        self._tracker: SharingTracker | None = None
        self._values: VariedValues | None = None
        self._trace: Trace | None = None
        self._axes: tuple[Axis, ...] = ()
        self._num_reported = 0
        self._known_groups: set[str] = set()
        self._num_at_end: int | None = None
        self._lines: dict[int, Source] = {}  # of the program, by the order of collectives
        self._pending: tuple[Group, Collective] | None = None  # a call of new_group that waits
        self._stack = ExitStack()

    def begin(self) -> None:
        """Begin to record."""
        self._trace = trace(stream=self._stream, force=True)
        self._stack.enter_context(self._trace)
        self._stack.enter_context(intercept(self, report_missing=lambda sentence: None))
        if self._lockstep is not None:
            self._stack.enter_context(_awaited_groups(self._wait_for_group))
            transfers = awaited_transfers(lambda: self._num_reported, self._wait_for)
            self._stack.enter_context(transfers)
        if self._log is not None:
            self._vary(self._log)

    def _vary(self, log: DecisionLog) -> None:
        """Report where the program decides, and change what the log says."""
        log.count_calls = lambda: self._num_reported
        self._stack.callback(log.save)
        self._tracker = SharingTracker(log.rank, functools.partial(_note_source, log))
        self._stack.enter_context(varied_surroundings(log, self._tracker))
        self._stack.enter_context(replaced_outermost_calls(VariedCalls(log).call))
        self._values = VariedValues(log, self._tracker)
        world = current_world()
        if world is not None and world.host is not None:
            world.host.observer = self._values
            if world.known is not None:
                log.known = world.known
                world.known.set_inputs(log.group_inputs)
        else:
            self._stack.enter_context(ValueMode(self._values))

    def start(self, models: list[nn.Module]) -> None:
        """Read the axes of the mesh of the models."""
        self._axes = read_axes(ModuleNames(models), lambda *_: None)

    def end_run(self) -> None:
        """The program is asked to end."""
        if self._num_at_end is None and self._trace is not None:
            self._num_at_end = len(self._trace.list_from(0)[1])
            self._leave(None, is_cut=True)

    def _leave(self, failure: str | None, *, is_cut: bool = False) -> None:
        lockstep, self._lockstep = self._lockstep, None
        if lockstep is not None:
            lockstep.leave(failure, is_cut=is_cut)

    def before(self, event: CollectiveEvent) -> None:
        """Report a collective, which was recorded just before, and wait for the other ranks."""
        if self._num_at_end is not None:
            raise StepsDone
        assert self._trace is not None
        groups, calls = self._trace.list_from(self._num_reported)
        self._num_reported += len(calls)
        exchange = self._read_exchange(event, calls)
        self._note_lines(calls)
        if self._log is not None:
            self._log.unawaited += [call.order for call in calls if not _waits(call, event)]
        if self._lockstep is None:
            return
        for group in groups if calls else ():
            if group.name not in self._known_groups:
                self._known_groups.add(group.name)
                self._lockstep.report_members(group.name, tuple(expand_ranks(group.ranks)))
        for call in calls:
            tag = int(event.argument("tag") or 0)
            if not self._lockstep.arrive(Arrival(call, _waits(call, event), tag, exchange)):
                raise RanksDiverged(_DIVERGED)

    def _note_lines(self, calls: Sequence[Collective]) -> None:
        """Note the program's line for collectives that a library issues."""
        for call in calls:
            if call.source is not None and is_of_package(call.source):
                own = find_line(sys._getframe(1))
                if own is not None:
                    self._lines[call.order] = own

    def _wait_for_group(self, members: tuple[int, ...]) -> None:
        """Wait until all ranks of the world create the same group, as torch asks them to."""
        if self._lockstep is None or self._num_at_end is not None:
            return
        rank, size = dist.get_rank(), dist.get_world_size()
        group = Group(
            name=f"{NEW_GROUP}({list(members)})",
            torch_name="",
            ranks=compress_ranks(range(size)),
            num_ranks=size,
        )
        call = _make_group_call(group, rank, self._num_reported, find_line(sys._getframe(1)))
        self._lockstep.report_members(group.name, tuple(range(size)))
        if not self._lockstep.arrive(Arrival(call, waits=True)):
            self._pending = group, call
            raise RanksDiverged(_DIVERGED)

    def _read_exchange(
        self, event: CollectiveEvent, calls: Sequence[Collective]
    ) -> Exchange | None:
        """Note how much an all-to-all sends to whom; not if that is only assumed, without data."""
        if len(calls) != 1 or calls[0].kind is not CollectiveKind.ALL_TO_ALL:
            return None
        call = event.read()
        if any(map(is_fake, call.inputs)) and (call.input_splits or call.output_splits):
            return None
        exchange = Exchange(calls[0].order, *read_exchange(call))
        if self._log is not None:
            self._log.exchanges.append(exchange)
        return exchange

    def _wait_for(self, order: int) -> None:
        """Wait for the send or receive that was issued as this number."""
        if self._lockstep is not None and not self._lockstep.wait(order):
            raise RanksDiverged(_DIVERGED)

    def amend(self, event: CollectiveEvent, result: Any) -> Any:
        """Follow which ranks have the same after a collective."""
        if self._tracker is not None:
            with disable_dispatch_modes():
                self._tracker.note_collective(event, result)
        return result

    def end_step(self) -> None:
        """Count the steps that decisions belong to."""
        if self._log is None or self._values is None:
            return
        self._log.end_step()
        step, num_ops, lockstep = self._log.step, self._values.num_ops, self._lockstep
        if lockstep is not None:
            has_ended = not lockstep.end_step(step, num_ops)
        else:
            has_ended = self._max_ops > 0 and has_run_enough(step, num_ops, self._max_ops)
        if has_ended:
            self.end_run()
            self._is_done = True

    def stop(self, error: BaseException | None) -> Recording | None:
        """End, and return the collectives."""
        if self._trace is None:
            return None
        self._leave(None if error is None else describe_error(error))
        self._stack.close()
        recording = self._trace.recording
        calls = recording.collectives[: self._num_at_end]
        calls = tuple(
            replace(call, source=self._lines[call.order]) if call.order in self._lines else call
            for call in calls
        )
        is_cut = error is not None or self._num_at_end is not None
        rank = recording.run.ranks[0].first
        if self._pending is not None:
            group, call = self._pending
            recording = replace(recording, groups=(*recording.groups, group))
            calls = (*calls, call)
        return replace(
            recording,
            run=replace(recording.run, axes=self._axes or recording.run.axes),
            collectives=calls,
            stops=(Stop(rank=rank, is_gapless=True),) if is_cut else (),
        )


@contextmanager
def _awaited_groups(wait: Callable[[tuple[int, ...]], None]) -> Iterator[None]:
    """Call `wait` with the members before the program creates a group, until the context ends."""
    new_group = distributed_c10d.new_group
    signature = inspect.signature(new_group)

    @functools.wraps(new_group)
    def create(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if not arguments.get("use_local_synchronization"):
            ranks = arguments.get("ranks")
            wait(tuple(range(dist.get_world_size()) if ranks is None else sorted(ranks)))
        return new_group(*args, **kwargs)

    with ExitStack() as stack:
        for owner in (dist, distributed_c10d):
            stack.enter_context(mock.patch.object(owner, "new_group", create))
        yield


def _make_group_call(group: Group, rank: int, order: int, source: Source | None) -> Collective:
    return Collective(
        rank=rank,
        order=order,
        group=group.name,
        group_order=0,
        kind=CollectiveKind.BARRIER,
        op=NEW_GROUP,
        num_ranks=group.num_ranks,
        axis=None,
        dtype="",
        num_tensors=0,
        input_bytes=0,
        output_bytes=0,
        wire_bytes=0,
        phase=Phase.OUTSIDE,
        owner=None,
        trigger=None,
        cause=Call(api=NEW_GROUP),
        source=source,
    )


def _note_source(log: DecisionLog, kind: str, tensor: torch.Tensor) -> None:
    """Note data by a hash of its values."""
    if is_fake(tensor):
        log.note_source(kind, str(torch.initial_seed()).encode())
    elif tensor.numel() > 1 and tensor.layout is torch.strided:
        with disable_dispatch_modes():
            values = tensor.detach().flatten()[:_MAX_COUNTED].tolist() if kind == DATA else ()
            log.note_source(kind, read_start(tensor), values)


def _waits(call: Collective, event: CollectiveEvent) -> bool:
    """Whether the call returns only when other ranks have issued theirs.

    Of collectives that torch itself issues without waiting, the program waits soon.
    """
    if call.kind in P2P_KINDS:
        return is_blocking_transfer(call)
    return not (isinstance(call.cause, Call) and event.argument("async_op"))
