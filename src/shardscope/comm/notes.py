"""What is noted of a collective when it is issued, and the record that is made of it.

A note has the call site, the phase, and the running module or autograd node. The record also has
the cause, and the module that created the node.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from threading import get_ident
from types import CodeType
from typing import Protocol, final

import torch

from shardscope._torch.autograd import (
    current_node,
    is_in_backward,
    next_sequence_number,
    node_number,
    node_origin,
    reentrant_nodes,
)
from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import process_group
from shardscope._torch.ddp import is_in_comm_hook
from shardscope._torch.frames import Role
from shardscope.attribution.call_sites import Stack, find_backward_caller, thread_name
from shardscope.attribution.module_calls import BucketRegistry, ModuleCalls, common_module
from shardscope.attribution.module_names import NO_MODULE, ModuleNames
from shardscope.comm.collective_facts import (
    CauseReader,
    GroupRegistry,
    Membership,
    Payload,
    Sizes,
    find_cause,
    read_payload,
)
from shardscope.record import (
    BucketReduce,
    Cause,
    Collective,
    CollectiveKind,
    Compiled,
    FullyShard,
    Group,
    Phase,
)

_MAIN_THREAD = threading.main_thread().ident
_COMPILED_FUNCTION = "compiled function"


@final
class Note:
    """What is noted of a collective when it is issued, without references to tensors."""

    payload: Payload
    sizes: Sizes
    stack: Stack
    phase: Phase
    start_ns: int | None
    # Class attributes as defaults: most notes set few of them.
    thread = ""
    running = NO_MODULE
    node: str | None = None
    node_number: int | None = None
    reached: int | None = None  # next autograd number, if this thread called backward
    bucket: BucketReduce | None = None
    returned_ns: int | None = None


class Reporter(Protocol):
    """Takes gaps and groups."""

    def report_gap(self, place: str, fact: str) -> None:
        """Add a gap, unless the same gap was added before."""

    def emit_group(self, group: Group) -> None:
        """A collective is the first in this group."""


@final
class NoteTaker:
    """Takes notes of collectives as they are issued, and makes records of notes."""

    def __init__(self, names: ModuleNames, groups: GroupRegistry, reporter: Reporter) -> None:
        self.names = names
        self.groups = groups
        self.buckets = BucketRegistry(names, reporter.report_gap)
        self.calls = ModuleCalls(names, self.buckets, reporter.report_gap)
        self.causes = CauseReader(names, self.calls.running)
        self._reporter = reporter
        self._lock = threading.RLock()  # of new groups
        # By line of a forward: the modules that issued a collective there, by name.
        self._issuers: defaultdict[tuple[CodeType | None, int], dict[str | None, int]]
        self._issuers = defaultdict(dict)
        self._has_compiled_function = False

    # ── While a collective is issued ─────────────────────────────────────────────────────────

    def take(self, event: CollectiveEvent, stack: Stack, start_ns: int | None) -> Note:
        """The note of a collective that was issued with this stack."""
        note = Note()
        boundary = stack.boundary
        phase = find_phase(boundary)
        if phase is _BACKWARD and (stack.user is None or not stack.backward_caller):
            find_backward_caller(stack)
        group = self.find_group(event, stack)
        if stack.frame_locals:
            self.causes.read(stack)
        note.payload, note.sizes = read_payload(event, group, stack)
        stack.reducing = None  # a frame
        note.stack, note.phase, note.start_ns = stack, phase, start_ns
        if get_ident() != _MAIN_THREAD:
            note.thread = thread_name()
        if phase is _BACKWARD:
            self._note_node(note, event)
        elif boundary is Role.RECOMPUTE:
            note.running = self.calls.recomputing()
        elif phase is not _OPTIMIZER:
            note.running = self.calls.running()
            if note.running == NO_MODULE and boundary is Role.MODULE_CALL:
                # Only a compiled graph was called, which is not a module of the model.
                note.phase = _BACKWARD if is_in_backward() else _OUTSIDE
                if note.phase is _BACKWARD:
                    self._note_node(note, event)
            if note.phase is _OUTSIDE and stack.graph is not None:
                note.phase = _FORWARD  # of a compiled function that may have called modules
        return note

    def find_group(self, event: CollectiveEvent, stack: Stack) -> Membership:
        """This rank's membership of the group, read now: the run may destroy the group later."""
        group = event.args[event.layout.group]
        # Functional collectives take a group's name.
        name = group if type(group) is str else process_group(group).group_name
        membership = self.groups.memberships.get(name)
        if membership is not None:
            return membership
        with self._lock:
            membership = self.groups.memberships.get(name)
            if membership is None:  # another thread has not added it in between
                if Role.REDISTRIBUTE in stack.frame_locals:
                    self.groups.add_mesh(stack.frame_locals[Role.REDISTRIBUTE][0].mesh)
                membership = self.groups.register(process_group(group))
                self._reporter.emit_group(membership.record)
        return membership

    def _note_node(self, note: Note, event: CollectiveEvent) -> None:
        node = current_node()
        if node is None:  # a callback at the end of backward
            if note.stack.is_bare:
                self._note_bucket(note, event, None)
            return
        origin = node_origin(node)
        if isinstance(origin, torch.Tensor):
            note.running = self.names.owner_of(origin)
            self._note_bucket(note, event, origin)
        else:
            note.node_number = origin
            if note.stack.backward_caller == get_ident():
                note.reached = next_sequence_number()
            if note.stack.is_nested:
                note.running = self._recomputed_by()
            if note.stack.frame_locals:
                note.node = node.name()

    def _note_bucket(self, note: Note, event: CollectiveEvent, last: torch.Tensor | None) -> None:
        """Note the DDP bucket that is reduced because the gradient of `last` completed it.

        `last` is None at the end of backward, where DDP reduces the remaining buckets.
        """
        if note.stack.frame_locals or event.layout.kind is not CollectiveKind.ALL_REDUCE:
            return
        if not note.stack.is_bare and not is_in_comm_hook(sys._getframe()):
            return  # issued by a gradient hook of the user
        tensors = event.read().inputs
        if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            return  # DDP's bitmap of used parameters
        note.bucket = self.buckets.find(sum(tensor.numel() for tensor in tensors), last)
        if note.bucket is None and note.stack.is_bare:
            note.bucket = BucketReduce(bucket=None, parameters=())
            self._reporter.report_gap(
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

    # ── Records ──────────────────────────────────────────────────────────────────────────────

    def find_trigger(self, note: Note) -> int:
        """The module that was running when the collective was issued."""
        if note.stack.boundary is Role.RECOMPUTE:
            return self._caller_of_function(note)
        if note.node_number is None:
            return note.running
        creator = self.find_creator(note.node_number, note.stack.backward_caller, note.reached)
        return note.running if creator == NO_MODULE else creator

    def find_creator(self, number: int, backward_caller: int, reached: int | None) -> int:
        """The module that created the autograd node with this number, or NO_MODULE."""
        creator = self.calls.creator_of(number, backward_caller, reached=reached)
        if creator is None:
            self._reporter.report_gap(
                "backward",
                "its forward ran before the trace began, or on another thread outside any "
                "module, so collectives that only autograd could attribute have no module",
            )
            return NO_MODULE
        return creator

    def _caller_of_function(self, note: Note) -> int:
        """The module that called the function that is being recomputed.

        An autograd node of the function belongs to a module inside it. The caller encloses that
        module, and issued a collective at the same line during forward.
        """
        index = note.running
        name = self.names.name(index)
        issuers = self._issuers.get((note.stack.user, note.stack.instruction), {})
        while name and name not in issuers:
            name = name.rpartition(".")[0]
        return issuers.get(name, index)

    def make_record(self, note: Note, trigger: int, *, rank: int) -> Collective:
        """The record of a note, without its positions and times."""
        stack, payload = note.stack, note.payload
        cause, owner = find_cause(payload, stack, note.node, note.phase)
        cause = note.bucket or cause
        if note.phase is _FORWARD:
            self._issuers[stack.user, stack.instruction][self.names.name(trigger)] = trigger
        if isinstance(cause, Compiled) and trigger == NO_MODULE and self.names.names:
            self._report_compiled_function(cause, stack)
        group = payload.group.record
        input_bytes, output_bytes, wire_bytes = payload.compute_bytes(note.sizes)
        return Collective(
            rank=rank,
            order=0,
            group=group.name,
            group_order=0,
            kind=payload.kind,
            op=payload.op,
            num_ranks=group.num_ranks,
            axis=group.axis,
            dtype=payload.dtype,
            num_tensors=payload.num_tensors,
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            wire_bytes=wire_bytes,
            phase=_BACKWARD if _reduces_gradients(cause) else note.phase,
            owner=_owner_name(cause, self.names.name(trigger if owner is None else owner)),
            trigger=self.names.name(trigger),
            cause=cause,
            source=stack.source,
            reduce_op=payload.reduce_op,
            peer=payload.global_peer,
            thread=note.thread,
        )

    def _report_compiled_function(self, cause: Compiled, stack: Stack) -> None:
        """Report a gap, once per line: the collectives of a compiled function have no module."""
        if cause.graph == "backward" and self._has_compiled_function:
            return  # its line is that of backward(); the function itself is reported already
        self._has_compiled_function = True
        source = stack.source
        line = "" if source is None else f" ({source.file}:{source.line})"
        self._reporter.report_gap(
            _COMPILED_FUNCTION,
            f"its collectives have no module{line}: compile the model or its layers, not a "
            "function that calls them, to see which module issues them",
        )


_PHASES = {
    Role.OPTIMIZER: Phase.OPTIMIZER,
    Role.RECOMPUTE: Phase.RECOMPUTE,
    Role.ENGINE: Phase.BACKWARD,
}
_BACKWARD, _FORWARD, _RECOMPUTE, _OPTIMIZER, _OUTSIDE = (
    Phase.BACKWARD,
    Phase.FORWARD,
    Phase.RECOMPUTE,
    Phase.OPTIMIZER,
    Phase.OUTSIDE,
)


def find_phase(boundary: Role | None) -> Phase:
    """The phase at a boundary of the stack."""
    phase = _PHASES.get(boundary)  # type: ignore[arg-type]
    if phase is not None:
        return phase
    is_backward = is_in_backward()
    if boundary is None:
        return _BACKWARD if is_backward else _OUTSIDE
    return _RECOMPUTE if is_backward else _FORWARD


def _reduces_gradients(cause: object) -> bool:
    """Whether FSDP reduces gradients; pipeline schedules let it do so after backward has ended."""
    return isinstance(cause, FullyShard) and cause.action != "unshard"


def _owner_name(cause: Cause | None, owner: str | None) -> str | None:
    if isinstance(cause, BucketReduce) and cause.parameters:
        return common_module(cause.parameters)
    return owner
