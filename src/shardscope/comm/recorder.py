"""Observes collectives and turns each into a record with its phase, owner, trigger and cause."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from threading import get_ident
from types import CodeType
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.autograd import (
    current_node,
    is_in_backward,
    next_sequence_number,
    node_number,
    node_origin,
    reentrant_nodes,
)
from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import UNREAD, process_group
from shardscope._torch.ddp import is_in_comm_hook
from shardscope._torch.frames import Role
from shardscope._torch.mesh import default_group
from shardscope.attribution.call_sites import Stack, find_backward_caller, read_stack, thread_name
from shardscope.attribution.module_calls import BucketRegistry, ModuleCalls, common_module
from shardscope.attribution.module_names import NO_MODULE, ModuleNames
from shardscope.attribution.program_records import is_simulated
from shardscope.comm.collective_facts import (
    GroupRegistry,
    Membership,
    Payload,
    drop_torch_references,
    find_cause,
)
from shardscope.record import (
    BucketReduce,
    Cause,
    Collective,
    CollectiveKind,
    Compiled,
    FullyShard,
    Gap,
    Group,
    Phase,
)


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


_MAIN_THREAD = threading.main_thread().ident

Emit = Callable[[Group | Collective | Gap], None]

_UNREAD_FACT = (
    "it was issued, but it is not a known collective (it may be one-sided, or newer than "
    "this version of shardscope): what it sends is not recorded"
)

_TOO_DEEP_FACT = (
    "it was issued near the end of the call stack, where there was no room left to describe it: "
    "raise the limit with sys.setrecursionlimit"
)

_COMPILED_FUNCTION = "compiled function"


@final
class _Note:
    """What is noted of a collective when it is issued, without references to tensors."""

    # Class attributes as defaults, as in Stack.
    thread = ""
    running = NO_MODULE
    node: str | None = None
    node_number: int | None = None
    reached: int | None = None  # next autograd number, if this thread called backward
    bucket: BucketReduce | None = None

    def __init__(self, payload: Payload, stack: Stack, phase: Phase, start_ns: int | None) -> None:
        self.payload = payload
        self.stack = stack
        self.phase = phase
        self.start_ns = start_ns


@final
class Recorder:
    """Records collectives. Errors in here become gaps, never exceptions in the user's program.

    With `emit`, each record is made at once and passed to it; without, records are made when they
    are first read. `enter_world` is called before the first collective in a world other than that
    of `join_world`, and returns whether to record it.
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
        self.buckets = BucketRegistry(names, self.report_gap)
        self.calls = ModuleCalls(names, self.buckets, self.report_gap)
        self.groups = groups
        self._collectives: list[Collective] = []
        self._notes: deque[_Note] = deque()  # threads append while another thread writes
        self._too_deep: list[str] = []  # ops of collectives that no stack was left to describe
        self.rank = rank
        self._names = names
        self._emit = emit
        self._enter_world = enter_world
        self._world: Callable[[], object] = object  # returns no process group
        self._lock = threading.RLock()
        self._known_gaps: set[tuple[str, str]] = set()
        # By line of a forward: the modules that issued a collective there, by name.
        self._issuers: defaultdict[tuple[CodeType | None, int], dict[str | None, int]]
        self._issuers = defaultdict(dict)
        self.start_ns = self._latest_ns = time.perf_counter_ns()
        self._is_simulated = is_simulated()

    def before(self, event: CollectiveEvent) -> None:
        """Note a collective before it is issued, so that one that hangs is recorded too."""
        try:
            if event.layout is UNREAD:
                self._report_unread(event.op, read_stack(sys._getframe(2)))
                return
            self._note(event, read_stack(sys._getframe(2)))  # starting at the hook's caller
            if self._emit is not None:
                self.write()
        except RecursionError:
            self._too_deep.append(event.op)  # a call of a Python function might raise again
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            raise_if_from_signal(error)
            self._report_loss(event.op, error)

    @property
    def has_collectives(self) -> bool:
        """Whether any collective was noted."""
        return bool(self._collectives or self._notes)

    @property
    def collectives(self) -> list[Collective]:
        """The records of all collectives noted so far."""
        self.write()
        return self._collectives

    def write(self) -> None:
        """Make a record of every collective that was noted."""
        with self._lock:
            while self._too_deep:
                self.report_gap(self._too_deep.pop(), _TOO_DEEP_FACT, is_loss=True)
            while self._notes:
                note = self._notes.popleft()
                try:
                    self._write(note)
                except Exception as error:  # noqa: BLE001 - tracing must not fail the run
                    raise_if_from_signal(error)
                    self._report_loss(note.payload.op, error)

    def report_gap(self, place: str, fact: str, *, is_loss: bool = False) -> None:
        """Add a gap, unless the same gap was added before; `is_loss` if records are missing."""
        if (place, fact) in self._known_gaps:
            return
        self._known_gaps.add((place, fact))
        gap = Gap(place=place, fact=fact, rank=self.rank, is_loss=is_loss)
        self.gaps.append(gap)
        if self._emit is not None:
            self._emit(gap)

    def read_clock(self) -> int:
        """The host's clock, in ns; if it was set back during the trace, report a gap."""
        latest_ns = self._latest_ns  # before the clock: another thread may read it in between
        now_ns = time.perf_counter_ns()
        if now_ns < latest_ns:
            fact = "the host's clock was set back during the trace: times after that are wrong"
            self.report_gap("clock", fact)
        self._latest_ns = max(latest_ns, now_ns)
        return now_ns

    def _report_unread(self, op: str, stack: Stack) -> None:
        source = stack.source
        line = "" if source is None else f" ({source.file}:{source.line})"
        self.report_gap(op, f"{_UNREAD_FACT}{line}", is_loss=True)

    def _report_loss(self, op: str, error: Exception) -> None:
        self.report_gap(op, f"it was issued but not understood ({error!r})", is_loss=True)

    def _note(self, event: CollectiveEvent, stack: Stack) -> None:
        # Times of a simulated run are not those of a real run.
        start_ns = None if self._is_simulated else max(0, self.read_clock() - self.start_ns)
        phase = _phase(stack.boundary)
        if phase is _BACKWARD and (stack.user is None or not stack.backward_caller):
            find_backward_caller(stack)
        if stack.frame_locals:
            drop_torch_references(stack, self._find_sharded)
        for single in event.singles():
            group = self._membership(single, stack)
            if group is None:
                continue
            payload = Payload(single, group=group, reduction=stack.reduction)
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
                    # Only a compiled graph was called, which is not a module of the model.
                    note.phase = _BACKWARD if is_in_backward() else _OUTSIDE
                    if note.phase is _BACKWARD:
                        self._note_node(note, single)
                if note.phase is _OUTSIDE and stack.graph is not None:
                    note.phase = _FORWARD  # of a compiled function that may have called modules
            self._notes.append(note)

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

    def _note_node(self, note: _Note, event: CollectiveEvent) -> None:
        node = current_node()
        if node is None:  # a callback at the end of backward
            if note.stack.is_bare:
                self._note_bucket(note, event, None)
            return
        origin = node_origin(node)
        if isinstance(origin, torch.Tensor):
            note.running = self._names.owner_of(origin)
            self._note_bucket(note, event, origin)
        else:
            note.node_number = origin
            if note.stack.backward_caller == get_ident():
                note.reached = next_sequence_number()
            if note.stack.is_nested:
                note.running = self._recomputed_by()
            if note.stack.frame_locals:
                note.node = node.name()

    def _note_bucket(self, note: _Note, event: CollectiveEvent, last: torch.Tensor | None) -> None:
        """Note the DDP bucket that is reduced because the gradient of `last` completed it.

        `last` is None at the end of backward, where DDP reduces the remaining buckets.
        """
        if note.stack.frame_locals or note.payload.kind is not CollectiveKind.ALL_REDUCE:
            return
        if not note.stack.is_bare and not is_in_comm_hook(sys._getframe()):
            return  # issued by a gradient hook of the user
        tensors = event.read().inputs
        if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            return  # DDP's bitmap of used parameters
        note.bucket = self.buckets.find(sum(tensor.numel() for tensor in tensors), last)
        if note.bucket is None and note.stack.is_bare:
            note.bucket = BucketReduce(bucket=None, parameters=())
            self.report_gap(
                "DDP",
                "a bucket was reduced whose parameters are not known: they are read when a "
                "forward ends inside the trace",
            )

    def _recomputed_by(self) -> int:
        """The module whose recomputed (checkpointed) function is now in its own backward."""
        own = threading.get_ident()
        for node in reentrant_nodes(sys._getframe()):
            reached = next_sequence_number()
            creator = self.calls.creator_of(node_number(node), own, reached=reached)
            if creator is not None and creator != NO_MODULE:
                return creator
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
            phase=_BACKWARD if _reduces_gradients(cause) else note.phase,
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
        """Report a gap, once per line: the collectives of a compiled function have no module."""
        is_known = any(gap.place == _COMPILED_FUNCTION for gap in self.gaps)
        if cause.graph == "backward" and is_known:
            return  # its line is that of backward(); the function itself is reported already
        source = stack.source
        line = "" if source is None else f" ({source.file}:{source.line})"
        self.report_gap(
            _COMPILED_FUNCTION,
            f"its collectives have no module{line}: compile the model or its layers, not a "
            "function that calls them, to see which module issues them",
        )

    def _find_sharded(self, modules: Sequence[nn.Module]) -> int:
        """The index of the module that FSDP was applied to; of several, their common module."""
        if len(modules) > 1:
            indices = [self._names.find(module, self.calls.running()) for module in modules]
            return self._names.index(common_module([self._names.names[index] for index in indices]))
        index = self._names.unique_index.get(id(modules[0]))
        return self._names.find(modules[0], self.calls.running()) if index is None else index

    def _membership(self, event: CollectiveEvent, stack: Stack) -> Membership | None:
        """This rank's membership of the group, read now: the run may destroy the group later."""
        if default_group() is not self._world() and not self._enter():
            return None
        group = event.args[event.layout.group]
        is_name = type(group) is str  # functional collectives take a group's name
        membership = self.groups.find(group if is_name else process_group(group).group_name)
        if membership is not None:
            return membership
        group = process_group(group)
        with self._lock:
            if Role.REDISTRIBUTE in stack.frame_locals:
                self.groups.add_mesh(stack.frame_locals[Role.REDISTRIBUTE][0].mesh)
            membership = self.groups.register(group)
            if self._emit is not None:
                self._emit(membership.record)
        return membership

    def _trigger(self, note: _Note) -> int:
        """The module that was running when the collective was issued."""
        if note.stack.boundary is Role.RECOMPUTE:
            return self._caller_of_function(note)
        if note.node_number is None:
            return note.running
        creator = self.calls.creator_of(
            note.node_number, note.stack.backward_caller, reached=note.reached
        )
        if creator is None:
            self.report_gap(
                "backward",
                "its forward ran before the trace began, or on another thread outside any "
                "module, so collectives that only autograd could attribute have no module",
            )
            return NO_MODULE
        return note.running if creator == NO_MODULE else creator

    def _caller_of_function(self, note: _Note) -> int:
        """The module that called the function that is being recomputed.

        An autograd node of the function belongs to a module inside it. The caller encloses that
        module, and issued a collective at the same line during forward.
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


def _reduces_gradients(cause: object) -> bool:
    """Whether FSDP reduces gradients; pipeline schedules let it do so after backward has ended."""
    return isinstance(cause, FullyShard) and cause.action != "unshard"


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
