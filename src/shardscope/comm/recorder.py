"""The observer that turns each collective into a record, with its phase, owner, trigger and cause.

What only this moment knows is noted as the collective is issued; looking up names, groups and
causes waits until the record is wanted, so that the step being watched pays for little.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from threading import get_ident
from types import CodeType
from typing import final

import torch
from torch import nn

from shardscope._torch.autograd import (
    current_node,
    is_in_backward,
    next_sequence_number,
    node_number,
    node_origin,
)
from shardscope._torch.calls import UNREAD, process_group
from shardscope._torch.ddp import is_in_comm_hook
from shardscope._torch.frames import Role
from shardscope._torch.intercept import Issued
from shardscope._torch.meshes import default_group
from shardscope._torch.recompute import reentrant_nodes
from shardscope.comm.buckets import BucketBook, common_module
from shardscope.comm.calls import ModuleCalls
from shardscope.comm.causes import find_cause, hold_lightly
from shardscope.comm.groups import GroupBook, Membership
from shardscope.comm.names import NO_MODULE, ModuleNames
from shardscope.comm.run import is_simulated
from shardscope.comm.signals import raise_if_from_signal
from shardscope.comm.stack import Stack, find_backward_caller, read_stack
from shardscope.comm.threads import thread_name
from shardscope.comm.traffic import Payload
from shardscope.record import (
    BucketReduce,
    Cause,
    Collective,
    CollectiveKind,
    Compiled,
    Gap,
    Group,
    Phase,
)

__all__ = ["Recorder"]

_MAIN_THREAD = threading.main_thread().ident

Emit = Callable[[Group | Collective | Gap], None]

_UNREAD_FACT = (
    "it was issued, but it is not a known collective (it may be one-sided, or newer than "
    "this version of shardscope): what it sends is not recorded"
)

_COMPILED_FUNCTION = "compiled function"


@final
class _Note:
    """What is noted of a collective as it is issued. Holds no tensor."""

    # Defaults of the class, as in Stack.
    thread = ""
    running = NO_MODULE
    node: str | None = None
    node_number: int | None = None
    reached: int | None = None  # by the thread that called backward, where that is this one
    bucket: BucketReduce | None = None

    def __init__(self, payload: Payload, stack: Stack, phase: Phase, start_ns: int | None) -> None:
        self.payload = payload
        self.stack = stack
        self.phase = phase
        self.start_ns = start_ns


@final
class Recorder:
    """Writes down collectives. Whatever goes wrong in here becomes a gap, never an exception.

    With `emit`, records are written at once and handed to it; without, when they are asked for.
    `enter_world` is called before the first collective in a world that it was not told to join, and
    tells whether to record it.
    """

    def __init__(
        self,
        names: ModuleNames,
        groups: GroupBook,
        *,
        rank: int,
        emit: Emit | None = None,
        enter_world: Callable[[], bool] = lambda: True,
    ) -> None:
        self.gaps: list[Gap] = []
        self.buckets = BucketBook(names, self.report_gap)
        self.calls = ModuleCalls(names, self.buckets, self.report_gap)
        self.groups = groups
        self._collectives: list[Collective] = []
        self._notes: deque[_Note] = deque()  # threads add while another writes
        self.rank = rank
        self._names = names
        self._emit = emit
        self._enter_world = enter_world
        self._world: Callable[[], object] = object  # equal to none
        self._lock = threading.RLock()
        self._known_gaps: set[tuple[str, str]] = set()
        # Which modules issued a collective at a line of forward, by name.
        self._issuers: defaultdict[tuple[CodeType | None, int], dict[str | None, int]]
        self._issuers = defaultdict(dict)
        self.start_ns = self._latest_ns = time.perf_counter_ns()
        self._is_simulated = is_simulated()

    def before(self, issued: Issued) -> None:
        """Note a collective before it is issued, so that one that hangs is there too."""
        try:
            if issued.layout is UNREAD:
                self.report_gap(issued.op, _UNREAD_FACT, is_loss=True)
                return
            self._note(issued, read_stack(sys._getframe(2)))  # from the door on, not from here
            if self._emit is not None:
                self.write()
        except Exception as error:  # noqa: BLE001 - watching must not kill
            raise_if_from_signal(error)
            self._report_loss(issued.op, error)

    @property
    def has_collectives(self) -> bool:
        """Whether any collective was noted."""
        return bool(self._collectives or self._notes)

    @property
    def collectives(self) -> list[Collective]:
        """Every collective noted so far, written out."""
        self.write()
        return self._collectives

    def write(self) -> None:
        """Write out what has been noted."""
        with self._lock:
            while self._notes:
                note = self._notes.popleft()
                try:
                    self._write(note)
                except Exception as error:  # noqa: BLE001 - watching must not kill
                    raise_if_from_signal(error)
                    self._report_loss(note.payload.op, error)

    def report_gap(self, place: str, fact: str, *, is_loss: bool = False) -> None:
        """Write down, once, something that was seen and not understood."""
        if (place, fact) in self._known_gaps:
            return
        self._known_gaps.add((place, fact))
        gap = Gap(place=place, fact=fact, rank=self.rank, is_loss=is_loss)
        self.gaps.append(gap)
        if self._emit is not None:
            self._emit(gap)

    def read_clock(self) -> int:
        """The host's clock. Times measured while it is set back are wrong, which is a gap."""
        latest_ns = self._latest_ns  # before the clock: another thread may read it in between
        now_ns = time.perf_counter_ns()
        if now_ns < latest_ns:
            fact = "the host's clock was set back during the trace: times after that are wrong"
            self.report_gap("clock", fact)
        self._latest_ns = max(latest_ns, now_ns)
        return now_ns

    def _report_loss(self, op: str, error: Exception) -> None:
        self.report_gap(op, f"it was issued but not understood ({error!r})", is_loss=True)

    def _note(self, issued: Issued, stack: Stack) -> None:
        # A simulation's own time says nothing of a run's.
        start_ns = None if self._is_simulated else max(0, self.read_clock() - self.start_ns)
        phase = _phase(stack.boundary)
        if phase is _BACKWARD and (stack.user is None or not stack.backward_caller):
            find_backward_caller(stack)
        if stack.held:
            hold_lightly(stack, self._find_sharded)
        for single in issued.singles():
            group = self._membership(single, stack)
            if group is None:
                continue
            payload = Payload(single, group=group, asked=stack.reduction)
            note = _Note(payload, stack, phase, start_ns)
            if get_ident() != _MAIN_THREAD:
                note.thread = thread_name()
            if phase is _BACKWARD:
                self._note_node(note, single)
            elif stack.boundary is Role.RECOMPUTE:
                note.running = self.calls.recomputing()
            elif phase is not Phase.OPTIMIZER:
                note.running = self.calls.running()
                if note.running == NO_MODULE and stack.boundary is Role.MODULE_CALL:
                    # Only a graph that a compiler made was called, and that is no module.
                    note.phase = _BACKWARD if is_in_backward() else _OUTSIDE
                    if note.phase is _BACKWARD:
                        self._note_node(note, single)
                if note.phase is _OUTSIDE and stack.graph is not None:
                    note.phase = _FORWARD  # of a compiled function that may have called modules
            self._notes.append(note)

    def join_world(self) -> None:
        """The world that this process is in now is the one to record."""
        self.groups.start_world()
        self._is_simulated = is_simulated()
        default = default_group()
        self._world = (lambda: None) if default is None else weakref.ref(default)

    def is_in_its_world(self) -> bool:
        """Whether what happens now is this recorder's to record; before any world, all is."""
        group = default_group()
        return group is None or group is self._world() or self._enter()

    def _enter(self) -> bool:
        with self._lock:
            if not self._enter_world():
                return False
            self.join_world()
            return True

    def _note_node(self, note: _Note, issued: Issued) -> None:
        node = current_node()
        if node is None:  # a callback at the end of backward
            if note.stack.is_bare:
                self._note_bucket(note, issued, None)
            return
        origin = node_origin(node)
        if isinstance(origin, torch.Tensor):
            note.running = self._names.owner_of(origin)
            self._note_bucket(note, issued, origin)
        else:
            note.node_number = origin
            if note.stack.backward_caller == get_ident():
                note.reached = next_sequence_number()
            if note.stack.is_nested:
                note.running = self._recomputed_by()
            if note.stack.held:
                note.node = node.name()

    def _note_bucket(self, note: _Note, issued: Issued, last: torch.Tensor | None) -> None:
        """DDP reduces a bucket as its `last` parameter gets its gradient, or all at the end."""
        if note.stack.held or note.payload.kind is not CollectiveKind.ALL_REDUCE:
            return
        if not note.stack.is_bare and not is_in_comm_hook(sys._getframe()):
            return  # a call of the user's own, in a hook of the gradient's
        tensors = issued.read().inputs
        if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            return  # DDP's own account of which parameters were used
        note.bucket = self.buckets.find(sum(tensor.numel() for tensor in tensors), last)
        if note.bucket is None and note.stack.is_bare:
            note.bucket = BucketReduce(bucket=None, parameters=())
            self.report_gap(
                "DDP",
                "a bucket was reduced whose parameters are not known: they are read when a "
                "forward ends inside the trace",
            )

    def _recomputed_by(self) -> int:
        """The module whose checkpointed function, run again, is now in its own backward."""
        own = threading.get_ident()
        for node in reentrant_nodes(sys._getframe()):
            reached = next_sequence_number()
            maker = self.calls.maker_of(node_number(node), own, reached=reached)
            if maker is not None and maker != NO_MODULE:
                return maker
        return NO_MODULE

    def _write(self, note: _Note) -> None:
        stack, payload = note.stack, note.payload
        trigger = self._trigger(note)
        cause, owner = find_cause(payload, stack, note.node, note.phase)
        cause = note.bucket or cause
        if note.phase is _FORWARD:
            self._issuers[stack.user, stack.instruction][self._names.name(trigger)] = trigger
        if isinstance(cause, Compiled) and trigger == NO_MODULE and self._names.names:
            self._report_compiled_function(cause, stack)
        group = payload.group.record
        collective = Collective(
            rank=self.rank,
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
            owner=_owner_name(cause, self._names.name(trigger if owner is None else owner)),
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

    def _report_compiled_function(self, cause: Compiled, stack: Stack) -> None:
        """Say once per line that a compiled function's collectives have no module."""
        is_known = any(gap.place == _COMPILED_FUNCTION for gap in self.gaps)
        if cause.graph == "backward" and is_known:
            return  # its line is that of backward(), and the function's own has been named
        source = stack.source
        line = "" if source is None else f" ({source.file}:{source.line})"
        self.report_gap(
            _COMPILED_FUNCTION,
            f"its collectives have no module{line}: compile the model or its layers, not a "
            "function that calls them, to see which module issues them",
        )

    def _find_sharded(self, modules: Sequence[nn.Module]) -> int:
        """The module that FSDP was applied to; of several, the innermost that has them all."""
        if len(modules) > 1:
            found = [self._names.find(module, self.calls.running()) for module in modules]
            return self._names.index(common_module([self._names.names[one] for one in found]))
        index = self._names.only_places.get(id(modules[0]))
        return self._names.find(modules[0], self.calls.running()) if index is None else index

    def _membership(self, issued: Issued, stack: Stack) -> Membership | None:
        """Of the group, which the run may have destroyed by the time the record is written."""
        if default_group() is not self._world() and not self._enter():
            return None
        group = issued.args[issued.layout.group]
        is_name = type(group) is str  # what functional collectives are given
        known = self.groups.find(group if is_name else process_group(group).group_name)
        if known is not None:
            return known
        group = process_group(group)
        with self._lock:
            if Role.REDISTRIBUTE in stack.held:
                self.groups.add_mesh(stack.held[Role.REDISTRIBUTE][0].mesh)
            known = self.groups.meet(group)
            if self._emit is not None:
                self._emit(known.record)
        return known

    def _trigger(self, note: _Note) -> int:
        """The module that was running when the collective was issued."""
        if note.stack.boundary is Role.RECOMPUTE:
            return self._caller_of_function(note)
        if note.node_number is None:
            return note.running
        maker = self.calls.maker_of(
            note.node_number, note.stack.backward_caller, reached=note.reached
        )
        if maker is None:
            self.report_gap(
                "backward",
                "its forward ran before the trace began, or on another thread outside any "
                "module, so collectives that only autograd could attribute have no module",
            )
            return NO_MODULE
        return note.running if maker == NO_MODULE else maker

    def _caller_of_function(self, note: _Note) -> int:
        """The module that had called the function now run again.

        A node of the function's tells a module within it. The one that called it is above, and
        has issued a collective at the same line before.
        """
        index = note.running
        name = self._names.name(index)
        issuers = self._issuers.get((note.stack.user, note.stack.instruction), {})
        while name and name not in issuers:
            name = name.rpartition(".")[0]
        return issuers.get(name, index)


_PHASES = {
    Role.OPTIMIZER: Phase.OPTIMIZER,
    Role.RECOMPUTE: Phase.RECOMPUTE,
    Role.ENGINE: Phase.BACKWARD,
}
_BACKWARD, _FORWARD, _RECOMPUTE, _OUTSIDE = (
    Phase.BACKWARD,
    Phase.FORWARD,
    Phase.RECOMPUTE,
    Phase.OUTSIDE,
)


def _phase(boundary: Role | None) -> Phase:
    phase = _PHASES.get(boundary)  # type: ignore[arg-type]
    if phase is not None:
        return phase
    is_backward = is_in_backward()
    if boundary is None:
        return _BACKWARD if is_backward else _OUTSIDE
    return _RECOMPUTE if is_backward else _FORWARD


def _owner_name(cause: Cause | None, owner: str | None) -> str | None:
    if isinstance(cause, BucketReduce) and cause.parameters:
        return common_module(cause.parameters)
    return owner
