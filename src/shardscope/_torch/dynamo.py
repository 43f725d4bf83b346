"""Dynamo: events and times of its compilations, ids of graph breaks, registered backends.

`find_backend` is what torch.compile calls with a graph, and `is_compiling` tells errors of the
compiler from those of the program.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, Protocol

import torch
from torch import fx, nn

from shardscope._torch.modules import is_compiled
from shardscope._torch.private import find_exception, find_name, is_missing, require

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
    """A line of a stack trace."""

    file: str
    line: int
    function: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why dynamo stopped a trace; the stack begins at the function being compiled."""

    kind: str  # dynamo's name for this kind of graph break
    message: str
    stack: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class FrameEnd:
    """The result of dynamo's attempt to compile a function."""

    is_compiled: bool
    compile_id: str = ""
    stop: Stop | None = None  # why dynamo gave up, if it did
    is_at_limit: bool = False  # the recompile limit was reached
    guards: tuple[str, ...] = ()
    error: BaseException | None = None
    backend: Any = None  # of the graphs


class CompileWatcher(Protocol):
    """Called while dynamo compiles. Compilations may nest."""

    has_guards: bool

    def begin_frame(self, code: CodeType, caller: FrameType | None, scope: dict[str, Any]) -> None:
        """Dynamo begins to compile a function called by `caller`; `scope` has its globals."""

    def end_frame(self, end: FrameEnd) -> None:
        """Dynamo is done with the function that it began last."""

    def see_stop(self, stop: Stop) -> None:
        """The trace of the function stopped at a graph break."""

    def see_recompile(self, reasons: Sequence[str], values: Mapping[str, Any]) -> None:
        """The function is recompiled because guards failed; `values` are its current arguments."""

    def see_graph(self, graph: fx.GraphModule, compile_id: str) -> None:
        """A graph of the function is passed to the backend."""

    def fail(self, error: Exception) -> None:
        """A method above raised `error`."""


_watchers: tuple[CompileWatcher, ...] = ()
_installed: ExitStack | None = None
_lock = threading.RLock()


@contextmanager
def watch_compiles(watcher: CompileWatcher) -> Iterator[None]:
    """Report every compilation of this process to `watcher` until the context ends."""
    global _installed, _watchers
    with _lock:
        _installed = _installed or _install()
        _watchers = (*_watchers, watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(active for active in _watchers if active is not watcher)
            if not _watchers and _installed is not None:
                installed, _installed = _installed, None
                installed.close()


def _notify_watchers(notify: Callable[[CompileWatcher], None]) -> None:
    for watcher in _watchers:
        try:
            notify(watcher)
        except Exception as error:  # noqa: BLE001 - a watcher must not stop the compiler
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
        _notify_watchers(lambda watcher: watcher.begin_frame(frame.f_code, caller, frame.f_globals))
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
            _notify_watchers(lambda watcher: watcher.end_frame(end))

    return convert


def _find_backend(converter: Any) -> Any:
    """The backend that the user passed to torch.compile, without torch's wrappers."""
    backend = converter
    while True:
        wrapped = next(
            (getattr(backend, name) for name in _WRAPPED if hasattr(backend, name)), None
        )
        if wrapped is None:
            return backend
        backend = wrapped


def _read_result(result: Any) -> FrameEnd:
    code = result.guarded_code
    if code is None:
        return FrameEnd(is_compiled=False)
    needs_guards = any(watcher.has_guards for watcher in _watchers)
    guards = tuple(code.guard_manager.code_parts) if needs_guards else ()
    return FrameEnd(is_compiled=True, compile_id=str(code.compile_id), guards=guards)


def _read_error(error: BaseException, *, is_fatal: bool) -> FrameEnd:
    """With fullgraph=True a graph break is an error; without, Python runs the function."""
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
            _notify_watchers(lambda watcher: watcher.see_stop(stop))
        original(self, code_options, reason=reason, exc=exc)

    return log_graph_break


def _read_stop(error: Any) -> Stop:
    stack = getattr(error, "real_stack", None) or ()
    lines = tuple(
        Line(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in stack
    )
    kind = getattr(error, "gb_type", None) or type(error).__name__
    return Stop(str(kind), getattr(error, "msg", None) or str(error), lines)


def _wrap_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_user_compiler(self: Any, gm: fx.GraphModule, example_inputs: Any) -> Any:
        compile_id = str(CompileContext.current_compile_id())
        _notify_watchers(lambda watcher: watcher.see_graph(gm, compile_id))
        return original(self, gm, example_inputs)

    return call_user_compiler


def _wrap_reasons(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_reasons(
        entries: Any, frame: Any, backend: Any = None, skip_logging: bool = False
    ) -> Any:
        reasons = original(entries, frame, backend, skip_logging)
        if not skip_logging:
            _notify_watchers(lambda watcher: watcher.see_recompile(reasons, frame.f_locals))
        return reasons

    return get_reasons


compilation_time_metrics = find_name(
    "torch._dynamo.utils.compilation_time_metrics", "measure compile times"
)

Durations = dict[str, tuple[int, float]]

_STAGES = {
    "frames": "_compile.compile_inner",
    "tracing": "bytecode_tracing",
    "guards": "build_guards",
    "backend": "OutputGraph.call_user_compiler",
    "aot": "create_aot_dispatcher_function",
    "inductor": "compile_fx_inner",
    # AOT autograd compiles backward when it first runs, which no other stage includes.
    "backward": "backward._backward_impl",
    "inductor in backward": "compile_fx.<locals>.bw_compiler",
}


def read_durations() -> Durations:
    """How often each stage ran in this process, and its inclusive time in seconds."""
    if is_missing(compilation_time_metrics):
        return {}
    return {
        stage: (len(times), sum(times))
        for stage, name in _STAGES.items()
        for times in (compilation_time_metrics.get(name, ()),)
    }


_find_page = find_name(
    "torch._dynamo.exc.get_gbid_documentation_link",
    "print the graph break ids of torch's documentation",
)
_NUMBER = re.compile(r"gb(\d+)\.html")


def find_break_id(kind: str) -> str:
    """The id in torch's documentation, `GB0123`, of a kind of graph break; else empty."""
    match = _NUMBER.search(_find_page(kind) or "")
    return f"GB{match[1]}" if match else ""


def unwrap_compiled(fn: Any) -> Any:
    """The function or module that torch.compile wrapped; `fn` itself if it is not a wrapper."""
    if isinstance(fn, nn.Module):
        return getattr(fn, "_orig_mod", fn)
    return fn._torchdynamo_orig_callable if has_compile_wrapper(fn) else fn


def has_compile_wrapper(fn: Any) -> bool:
    """Whether `fn` is a result of torch.compile, or a module that was compiled in place."""
    if isinstance(fn, nn.Module):
        return is_compiled(fn)
    # A result of torch.compiler.disable has the first attribute too.
    is_wrapper = hasattr(fn, "_torchdynamo_orig_callable")
    return is_wrapper and not getattr(fn, "_torchdynamo_disable", False)


_lookup_backend = find_name("torch._dynamo.lookup_backend", "find backends by name")
_optimize = find_name("torch._dynamo.optimize", "return the guards of compiled functions")
_compile_times = find_name("torch._dynamo.utils.compile_times", "print compile times")


def look_up_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The backend function with this name; a function is returned unchanged."""
    compile_graph: Callable[..., Any] = _lookup_backend(backend)
    return compile_graph


def compile_and_keep_guards(
    function: Callable[..., Any], backend: Callable[..., Any], guards: list[Any]
) -> Callable[..., Any]:
    """Compile a function; when it is called, its guards are appended to `guards`."""
    compiled: Callable[..., Any] = _optimize(backend, guard_export_fn=guards.extend)(function)
    return compiled


def describe_compile_times() -> str:
    """torch's report of compile times since the last reset."""
    return str(_compile_times(repr="str"))


TorchDynamoException = find_exception(
    "torch._dynamo.exc.TorchDynamoException", "distinguish the compiler's errors from the program's"
)
_NEED = "detect when torch compiles, so that this time is not counted as run time"
CallbackTrigger = find_name("torch._dynamo.callback.CallbackTrigger", _NEED)
callback_handler = find_name("torch._dynamo.callback.callback_handler", _NEED)

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]

_MARKS = {
    "torch._dynamo.mark_dynamic": "_dynamo_dynamic_indices",
    "torch._dynamo.maybe_mark_dynamic": "_dynamo_weak_dynamic_indices",
    "torch._dynamo.decorators.mark_unbacked": "_dynamo_unbacked_indices",
}
# Functions of torch that compile a frame, or a graph's backward when it first runs.
_COMPILERS = {
    "_compile": "convert_frame.py",
    "get_or_compile": "",
    "_wrapped_bw_compiler": "",
}


def find_backend(
    backend: str | Callable[..., Any],
    *,
    options: Mapping[str, Any] | None,
    mode: str | None,
    dynamic: bool | None,
) -> Backend:
    """The function that torch.compile with these arguments calls with a graph and its inputs."""
    backend_options = dict(options) if options else {}
    backend_options.pop("guard_filter_fn", None)  # dynamo's, not the backend's
    make: Any = torch._TorchCompileInductorWrapper
    if backend_options.pop("use_aoti", False):
        make = torch._TorchCompileAOTInductorWrapper
    if backend != "inductor":
        make = partial(torch._TorchCompileWrapper, backend)
    compile_graph: Backend = make(mode, backend_options or None, dynamic)
    return compile_graph


def patched_inductor(config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """A context in which Inductor's configuration has these values."""
    if not config:
        return nullcontext()
    from torch._inductor import config as settings  # it takes a second to load

    patched: AbstractContextManager[Any] = settings.patch(dict(config))
    return patched


@contextmanager
def watched_compiles(
    on_begin: Callable[[bool], None], on_end: Callable[[], None]
) -> Iterator[None]:
    """Call `on_begin` and `on_end` before and after each compilation by torch.

    `on_begin` gets whether it compiles a backward, which happens when it first runs.
    `torch.compiler.reset()` removes the callbacks.
    """

    def begin(event: Any) -> None:
        on_begin(event.callback_trigger is CallbackTrigger.LAZY_BACKWARD)

    def end(_: Any) -> None:
        on_end()

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch was reset in between
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)


def list_marks(tensor: torch.Tensor) -> list[tuple[str, int]]:
    """The functions (`torch._dynamo.mark_dynamic`, …) and dims that a tensor is marked with."""
    return [
        (function, dim)
        for function, attribute in _MARKS.items()
        for dim in sorted(getattr(tensor, attribute, None) or ())
    ]


def is_compiling(error: BaseException) -> bool:
    """Whether `error` was raised while torch compiled."""
    return isinstance(error, TorchDynamoException) or _has_frame(error.__traceback__)


def _has_frame(traceback: TracebackType | None) -> bool:
    codes = (frame.f_code for frame, _ in walk_tb(traceback))
    return any(
        code.co_name in _COMPILERS and code.co_filename.endswith(_COMPILERS[code.co_name])
        for code in codes
    )
