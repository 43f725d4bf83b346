"""What dynamo does while it compiles, told as it happens.

Its own methods are wrapped where it says something: where it takes up a function, where a trace
stops, where a guard failed and where a graph goes to the backend. Unlike a handler of its
structured log, that costs next to nothing: no graph is printed that nobody reads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, Protocol

from torch import fx

from shardscope._torch.private import find_exception, find_name, require

__all__ = ["CompileWatcher", "FrameEnd", "Line", "Stop", "watch_compiles"]

convert_frame = find_name("torch._dynamo.convert_frame", "observe what dynamo compiles")
Unsupported = find_exception(
    "torch._dynamo.exc.Unsupported", "recognise functions that dynamo does not compile"
)
UserError = find_exception(
    "torch._dynamo.exc.UserError", "recognise functions that dynamo does not compile"
)
OutputGraph = find_name(
    "torch._dynamo.output_graph.OutputGraph", "observe the graphs that dynamo passes to a backend"
)
InstructionTranslatorBase = find_name(
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase", "observe graph breaks"
)
CompileContext = find_name("torch._guards.CompileContext", "distinguish compiling from running")

_WRAPPED = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")
_LIMIT = "Dynamo recompile limit exceeded"


@dataclass(frozen=True, slots=True)
class Line:
    """A line on a stack."""

    file: str
    line: int
    function: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a trace stopped; the stack begins at the function that was being compiled."""

    kind: str  # dynamo's name for the last thing that went wrong
    message: str
    stack: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class FrameEnd:
    """What became of a function that dynamo took up."""

    is_compiled: bool
    compile_id: str = ""
    stop: Stop | None = None  # that it was given up for
    is_at_limit: bool = False  # it had been recompiled too often
    guards: tuple[str, ...] = ()
    error: BaseException | None = None
    backend: Any = None  # that its graphs are for


class CompileWatcher(Protocol):
    """Someone who wants to know what is compiled. Compilations may nest."""

    has_guards: bool

    def begin_frame(self, code: CodeType, caller: FrameType | None, scope: dict[str, Any]) -> None:
        """Dynamo takes up a function, which `caller` calls; `scope` are its globals."""

    def end_frame(self, end: FrameEnd) -> None:
        """It is done with the function that it took up last."""

    def see_stop(self, stop: Stop) -> None:
        """The trace of it stopped."""

    def see_recompile(self, reasons: Sequence[str], values: Mapping[str, Any]) -> None:
        """It had been compiled, for other guards; `values` are its arguments now."""

    def see_graph(self, graph: fx.GraphModule, compile_id: str) -> None:
        """A graph of it goes to the backend."""

    def fail(self, error: Exception) -> None:
        """One of the above raised."""


_watchers: tuple[CompileWatcher, ...] = ()
_installed: ExitStack | None = None
_lock = threading.RLock()


@contextmanager
def watch_compiles(watcher: CompileWatcher) -> Iterator[None]:
    """Tell `watcher` of every compilation of this process until the context ends."""
    global _installed, _watchers
    with _lock:
        _installed = _installed or _install()
        _watchers = (*_watchers, watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(one for one in _watchers if one is not watcher)
            if not _watchers and _installed is not None:
                installed, _installed = _installed, None
                installed.close()


def _tell(tell: Callable[[CompileWatcher], None]) -> None:
    for watcher in _watchers:
        try:
            tell(watcher)
        except Exception as error:  # noqa: BLE001 - who watches must not stop the compiler
            watcher.fail(error)


def _install() -> ExitStack:
    require(convert_frame, InstructionTranslatorBase, OutputGraph, CompileContext)
    with ExitStack() as stack:
        for holder, name, wrap in (
            (convert_frame.ConvertFrameAssert, "__call__", _wrap_conversion),
            (InstructionTranslatorBase, "log_graph_break", _wrap_break),
            (OutputGraph, "call_user_compiler", _wrap_backend),
            (convert_frame, "get_and_maybe_log_recompilation_reasons", _wrap_reasons),
        ):
            original = getattr(holder, name)
            setattr(holder, name, wrap(original))
            stack.callback(setattr, holder, name, original)
        return stack.pop_all()


def _wrap_conversion(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        _tell(lambda watcher: watcher.begin_frame(frame.f_code, caller, frame.f_globals))
        end = FrameEnd(is_compiled=False)
        try:
            result = original(self, frame, *args, **kwargs)
            end = _read_result(result)
            return result
        except BaseException as error:
            end = _read_error(error, is_fatal=self._one_graph)
            raise
        finally:
            end = replace(end, backend=_find_backend(self))
            _tell(lambda watcher: watcher.end_frame(end))

    return convert


def _find_backend(converter: Any) -> Any:
    """What the user gave torch.compile, under all that torch puts around it."""
    found = converter
    while True:
        inner = next((getattr(found, name) for name in _WRAPPED if hasattr(found, name)), None)
        if inner is None:
            return found
        found = inner


def _read_result(result: Any) -> FrameEnd:
    code = result.guarded_code
    if code is None:
        return FrameEnd(is_compiled=False)
    wanted = any(watcher.has_guards for watcher in _watchers)
    guards = tuple(code.guard_manager.code_parts) if wanted else ()
    return FrameEnd(is_compiled=True, compile_id=str(code.compile_id), guards=guards)


def _read_error(error: BaseException, *, is_fatal: bool) -> FrameEnd:
    """With fullgraph=True a break is the user's error; without, Python runs the function."""
    if not isinstance(error, Unsupported | UserError):
        return FrameEnd(is_compiled=False, error=error)
    stop = _read_stop(error)
    return FrameEnd(
        is_compiled=False,
        stop=stop,
        is_at_limit=stop.kind == _LIMIT,
        error=error if is_fatal else None,
    )


def _wrap_break(original: Callable[..., None]) -> Callable[..., None]:
    def log_graph_break(self: Any, code_options: Any, reason: str, exc: Any) -> None:
        if not exc.logged:
            stop = _read_stop(exc)
            _tell(lambda watcher: watcher.see_stop(stop))
        original(self, code_options, reason=reason, exc=exc)

    return log_graph_break


def _read_stop(error: Any) -> Stop:
    stack = getattr(error, "real_stack", None) or ()
    lines = tuple(Line(one.filename, one.lineno or 0, one.name, one.line or "") for one in stack)
    kind = getattr(error, "gb_type", None) or type(error).__name__
    return Stop(str(kind), getattr(error, "msg", None) or str(error), lines)


def _wrap_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_user_compiler(self: Any, gm: fx.GraphModule, example_inputs: Any) -> Any:
        compile_id = str(CompileContext.current_compile_id())
        _tell(lambda watcher: watcher.see_graph(gm, compile_id))
        return original(self, gm, example_inputs)

    return call_user_compiler


def _wrap_reasons(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_reasons(
        entries: Any, frame: Any, backend: Any = None, skip_logging: bool = False
    ) -> Any:
        reasons = original(entries, frame, backend, skip_logging)
        if not skip_logging:
            _tell(lambda watcher: watcher.see_recompile(reasons, frame.f_locals))
        return reasons

    return get_reasons
