"""Calls a backend as torch.compile would, and knows its failures from the program's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch

from shardscope._torch.private import find_exception, find_name
from shardscope._torch.pytree_values import leaves_with_path

__all__ = ["find_backend", "flatten", "is_compiling", "patched_inductor", "watched_backend"]

TorchDynamoException = find_exception(
    "torch._dynamo.exc.TorchDynamoException", "tell a compiler's failures from the program's"
)
keystr = find_name("torch.utils._pytree.keystr", "name the values that a function returns")

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]

# Functions of torch's that compile the backward of a graph when it is first run.
_COMPILE_LATE = ("get_or_compile", "_wrapped_bw_compiler")


def find_backend(
    backend: str | Callable[..., Any],
    *,
    options: Mapping[str, Any] | None,
    mode: str | None,
    dynamic: bool | None,
) -> Backend:
    """What torch.compile calls with a graph and its inputs, given these arguments."""
    given = dict(options) if options else {}
    given.pop("guard_filter_fn", None)  # dynamo's, not the backend's
    kind: Any = torch._TorchCompileInductorWrapper
    if given.pop("use_aoti", False):
        kind = torch._TorchCompileAOTInductorWrapper
    if backend != "inductor":
        kind = partial(torch._TorchCompileWrapper, backend)
    found: Backend = kind(mode, given or None, dynamic)
    return found


def patched_inductor(config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inductor's configuration, changed until the context ends."""
    if not config:
        return nullcontext()
    from torch._inductor import config as settings  # it takes a second to load

    patched: AbstractContextManager[Any] = settings.patch(dict(config))
    return patched


def watched_backend(backend: Backend, tell: Callable[[str], None]) -> Backend:
    """A backend that tells when it is compiling, and when what it made is to run."""

    def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        tell("compiling")
        compiled = backend(gm, inputs)
        tell("running")
        return compiled

    for name in ("get_compiler_config", "compiler_name", "dynamic", "reset"):
        if hasattr(backend, name):
            setattr(compile_graph, name, getattr(backend, name))
    return compile_graph


def flatten(value: Any) -> list[tuple[str, Any]]:
    """The leaves of a nested value, each with the keys that lead to it: `[0]`, `['loss']`."""
    return [(keystr(path), leaf) for path, leaf in leaves_with_path(value)]


def is_compiling(error: BaseException) -> bool:
    """Whether something was being compiled when `error` was raised."""
    return isinstance(error, TorchDynamoException) or _has_frame(error.__traceback__)


def _has_frame(traceback: TracebackType | None) -> bool:
    return any(frame.f_code.co_name in _COMPILE_LATE for frame, _ in walk_tb(traceback))
