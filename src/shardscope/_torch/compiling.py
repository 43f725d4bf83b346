"""Calls a backend as torch.compile does, and tells the compiler's errors from the program's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch

from shardscope._torch.private import find_exception, find_name

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
