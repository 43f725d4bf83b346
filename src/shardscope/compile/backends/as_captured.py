"""Backends that run dynamo's graph as it is: what fails here, dynamo is to blame for."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import fx

from shardscope._torch.aot_backends import Compiled
from shardscope._torch.checking_modes import check_schemas
from shardscope._torch.pre_dispatch import trace_pre_dispatch
from shardscope.compile.backends.options import Option, read_options
from shardscope.errors import GraphRunError

__all__ = [
    "eager",
    "eager_debug",
    "eager_noexcept",
    "eager_with_modes",
    "enter_all",
    "explain_failure",
    "is_mode",
    "pre_dispatch_eager",
]

Options = Mapping[str, Any] | None


def eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Run the graph as dynamo captured it.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_eager")(x)
    """
    read_options("eager", options, mode, {})
    return gm.forward


_MESSAGE = Option("a sentence to begin the error with", lambda value: isinstance(value, str), "")


def eager_noexcept(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Run the graph; an exception becomes a GraphRunError that names the line of the graph.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_eager_noexcept")(x)
    """
    chosen = read_options("eager_noexcept", options, mode, {"message": _MESSAGE})

    def run(*args: Any) -> Any:
        try:
            return gm(*args)
        except Exception as error:
            raise GraphRunError(explain_failure(error, message=chosen["message"])) from error

    return run


def explain_failure(error: Exception, *, message: str = "") -> str:
    """That it was the graph that failed, at which of its lines, and why."""
    steps = traceback.extract_tb(error.__traceback__)
    # Code that fx generates has no file; its innermost line is the op that failed.
    lines = [step.line for step in steps if step.filename.startswith("<eval_with_key>")]
    place = f" at `{lines[-1].split(';')[0]}`" if lines and lines[-1] else ""
    fact = message or "The graph that dynamo captured raised an error when it ran"
    return (
        f"{fact}{place}: {type(error).__name__}: {error}. If the function does not raise it "
        f"uncompiled, dynamo captured it wrongly."
    )


def eager_debug(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Run the graph's forward, and check each op against its schema: what it mutates and aliases.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_eager_debug")(x)
    """
    read_options("eager_debug", options, mode, {})

    def run(*args: Any) -> Any:
        # The interpreter adds to an error which node and line of the user's it comes from.
        with check_schemas():
            return fx.Interpreter(gm).run(*args)

    return run


def is_mode(value: Any) -> bool:
    """Whether `value` is a mode, or makes one when called."""
    return hasattr(value, "__enter__") or callable(value)


_MODES = Option(
    "a list of modes, or of functions that make one for each call",
    lambda value: isinstance(value, list | tuple) and all(map(is_mode, value)),
    is_required=True,
)


def eager_with_modes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Run the graph within TorchFunctionModes or TorchDispatchModes, the first one outermost.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_eager_with_modes")(x)
    """
    modes = read_options("eager_with_modes", options, mode, {"modes": _MODES})["modes"]

    def run(*args: Any) -> Any:
        with enter_all(modes):
            return gm.forward(*args)

    return run


@contextmanager
def enter_all(modes: Sequence[Any]) -> Iterator[None]:
    """Within all modes; those that are functions are made first."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode if _is_made(mode) else mode())
        yield


def _is_made(mode: Any) -> bool:
    return hasattr(mode, "__enter__") and not isinstance(mode, type)


_PRINT = Option(
    "True to print the graph, else False", lambda value: isinstance(value, bool), default=False
)


def pre_dispatch_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Trace the graph to ATen ops before autograd and autocast, and run that.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; an option that it does not know is refused.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_pre_dispatch_eager")(x)
    """
    chosen = read_options("pre_dispatch_eager", options, mode, {"print": _PRINT})
    traced = trace_pre_dispatch(gm, example_inputs)
    if chosen["print"]:
        traced.print_readable()
    return traced
