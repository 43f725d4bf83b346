"""Call sites: the user's source line, the phase and the cause, read from the Python stack or
from a graph node.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
from functools import lru_cache
from pathlib import Path, PurePath
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple, final

import torch

from shardscope._torch import spmd_types
from shardscope._torch.autograd import NO_GRAPH_TASK, current_graph_task, is_in_backward
from shardscope._torch.frames import COMPILED_MODULES, LOCALS_BY_ROLE, Role, find_roles
from shardscope.record import Source, replace_surrogates

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_TORCH_LIBRARY = os.path.join(TORCH_FOLDER, "_library") + os.sep  # what calls registered ops
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_GENERATED = ("<eval_with_key>", "<frozen ", "<attrs ", "<torch_package")
# Files whose frames are between a caller and the function it called, and show neither.
_WRAPPER_FILES = (
    "c10d_logger.py",
    "_contextlib.py",
    "module.py",
    "function.py",
    "_tensor.py",
    "_ops.py",
    "_compile.py",
    os.path.join("checkpoint", "logger.py"),
    os.path.join("_dynamo", "eval_frame.py"),  # functions that dynamo leaves out
)
# torch marks functions as deprecated with typing_extensions, which is not part of torch.
_WRAPPERS = ("typing_extensions.py",)
# Methods of modes and tensor subclasses: user code, but not the caller of the op.
_DISPATCH_METHODS = ("__torch_dispatch__", "__torch_function__")
_USER, _API, _GRAPH, _OTHER, _BOUNDARY, _EXPLICIT, _CAUSE, _END = range(8)
# The values of `__frames__`, by which a module of ours sets the kind of its own frames.
_OWN_KINDS = {"user's": _USER, "torch's": _API, "outermost": _END}
_ROLE_KINDS = {
    Role.MODULE_CALL: _BOUNDARY,
    Role.ENGINE: _BOUNDARY,
    Role.OPTIMIZER: _BOUNDARY,
    Role.RECOMPUTE: _BOUNDARY,
    Role.EXPLICIT: _EXPLICIT,
}

_REDUCTION, _ENGINE, _RECOMPUTE = Role.REDUCTION, Role.ENGINE, Role.RECOMPUTE
_SPMD = (Role.SPMD_CALL, Role.SPMD_BACKWARD)

_NOTHING: dict[Role, tuple[Any, ...]] = {}

# By the id of a code object; the entry holds the object, so that its id is not reused.
_frame_kinds: dict[int, tuple[int, Role | None, CodeType]] = {}
_roles = find_roles()
_sources: dict[tuple[int, int], Source] = {}


@final
class Stack:
    """What a walk of the Python stack found: the user's line, the boundary and the cause.

    `frame_locals` has, by role, the locals of torch's frames from which the cause is read.
    """

    # Class attributes as defaults: most stacks set few of them, and a walk should be cheap.
    boundary: Role | None = None
    user: CodeType | None = None
    instruction = 0  # bytecode offset in the user's code; the line is looked up when needed
    api: CodeType | None = None
    graph: CodeType | None = None
    asked_by: CodeType | None = None
    backward_caller = 0  # thread that called backward, if the autograd engine is running
    is_bare = False  # whether the autograd engine, or one of its threads, called from C++
    is_nested = False  # whether a recomputed function is in its own backward
    reducing: FrameType | None = None  # a function of torch.distributed with a reduction `op`
    frame_locals: dict[Role, tuple[Any, ...]] = _NOTHING
    has_facts = False  # whether `frame_locals` are plain facts, without references to tensors

    @property
    def source(self) -> Source | None:
        """The user's line."""
        return None if self.user is None else _source_at(self.user, self.instruction)


def read_stack(frame: FrameType | None) -> Stack:
    """Walk the stack outwards from `frame` to the user's line, its boundary and the cause."""
    return walk_stack(frame)[0]


def walk_stack(frame: FrameType | None) -> tuple[Stack, FrameType | None]:
    """The stack at `frame`, and the outermost frame that was looked at; None if all were."""
    stack = Stack()
    boundary: Role | None = None
    user: CodeType | None = None
    api: CodeType | None = None
    known_kind = _frame_kinds.get
    while frame is not None:
        code = frame.f_code
        kind, role, _ = known_kind(id(code)) or _classify_frame(frame)
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
                _read_cause(stack, kind, role, frame, user)
                if role == _REDUCTION and user is None:
                    api = code
        frame = frame.f_back
    else:
        stack.is_bare = user is None and boundary is None and api is None
    stack.user = user
    stack.boundary = boundary
    stack.api = api
    return stack, frame


def _is_nested(engine: FrameType) -> bool:
    caller = engine.f_back and engine.f_back.f_back
    return caller is not None and _roles.get(id(caller.f_code)) == _RECOMPUTE


def _read_cause(
    stack: Stack, kind: int, role: Role | None, frame: FrameType, user: CodeType | None
) -> None:
    """Store what a frame shows of the cause: its code, or the locals named in `LOCALS_BY_ROLE`."""
    if kind == _EXPLICIT:
        stack.asked_by = frame.f_code
    elif kind == _GRAPH:
        if user is None and stack.graph is None:
            stack.graph = frame.f_code
    elif role == _REDUCTION:
        stack.reducing = frame
    elif role in _SPMD:
        if user is None:
            _read_spmd_types(stack, role, frame)
    elif role is not None and role not in stack.frame_locals:
        frame_locals = frame.f_locals
        values = tuple([frame_locals[name] for name in LOCALS_BY_ROLE[role]])
        if stack.frame_locals is _NOTHING:
            stack.frame_locals = {}
        stack.frame_locals[role] = values


def _read_spmd_types(stack: Stack, role: Role, frame: FrameType) -> None:
    """Store the call of spmd_types: the outermost, as redistribute() calls all_gather()."""
    values: tuple[str, ...] | None = (spmd_types.name_forward(frame.f_code),)
    if role is Role.SPMD_CALL:
        types = spmd_types.read_types(frame.f_locals["src"], frame.f_locals["dst"])
        values = None if types is None else (frame.f_code.co_name, *types)
    if values is not None:
        stack.frame_locals = {**stack.frame_locals, role: values}


class BackwardCaller(NamedTuple):
    """The thread that called backward, and its line there."""

    thread: int
    user: CodeType | None
    instruction: int


# Of the last backward, with its number: a caller waits in the same place until backward is over.
_last_caller: tuple[int, BackwardCaller | None] = NO_GRAPH_TASK, None


def find_backward_caller(stack: Stack) -> None:
    """On a thread of the autograd engine, find the line and the thread that called backward.

    If several threads are in backward, the caller of this one cannot be determined.
    """
    caller = backward_caller()
    if caller is not None:
        # A backward within backward (checkpointing) was called from this same thread.
        stack.backward_caller = stack.backward_caller or caller.thread
        if stack.user is None:
            stack.user, stack.instruction = caller.user, caller.instruction


def backward_caller() -> BackwardCaller | None:
    """Who called the backward that is running on this thread; None if that is not certain."""
    global _last_caller
    task = current_graph_task()
    known_task, caller = _last_caller
    if caller is None or known_task != task or task == NO_GRAPH_TASK:
        caller = _find_caller()
        _last_caller = task, caller
    return caller


def _find_caller() -> BackwardCaller | None:
    own = get_ident()
    callers = []
    for thread, frame in sys._current_frames().items():
        outer: FrameType | None = None if thread == own else frame
        while outer is not None and _roles.get(id(outer.f_code)) != _ENGINE:
            outer = outer.f_back
        if outer is not None:
            callers.append((thread, outer))
    if len(callers) != 1:
        return None
    thread, engine = callers[0]
    stack = read_stack(engine)
    return BackwardCaller(thread, stack.user, stack.instruction)


def is_called_by_torch(frame: FrameType | None) -> bool:
    """Whether torch, and not the user, called the function of this package at `frame`."""
    while frame is not None:
        kind, _, code = _frame_kinds.get(id(frame.f_code)) or _classify_frame(frame)
        if not code.co_filename.startswith(_OURS):
            return kind != _USER
        frame = frame.f_back
    return True


def _classify_frame(frame: FrameType) -> tuple[int, Role | None, CodeType]:
    code = frame.f_code
    role = _roles.get(id(code))
    if role is not None:
        kind = _ROLE_KINDS.get(role, _CAUSE)
    elif code.co_name in _DISPATCH_METHODS:
        kind = _OTHER
    elif (module := str(frame.f_globals.get("__name__"))).startswith(COMPILED_MODULES):
        kind = _GRAPH
    elif module.partition(".")[0] == spmd_types.PACKAGE:
        kind, role = _classify_spmd_types(code)
    elif code.co_filename.startswith(_OURS):
        kind = _OWN_KINDS.get(frame.f_globals.get("__frames__", ""), _OTHER)
    else:
        kind = _classify_file(code.co_filename)
    _frame_kinds[id(code)] = entry = (kind, role, code)
    return entry


def _classify_spmd_types(code: CodeType) -> tuple[int, Role | None]:
    if spmd_types.is_frame_of_call(code):
        return _CAUSE, Role.SPMD_CALL
    return (_CAUSE, Role.SPMD_BACKWARD) if spmd_types.is_frame_of_backward(code) else (_OTHER, None)


def _classify_file(filename: str) -> int:
    if filename.startswith("<eval_with_key>"):
        return _GRAPH
    if filename.startswith(_TORCH_LIBRARY) or filename.endswith(_WRAPPERS):
        return _OTHER
    if filename.startswith(TORCH_FOLDER):
        return _OTHER if filename.endswith(_WRAPPER_FILES) else _API
    if filename.startswith(_GENERATED):
        return _OTHER
    is_stdlib = filename.startswith(_STDLIB) and "site-packages" not in filename
    return _OTHER if is_stdlib else _USER


def _source_at(code: CodeType, instruction: int) -> Source:
    """The record of the line of an instruction, with its text."""
    source = _sources.get((id(code), instruction))
    if source is None:
        file, line = code.co_filename, _line_of(code, instruction)
        linecache.checkcache(file)  # the file may have changed since it was cached
        text = linecache.getline(file, line).strip()[:200]
        shown = replace_surrogates(shown_path(file))
        source = Source(file=shown, line=line, function=code.co_qualname, text=text)
        _sources[id(code), instruction] = source
    return source


def _line_of(code: CodeType, instruction: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or code.co_firstlineno


def _working_directory() -> str:
    try:
        return os.getcwd() + os.sep
    except OSError:  # it has been deleted
        return os.sep * 2


def shown_path(file: str) -> str:
    """A path relative to the working directory or the packages folder, if it is inside one."""
    for folder in (_working_directory(), os.path.dirname(_OURS.rstrip(os.sep)) + os.sep):
        if file.startswith(folder):
            return file.removeprefix(folder)
    return file.rpartition(f"site-packages{os.sep}")[2]


_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)\n(?P<code>[^\n]*)',
    re.M,
)


@lru_cache(maxsize=4096)
def user_line(stack_trace: str) -> str:
    """`model.py:12: h = self.up(x)` of the innermost frame that is not torch's or ours, or ""."""
    frame = _find_frame(stack_trace)
    if frame is None:
        return ""
    code = frame["code"].strip()
    return f"{PurePath(frame['file']).name}:{frame['line']}{': ' if code else ''}{code}"


@lru_cache(maxsize=4096)
def user_source(stack_trace: str) -> Source | None:
    """The line that `user_line` names, as a record; None if there is no frame."""
    frame = _find_frame(stack_trace)
    if frame is None:
        return None
    return Source(
        file=replace_surrogates(shown_path(frame["file"])),
        line=int(frame["line"]),
        function=frame["function"].strip(),
        text=replace_surrogates(frame["code"].strip()[:200]),
    )


def _find_frame(stack_trace: str) -> re.Match[str] | None:
    frames = list(_FRAME.finditer(stack_trace))
    own = [frame for frame in frames if not _is_foreign(frame["file"])]
    return (own or frames)[-1] if frames else None


def _is_foreign(file: str) -> bool:
    """Whether a file belongs to torch or to this package, not to the user."""
    is_torchs = "/torch/" in file.replace("\\", "/") and "site-packages" in file
    return is_torchs or file.startswith(_OURS)


_MAIN_THREAD = threading.main_thread().ident


def thread_name() -> str:
    """The name of the current thread; empty for the main thread."""
    identity = get_ident()
    if identity == _MAIN_THREAD:
        return ""
    # Not current_thread(): it would register an object for a thread that C++ started.
    named = (thread.name for thread in threading.enumerate() if thread.ident == identity)
    return next(named, "autograd" if is_in_backward() else "unnamed")
