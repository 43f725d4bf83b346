"""The observer that turns each collective into a record, with its phase, owner, trigger and cause.

What only this moment knows is noted as the collective is issued; looking up names, groups and
causes waits until the record is wanted, so that the step being watched pays for little.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardscope._torch.autograd import current_node, is_in_backward, node_origin
from shardscope._torch.frames import Role
from shardscope._torch.intercept import Issued
from shardscope.comm.buckets import BucketBook, common_module
from shardscope.comm.calls import ModuleCalls
from shardscope.comm.causes import find_cause
from shardscope.comm.groups import GroupBook
from shardscope.comm.names import NO_MODULE, ModuleNames
from shardscope.comm.stack import Stack, find_backward_caller, read_stack
from shardscope.comm.traffic import Payload
from shardscope.record import BucketReduce, Cause, Collective, CollectiveKind, Gap, Group, Phase

__all__ = ["Recorder"]

_MAIN_THREAD = threading.main_thread().ident

Emit = Callable[[Group | Collective | Gap], None]


class _Note:
    """What is noted of a collective as it is issued. Holds no tensor."""

    __slots__ = (
        "bucket",
        "node",
        "node_number",
        "payload",
        "phase",
        "running",
        "stack",
        "start_ns",
        "thread",
    )

    def __init__(self, payload: Payload, stack: Stack, phase: Phase, start_ns: int) -> None:
        self.payload = payload
        self.stack = stack
        self.phase = phase
        self.start_ns = start_ns
        self.thread = _thread_name()
        self.running = NO_MODULE
        self.node: str | None = None
        self.node_number: int | None = None
        self.bucket: BucketReduce | None = None


class Recorder:
    """Writes down collectives. Whatever goes wrong in here becomes a gap, never an exception.

    With `emit`, records are written at once and handed to it; without, when they are asked for.
    """

    def __init__(
        self, rank: int, names: ModuleNames, groups: GroupBook, emit: Emit | None = None
    ) -> None:
        self.gaps: list[Gap] = []
        self.calls = ModuleCalls(names)
        self.buckets = BucketBook(names, self.report_gap)
        self.groups = groups
        self._collectives: list[Collective] = []
        self._notes: list[_Note] = []
        self._rank = rank
        self._names = names
        self._emit = emit
        self._lock = threading.RLock()
        self._known_gaps: set[tuple[str, str]] = set()
        self._start_ns = time.perf_counter_ns()

    def before(self, issued: Issued) -> None:
        """Note a collective before it is issued, so that one that hangs is there too."""
        try:
            self._note(issued, read_stack(sys._getframe(2)))
            if self._emit is not None:
                self.write()
        except Exception as error:  # noqa: BLE001 - watching must not kill
            self.report_gap(issued.op, f"it was issued but not understood ({error!r})")

    @property
    def collectives(self) -> list[Collective]:
        """Every collective noted so far, written out."""
        self.write()
        return self._collectives

    def write(self) -> None:
        """Write out what has been noted."""
        with self._lock:
            notes, self._notes = self._notes, []
            for note in notes:
                try:
                    self._write(note)
                except Exception as error:  # noqa: BLE001 - watching must not kill
                    op = note.payload.op
                    self.report_gap(op, f"it was issued but not understood ({error!r})")

    def report_gap(self, place: str, fact: str) -> None:
        """Write down, once, something that was seen and not understood."""
        if (place, fact) in self._known_gaps:
            return
        self._known_gaps.add((place, fact))
        gap = Gap(place=place, fact=fact, rank=self._rank)
        self.gaps.append(gap)
        if self._emit is not None:
            self._emit(gap)

    def _note(self, issued: Issued, stack: Stack) -> None:
        start_ns = time.perf_counter_ns() - self._start_ns
        phase = _phase(stack)
        if phase is Phase.BACKWARD and not stack.backward_caller:
            find_backward_caller(stack)
        for single in issued.singles():
            payload = Payload(single.op, single.layout, single.args, single.out, stack.reduction)
            note = _Note(payload, stack, phase, start_ns)
            if phase is Phase.BACKWARD:
                self._note_node(note, single)
            elif phase is not Phase.OPTIMIZER:
                note.running = self.calls.running()
            self._notes.append(note)

    def _note_node(self, note: _Note, issued: Issued) -> None:
        node = current_node()
        if node is None:  # a callback at the end of backward
            return
        origin = node_origin(node)
        if isinstance(origin, torch.Tensor):
            note.running = self._names.owner_of(origin)
            if not note.stack.held and note.payload.kind is CollectiveKind.ALL_REDUCE:
                num_elements = sum(tensor.numel() for tensor in issued.read().inputs)
                note.bucket = self.buckets.find(num_elements, origin)
        else:
            note.node_number = origin
            if note.stack.held:
                note.node = node.name()

    def _write(self, note: _Note) -> None:
        stack, payload = note.stack, note.payload
        trigger = self._trigger(note)
        cause, module = find_cause(payload.kind, stack, note.node)
        cause = note.bucket or cause
        group = self._group(payload.group, stack)
        owner = trigger if module is None else self._names.find(module)
        collective = Collective(
            rank=self._rank,
            order=len(self._collectives),
            group=group.name,
            group_order=self.groups.next_order(group),
            kind=payload.kind,
            op=payload.op,
            num_ranks=group.num_ranks,
            axis=group.axis,
            dtype=payload.dtype,
            num_tensors=payload.num_tensors,
            input_bytes=payload.input_bytes,
            output_bytes=payload.output_bytes,
            wire_bytes=payload.wire_bytes,
            phase=note.phase,
            owner=_owner_name(cause, self._names.name(owner)),
            trigger=self._names.name(trigger),
            cause=cause,
            source=stack.source,
            reduce_op=payload.reduce_op,
            peer=payload.global_peer,
            thread=note.thread,
            start_ns=note.start_ns,
        )
        self._collectives.append(collective)
        if self._emit is not None:
            self._emit(collective)

    def _group(self, process_group: dist.ProcessGroup, stack: Stack) -> Group:
        if process_group in self.groups:
            return self.groups.find(process_group)
        if Role.REDISTRIBUTE in stack.held:
            self.groups.add_mesh(stack.held[Role.REDISTRIBUTE][0].mesh)
        group = self.groups.find(process_group)
        if self._emit is not None:
            self._emit(group)
        return group

    def _trigger(self, note: _Note) -> int:
        """The module that was running when the collective was issued."""
        if note.node_number is None:
            return note.running
        maker = self.calls.maker_of(note.node_number, note.stack.backward_caller)
        if maker is None:
            self.report_gap(
                "backward",
                "its forward ran before the trace began, so which module a collective belongs to "
                "is not known where only autograd could tell",
            )
            return NO_MODULE
        return maker


def _phase(stack: Stack) -> Phase:
    boundary = stack.boundary
    if boundary is Role.OPTIMIZER:
        return Phase.OPTIMIZER
    if boundary is Role.RECOMPUTE:
        return Phase.RECOMPUTE
    if boundary is Role.MODULE_CALL:
        return Phase.RECOMPUTE if is_in_backward() else Phase.FORWARD
    if boundary is Role.ENGINE or is_in_backward():
        return Phase.BACKWARD
    return Phase.OUTSIDE


def _owner_name(cause: Cause | None, owner: str | None) -> str | None:
    return common_module(cause.parameters) if isinstance(cause, BucketReduce) else owner


def _thread_name() -> str:
    identity = threading.get_ident()
    if identity == _MAIN_THREAD:
        return ""
    # Not current_thread(): it would leave an object behind for a thread that C++ started.
    named = (thread.name for thread in threading.enumerate() if thread.ident == identity)
    return next(named, "autograd")
