"""Backends that run the graph as dynamo captured it, as plain Python or as TorchScript."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from shardscope._torch.aot import (
    Compiled,
    Compiler,
    as_boxed,
    compile_ahead,
    give_boxed_code,
    trace_pre_dispatch,
)
from shardscope._torch.checking_modes import check_fakes, check_schemas, compile_script
from shardscope._torch.dispatch import is_overload, op_packet
from shardscope.compile.backends.options import Option, read_options
from shardscope.errors import GraphRunError

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
        options: Options of this backend; unknown options raise BackendError.
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
        options: Options of this backend; unknown options raise BackendError.
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
    """Add to an error that the graph failed, at which of its lines, and why."""
    steps = traceback.extract_tb(error.__traceback__)
    # Code that fx generates has no file; its innermost line is the op that failed.
    lines = [step.line for step in steps if step.filename.startswith("<eval_with_key>")]
    location = f" at `{lines[-1].split(';')[0]}`" if lines and lines[-1] else ""
    fact = message or "The graph that dynamo captured raised an error when it ran"
    return (
        f"{fact}{location}: {type(error).__name__}: {error}. If the function does not raise it "
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
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_eager_debug")(x)
    """
    read_options("eager_debug", options, mode, {})

    def run(*args: Any) -> Any:
        # The interpreter adds the node and the user's line to an error.
        with check_schemas():
            return fx.Interpreter(gm).run(*args)

    return run


def is_mode(value: Any) -> bool:
    """Whether `value` is a mode, or a function that creates one."""
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
        options: Options of this backend; unknown options raise BackendError.
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
    """Enter all modes; functions are called to create theirs."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode if _is_instance(mode) else mode())
        yield


def _is_instance(mode: Any) -> bool:
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
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_pre_dispatch_eager")(x)
    """
    chosen = read_options("pre_dispatch_eager", options, mode, {"print": _PRINT})
    traced = trace_pre_dispatch(gm, example_inputs)
    if chosen["print"]:
        traced.print_readable()
    return traced


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A GraphModule with the ops of `gm` and the same parameter and buffer objects.

    Dynamo's is of a lazy class that TorchScript cannot read. Subgraphs, such as the branches of
    `torch.cond`, are copied too.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for name, inner in list(gm.named_children()):
        if isinstance(inner, fx.GraphModule) and hasattr(copy, name):
            setattr(copy, name, copy_graph(inner))
    return copy


def graphs_in(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`gm`, then its subgraphs."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module


def values_of(node: fx.Node) -> list[Any] | None:
    """The values that `node` returned when it was traced; None if unknown."""
    for key in ("example_value", "val"):
        if key in node.meta:
            value = node.meta[key]
            return list(value) if isinstance(value, list | tuple) else [value]
    return None


def user_line(node: fx.Node) -> str:
    """The user's innermost line for `node`, as `file:line`; may be empty."""
    trace = [line.strip() for line in (node.stack_trace or "").splitlines()]
    files = [line for line in trace if line.startswith('File "')]
    if not files:
        return ""
    _, file, rest = files[-1].split('"', 2)
    return f"{file}:{rest.removeprefix(', line ').split(',')[0]}"


ContextFactory = Callable[[], AbstractContextManager[Any]]


def run_boxed(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Run `gm` on a list of inputs, which is emptied so that each is freed after its last use."""
    boxed = copy_graph(gm)
    give_boxed_code(boxed)
    return as_boxed(boxed.forward, takes_list=True)


def run_boxed_within(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, make_context: ContextFactory
) -> Compiled:
    """As `run_boxed`, with each call inside a context from `make_context`."""
    run = run_boxed(gm, example_inputs)

    def run_within(args: list[Any]) -> Any:
        with make_context():
            return run(args)

    return as_boxed(run_within, takes_list=True)


def is_builtin(op: Any) -> bool:
    """Whether the op is one of torch's, whose fakes torch tests."""
    return op.namespace in ("aten", "prims", "prim")


def checking_compiler(check: str) -> Compiler:
    """A compiler that checks no fakes ('off'), those of 'custom_ops', or those of 'all' ops."""
    if check == "off":
        return run_boxed
    trusted = is_builtin if check == "custom_ops" else None
    return partial(run_boxed_within, make_context=lambda: check_fakes(trusted))


def torchscript(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Run the captured graph in TorchScript.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_torchscript")(x)
    """
    read_options("torchscript", options, mode, {})
    return script_graph(gm, example_inputs)


def aot_ts(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Run the forward and backward graphs of AOT autograd in TorchScript.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_aot_ts")(x)
    """
    read_options("aot_ts", options, mode, {})
    return compile_ahead(
        gm, example_inputs, forward=lambda graph, inputs: as_boxed(script_graph(graph, inputs))
    )


def script_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """`gm` compiled by TorchScript."""
    copy = copy_graph(gm)
    _declare_numbers(copy.graph, example_inputs)
    for node in copy.graph.nodes:
        _rewrite_args(node)
    copy.recompile()
    return compile_script(copy)


def _declare_numbers(graph: fx.Graph, example_inputs: Sequence[Any]) -> None:
    """Annotate inputs that are not tensors: by default TorchScript assumes tensors."""
    numbers = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=False):
        kind = numbers.get(type(example), type(example))
        node.type = kind if kind in (int, float, bool) else None


def _rewrite_args(node: fx.Node) -> None:
    if node.op == "output":
        # Results of backward contain None: allowed in a tuple, not in a list of tensors.
        node.args = tuple(
            tuple(argument) if isinstance(argument, list) else argument for argument in node.args
        )
    if is_overload(node.target):
        packet = op_packet(node.target)
        node.target = torch.ops.aten.size if packet is torch.ops.aten.sym_size else packet
    node.kwargs = {
        name: str(value) if isinstance(value, torch.device) else value
        for name, value in node.kwargs.items()
    }


def has_non_leaf(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether the graph has a call and an input that is not an autograd leaf."""
    tensors = [tensor for tensor in example_inputs if isinstance(tensor, torch.Tensor)]
    is_trivial = not any(node.op.startswith("call_") for node in gm.graph.nodes)
    return not is_trivial and not all(tensor.is_leaf for tensor in tensors)
