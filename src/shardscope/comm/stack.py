"""One walk up the Python stack at the moment of a collective: whose line, which phase, what cause.

The walk ends at the first boundary (a module call, the autograd engine, an optimizer step) once
the user's line is known, so its length does not grow with the depth of the model. It only points
at what it finds; names, lines and texts are looked up when the record is written.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, final

import torch

from shardscope._torch.frames import COMPILED_MODULES, WITNESSES, Role, find_roles
from shardscope.record import Source, replace_surrogates

__all__ = [
    "TORCH_FOLDER",
    "Stack",
    "find_backward_caller",
    "is_called_by_torch",
    "read_stack",
    "shown_path",
]

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_TORCH_LIBRARY = os.path.join(TORCH_FOLDER, "_library") + os.sep  # what calls registered ops
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_GENERATED = ("<eval_with_key>", "<frozen ", "<attrs ", "<torch_package")
# Frames that stand between a caller and the function they called, and say nothing of either.
_MACHINERY = (
    "c10d_logger.py",
    "_contextlib.py",
    "module.py",
    "function.py",
    "_tensor.py",
    "_ops.py",
    "_compile.py",
    os.path.join("checkpoint", "logger.py"),
)
# torch marks functions as deprecated with a package that is not its own.
_WRAPPERS = ("typing_extensions.py",)
# What modes and tensor subclasses are called by: the user's, but not who asked.
_PASSING_ON = ("__torch_dispatch__", "__torch_function__")
_USER, _API, _GRAPH, _OTHER, _BOUNDARY, _EXPLICIT, _CAUSE, _END = range(8)
# What a module of ours may say of its own functions, as `__frames__`; of the rest nobody need know.
_OWN_KINDS = {"user's": _USER, "torch's": _API, "outermost": _END}
_ROLE_KINDS = {
    Role.MODULE_CALL: _BOUNDARY,
    Role.ENGINE: _BOUNDARY,
    Role.OPTIMIZER: _BOUNDARY,
    Role.RECOMPUTE: _BOUNDARY,
    Role.EXPLICIT: _EXPLICIT,
}

_REDUCTION, _ENGINE, _RECOMPUTE = Role.REDUCTION, Role.ENGINE, Role.RECOMPUTE

_NOTHING: dict[Role, tuple[Any, ...]] = {}

# By the identity of a code object, with the object itself, which keeps its identity its own.
_facts: dict[int, tuple[int, Role | None, CodeType]] = {}
_roles = find_roles()
_sources: dict[tuple[int, int], Source] = {}


@final
class Stack:
    """What the frames said; causes as the few locals of a frame that tell them."""

    # Defaults of the class: most stacks say little, and a walk should cost little.
    boundary: Role | None = None
    user: CodeType | None = None
    instruction = 0  # where in the user's code; the line is looked up when it is wanted
    api: CodeType | None = None
    graph: CodeType | None = None
    asked_by: CodeType | None = None
    backward_caller = 0  # thread that called backward, where the engine is at work
    is_bare = False  # whether the engine, or a thread of its own, called from C++
    is_nested = False  # whether a recomputed function is in its own backward
    reduction: Any = None
    held: dict[Role, tuple[Any, ...]] = _NOTHING

    @property
    def source(self) -> Source | None:
        """The user's line."""
        return None if self.user is None else _source_at(self.user, self.instruction)


def read_stack(frame: FrameType | None) -> Stack:
    """Walk outwards from `frame`."""
    stack = Stack()
    boundary: Role | None = None
    user: CodeType | None = None
    api: CodeType | None = None
    learnt = _facts.get
    while frame is not None:
        code = frame.f_code
        kind, role, _ = learnt(id(code)) or _learn(frame)
        if kind == _OTHER:
            pass
        elif kind == _API:
            if user is None and boundary is None:
                api = code
        elif kind == _USER:
            if user is None:
                user = code
                stack.instruction = frame.f_lasti
                if boundary is not None:
                    break
        elif kind == _END:
            break
        elif boundary is None:
            if kind == _BOUNDARY:
                boundary = role
                if role == _ENGINE:
                    stack.is_bare = user is None and api is None
                    stack.is_nested = _is_nested(frame)
                    stack.backward_caller = get_ident()
                if user is not None:
                    break
            else:
                _meet(stack, kind, role, frame, user)
                if role == _REDUCTION and user is None:
                    api = code
        frame = frame.f_back
    else:
        stack.is_bare = user is None and boundary is None and api is None
    stack.user = user
    stack.boundary = boundary
    stack.api = api
    return stack


def _is_nested(engine: FrameType) -> bool:
    caller = engine.f_back and engine.f_back.f_back
    return caller is not None and _roles.get(id(caller.f_code)) == _RECOMPUTE


def _meet(
    stack: Stack, kind: int, role: Role | None, frame: FrameType, user: CodeType | None
) -> None:
    """A frame that tells something of the cause. Of its locals the few that say it are kept."""
    if kind == _EXPLICIT:
        stack.asked_by = frame.f_code
    elif kind == _GRAPH:
        if user is None and stack.graph is None:
            stack.graph = frame.f_code
    elif role == _REDUCTION:
        stack.reduction = frame.f_locals["op"]
    elif role is not None and role not in stack.held:
        known = frame.f_locals
        told = tuple([known[name] for name in WITNESSES[role]])
        if stack.held is _NOTHING:
            stack.held = {}
        stack.held[role] = told


def find_backward_caller(stack: Stack) -> None:
    """On a thread of the engine's own, look for the line and the thread that called backward.

    Where several threads are in backward, which of them called this one is not to be known.
    """
    own = get_ident()
    callers = []
    for thread, frame in sys._current_frames().items():
        outer: FrameType | None = None if thread == own else frame
        while outer is not None and _roles.get(id(outer.f_code)) != _ENGINE:
            outer = outer.f_back
        if outer is not None:
            callers.append((thread, outer))
    if len(callers) == 1:
        thread, engine = callers[0]
        # A backward within backward, as checkpointing makes, was called from its own thread.
        stack.backward_caller = stack.backward_caller or thread
        if stack.user is None:
            caller = read_stack(engine)
            stack.user, stack.instruction = caller.user, caller.instruction


def is_called_by_torch(frame: FrameType | None) -> bool:
    """Whether it is torch that called what of ours `frame` belongs to, not the user."""
    while frame is not None:
        kind, _, code = _facts.get(id(frame.f_code)) or _learn(frame)
        if not code.co_filename.startswith(_OURS):
            return kind != _USER
        frame = frame.f_back
    return True


def _learn(frame: FrameType) -> tuple[int, Role | None, CodeType]:
    code = frame.f_code
    role = _roles.get(id(code))
    if role is not None:
        kind = _ROLE_KINDS.get(role, _CAUSE)
    elif code.co_name in _PASSING_ON:
        kind = _OTHER
    elif str(frame.f_globals.get("__name__")).startswith(COMPILED_MODULES):
        kind = _GRAPH
    elif code.co_filename.startswith(_OURS):
        kind = _OWN_KINDS.get(frame.f_globals.get("__frames__", ""), _OTHER)
    else:
        kind = _classify(code.co_filename)
    _facts[id(code)] = fact = (kind, role, code)
    return fact


def _classify(filename: str) -> int:
    if filename.startswith("<eval_with_key>"):
        return _GRAPH
    if filename.startswith(_TORCH_LIBRARY) or filename.endswith(_WRAPPERS):
        return _OTHER
    if filename.startswith(TORCH_FOLDER):
        return _OTHER if filename.endswith(_MACHINERY) else _API
    if filename.startswith(_GENERATED):
        return _OTHER
    is_stdlib = filename.startswith(_STDLIB) and "site-packages" not in filename
    return _OTHER if is_stdlib else _USER


def _source_at(code: CodeType, instruction: int) -> Source:
    """The record of the line of an instruction, with its text."""
    known = _sources.get((id(code), instruction))
    if known is None:
        file, line = code.co_filename, _line_of(code, instruction)
        linecache.checkcache(file)  # it may have been read before it was last written
        text = linecache.getline(file, line).strip()[:200]
        shown = replace_surrogates(shown_path(file))
        known = Source(file=shown, line=line, function=code.co_qualname, text=text)
        _sources[id(code), instruction] = known
    return known


def _line_of(code: CodeType, instruction: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or code.co_firstlineno


def _working_directory() -> str:
    try:
        return os.getcwd() + os.sep
    except OSError:  # it has been deleted
        return os.sep * 2


def shown_path(file: str) -> str:
    """Relative to the working directory, or to the folder of packages, where that is shorter."""
    for folder in (_working_directory(), os.path.dirname(_OURS.rstrip(os.sep)) + os.sep):
        if file.startswith(folder):
            return file.removeprefix(folder)
    return file.rpartition(f"site-packages{os.sep}")[2]
