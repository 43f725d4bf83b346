"""Recognises collectives that repeat, which a stream writes as short lines.

A training step issues its collectives in the same order again and again. What is expected after a
collective, because it came there before, is compared with what is issued: the op, the path through
the stack, the placements, the tensors, the module. If something differs, everything is read anew.
"""

from __future__ import annotations

import threading
import weakref
from threading import get_ident
from types import FrameType
from typing import Any, final

import torch

from shardscope._torch.autograd import (
    current_node,
    is_in_backward,
    next_sequence_number,
    node_origin,
)
from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import OpLayout, process_group
from shardscope._torch.frames import Role
from shardscope.attribution.call_paths import CallPath, make_path
from shardscope.attribution.call_sites import Stack, backward_caller, walk_stack
from shardscope.attribution.module_names import NO_MODULE
from shardscope.comm.collective_facts import Sizes, repeats_payload
from shardscope.comm.notes import Note, NoteTaker, find_phase
from shardscope.record import Collective, Phase
from shardscope.record.stream import CallTemplate

_MAX_TEMPLATES = 4096  # a program may never repeat a collective
_MAX_EXPECTED = 2  # after a collective

# What decides where a collective is issued, besides its path through the stack: the running module,
# the autograd node, the parameter whose gradient is accumulated, DDP's bucket, or nothing.
_MODULE, _NODE, _LEAF, _BUCKET, _NOTHING = range(5)
_ENGINE = Role.ENGINE


@final
class Template:
    """What collectives that repeat have in common: all but their positions, times and sizes."""

    __slots__ = (
        "expected",
        "facts",
        "in_stream",
        "is_in_backward",
        "layout",
        "leaf",
        "note",
        "num_bytes",
        "payload",
        "place",
        "record",
        "sizes",
        "trigger",
    )

    def __init__(
        self,
        note: Note,
        layout: OpLayout,
        trigger: int,
        facts: tuple[tuple[Any, ...], ...],
        record: Collective,
    ) -> None:
        self.note = note  # of the first of them
        self.layout = layout
        self.payload, self.sizes = note.payload, note.sizes
        self.trigger = trigger
        self.record = record
        self.num_bytes = record.input_bytes, record.output_bytes, record.wire_bytes
        self.in_stream = CallTemplate(record)
        self.facts = facts
        self.is_in_backward = is_in_backward()
        self.place = _find_place(note)
        self.leaf: weakref.ref[torch.Tensor] | None = None  # that completed the bucket last
        # What came after it before, newest first.
        self.expected: tuple[tuple[Template, CallPath], ...] = ()

    def expect(self, template: Template, path: CallPath) -> None:
        """Expect a collective after this one, as it has come there now."""
        others = [
            (known, known_path)
            for known, known_path in self.expected
            if known is not template or not known_path.is_same(path)
        ]
        self.expected = ((template, path), *others[: _MAX_EXPECTED - 1])


def _find_place(note: Note) -> int | None:
    """What decides where the collective of a note was issued; None if it takes more to tell."""
    boundary = note.stack.boundary
    if note.bucket is not None:
        is_reducers = note.stack.is_bare and note.bucket.bucket is not None
        return _BUCKET if is_reducers and note.node_number is None else None
    if boundary is Role.RECOMPUTE:
        return None
    if boundary is Role.OPTIMIZER:
        return _NOTHING
    if find_phase(boundary) is Phase.BACKWARD:
        if note.node_number is not None:
            return _NODE
        return _LEAF if note.stack.frame_locals and current_node() is not None else None
    # A compiled graph that no module has called may be in backward.
    is_compiled = boundary is Role.MODULE_CALL and note.running == NO_MODULE
    return None if is_compiled else _MODULE


class _Thread(threading.local):
    last: Template | None = None


@final
class RepeatFinder:
    """Finds what a collective that is about to be issued has in common with earlier ones."""

    def __init__(self, taker: NoteTaker) -> None:
        self._taker = taker
        self._templates: dict[Any, Template] = {}
        self._thread = _Thread()

    def find(
        self, event: CollectiveEvent, frame: FrameType | None, rank: int
    ) -> tuple[Template, Sizes]:
        """The template of a collective that is issued at `frame`, and its sizes."""
        thread = self._thread
        last = thread.last
        if last is not None:
            for template, path in last.expected:
                sizes = self._compare(template, path, event, frame)
                if sizes is not None:
                    thread.last = template
                    return template, sizes
        stack, outermost = walk_stack(frame)
        user = stack.user
        template, sizes = self.find_anew(event, stack, rank)
        if last is not None and template.place is not None:
            path_here = make_path(frame, outermost, stack, user)
            if path_here is not None:
                last.expect(template, path_here)
        thread.last = template
        return template, sizes

    def find_anew(self, event: CollectiveEvent, stack: Stack, rank: int) -> tuple[Template, Sizes]:
        """The template of a collective with this stack, and its sizes."""
        note = self._taker.take(event, stack, None)
        trigger = self._taker.find_trigger(note)
        facts = self._taker.causes.name_facts(stack)
        # Code objects hash by content, which is slow; the template keeps them alive.
        key = (
            note.payload,
            note.phase,
            trigger,
            note.node,
            note.bucket,
            note.thread,
            stack.boundary,
            stack.instruction,
            id(stack.user),
            id(stack.api),
            id(stack.graph),
            id(stack.asked_by),
            stack.is_bare,
            tuple(stack.frame_locals),
            facts,
        )
        template = self._templates.get(key)
        if template is None:
            record = self._taker.make_record(note, trigger, rank=rank)
            template = Template(note, event.layout, trigger, facts, record)
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[key] = template
        return template, note.sizes

    def _compare(
        self, template: Template, path: CallPath, event: CollectiveEvent, frame: FrameType | None
    ) -> Sizes | None:
        """The sizes of a collective that repeats `template`; None if it is another."""
        if event.layout is not template.layout:
            return None
        cause_locals = path.match(frame)
        if cause_locals is None:
            return None
        taker, known_group = self._taker, template.payload.group
        group = event.args[event.layout.group]
        name = group if type(group) is str else process_group(group).group_name
        if taker.groups.memberships.get(name) is not known_group:
            return None
        is_reducers = template.place == _BUCKET
        sizes = repeats_payload(event, template.payload, is_reducers=is_reducers)
        if sizes is None or is_in_backward() is not template.is_in_backward:
            return None
        if cause_locals and not taker.causes.has_facts(path.roles, cause_locals, template.facts):
            return None
        if template.place == _MODULE:
            is_here = taker.calls.running() == template.trigger
        else:
            is_here = template.place == _NOTHING or self._is_in_backward_of(template, path, sizes)
        return sizes if is_here else None

    def _is_in_backward_of(self, template: Template, path: CallPath, sizes: Sizes) -> bool:
        """Whether this is backward of the same node, leaf or bucket, called by the same line."""
        stack, thread = template.note.stack, get_ident()
        is_called_here = stack.boundary is _ENGINE
        if not is_called_here or not path.has_user:
            caller = backward_caller()
            if caller is None:
                return False
            if not path.has_user and (caller.user, caller.instruction) != (
                stack.user,
                stack.instruction,
            ):
                return False
            thread = thread if is_called_here else caller.thread
        node = current_node()
        origin = None if node is None else node_origin(node)
        if template.place == _BUCKET:
            return self._reduces_bucket(template, sizes, origin)
        if isinstance(origin, torch.Tensor):
            is_leaf = template.place == _LEAF
            return is_leaf and self._taker.names.owner_of(origin) == template.trigger
        if origin is None or template.place == _LEAF:
            return False
        if template.facts and node.name() != template.note.node:
            return False
        reached = next_sequence_number() if thread == get_ident() else None
        return self._taker.find_creator(origin, thread, reached) == template.trigger

    def _reduces_bucket(
        self, template: Template, sizes: Sizes, origin: torch.Tensor | int | None
    ) -> bool:
        """Whether DDP reduces the same bucket, by the leaf that completed it; None at the end."""
        bucket, dtype = template.note.bucket, template.payload.torch_dtype
        assert bucket is not None
        assert dtype is not None
        if isinstance(origin, int):
            return False
        if origin is None:
            is_here = template.trigger == NO_MODULE
        else:
            is_here = template.leaf is not None and template.leaf() is origin
            if not is_here and self._taker.names.owner_of(origin) == template.trigger:
                is_here, template.leaf = True, weakref.ref(origin)
        num_elements = sizes[0] // dtype.itemsize
        return is_here and self._taker.buckets.repeats(bucket, num_elements, origin)
