"""PyTorch's names and signatures for the debugging backends, for `shardscope.compat`.

Extra keyword arguments are ignored with a warning, as in PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from shardscope._torch.aot import (
    Compiled,
    Compiler,
    crossref_setting,
    graph_run_error,
    trace_pre_dispatch,
)
from shardscope._torch.checking_modes import check_fakes
from shardscope.compile.backends import aot, graph_backends
from shardscope.compile.backends.graph_backends import copy_graph, has_non_leaf
from shardscope.compile.backends.op_names import name_of_node

_log = logging.getLogger("shardscope")


class ReluCompileError(Exception):
    """Raised by `relu_compile_error_TESTING_ONLY`."""


class TestingOnlyCompileError(Exception):
    """Raised by `non_leaf_compile_error_TESTING_ONLY`."""


def eager(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """Run the graph as dynamo captured it.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=eager)(x)
    """
    _warn_of("eager", kwargs)
    return graph_backends.eager(gm, fake_tensor_inputs)


def make_eager_backend_with_torch_function_mode(mode: TorchFunctionMode) -> Compiler:
    """Make a backend that runs graphs within a mode.

    Args:
        mode: The mode.

    Examples:
        >>> backend = make_eager_backend_with_torch_function_mode(mode)
        >>> torch.compile(model, backend=backend)(x)
    """
    return make_eager_backend_with_torch_function_modes([mode])


def make_eager_backend_with_torch_function_modes(modes: Iterable[TorchFunctionMode]) -> Compiler:
    """Make a backend that runs graphs within modes, the first one outermost.

    Args:
        modes: The modes.

    Examples:
        >>> backend = make_eager_backend_with_torch_function_modes([mode])
        >>> torch.compile(model, backend=backend)(x)
    """
    # A list, so that the modes of a generator are entered at every call.
    options = {"modes": list(modes)}

    def backend(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        _warn_of("eager", kwargs)
        return graph_backends.eager_with_modes(gm, fake_tensor_inputs, options=options)

    return backend


def eager_noexcept(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """Run the graph; an exception becomes dynamo's own error.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=eager_noexcept)(x)
    """
    _warn_of("eager_noexcept", kwargs)

    def run(*args: Any) -> Any:
        try:
            return gm(*args)
        except Exception as error:
            raise graph_run_error(graph_backends.explain_failure(error)) from error

    return run


def pre_dispatch_eager(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> fx.GraphModule:
    """Trace the graph to ATen ops before autograd, print it, and run it.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=pre_dispatch_eager)(x)
    """
    _warn_of("pre_dispatch_eager", kwargs)
    traced = trace_pre_dispatch(gm, fake_tensor_inputs)
    traced.print_readable()
    return traced


def eager_debug(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """Run the graph, and check each op against its schema.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=eager_debug)(x)
    """
    _warn_of("eager_debug", kwargs)
    return graph_backends.eager_debug(gm, fake_tensor_inputs)


def torchscript(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any]) -> Compiled:
    """Run the graph in TorchScript.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.

    Examples:
        >>> torch.compile(model, backend=torchscript)(x)
    """
    return graph_backends.torchscript(gm, fake_tensor_inputs)


def invoke_subgraph(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """Keep forward and backward as one call each when compiled code is traced again.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=invoke_subgraph)(x)
    """
    _warn_of("invoke_subgraph", kwargs)
    return aot.invoke_subgraph(gm, fake_tensor_inputs)


def boxed_nop(fx_g: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Run a graph as it is on a list of inputs, which is emptied.

    Args:
        fx_g: The graph.
        example_inputs: Example inputs of the graph.

    Examples:
        >>> run = boxed_nop(graph, inputs)
        >>> run(list(inputs))
    """
    return graph_backends.run_boxed(fx_g, example_inputs)


def boxed_nop_with_mode(
    fx_g: fx.GraphModule, example_inputs: Sequence[Any], *, mode: Any
) -> Compiled:
    """Run a graph within a mode, on a list of inputs, which is emptied.

    Args:
        fx_g: The graph.
        example_inputs: Example inputs of the graph.
        mode: The mode.

    Examples:
        >>> run = boxed_nop_with_mode(graph, inputs, mode=mode)
    """
    return graph_backends.run_boxed_within(
        fx_g, example_inputs, make_context=lambda: graph_backends.enter_all([mode])
    )


def fake_crossref_boxed_nop(
    fx_g: fx.GraphModule,
    example_inputs: Sequence[Any],
    ignore_op_fn: Callable[[Any], bool] | None = None,
) -> Compiled:
    """Run a graph on a list of inputs, and compare each op that is not ignored with its fake.

    Args:
        fx_g: The graph.
        example_inputs: Example inputs of the graph.
        ignore_op_fn: Which ops are not compared.

    Examples:
        >>> run = fake_crossref_boxed_nop(graph, inputs, ignore_builtins)
    """
    return graph_backends.run_boxed_within(
        fx_g, example_inputs, make_context=lambda: check_fakes(ignore_op_fn)
    )


def ignore_builtins(op: Any) -> bool:
    """Whether an op is one of torch's own.

    Args:
        op: The op.

    Examples:
        >>> ignore_builtins(torch.ops.aten.relu.default)
        True
    """
    return graph_backends.is_builtin(op)


def get_nop_func() -> Compiler:
    """The compiler that the functorch setting `fake_tensor_crossref` selects.

    Examples:
        >>> run = get_nop_func()(graph, inputs)
    """
    setting = crossref_setting()
    if setting == "off":
        return boxed_nop
    ignored = ignore_builtins if setting == "custom_ops" else None
    return partial(fake_crossref_boxed_nop, ignore_op_fn=ignored)


def aot_eager(
    gm: fx.GraphModule,
    fake_tensor_inputs: Sequence[Any],
    fw_compiler: Compiler | None = None,
    bw_compiler: Compiler | None = None,
    **kwargs: Any,
) -> Compiled:
    """Trace forward and backward with AOT autograd, and run both graphs eagerly.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        fw_compiler: Compiles the forward graph.
        bw_compiler: Compiles the backward graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=aot_eager)(x)
    """
    _warn_of("aot_eager", kwargs)
    compilers = {"fw_compiler": fw_compiler, "bw_compiler": bw_compiler}
    options = {name: compiler for name, compiler in compilers.items() if compiler is not None}
    return aot.aot_eager(gm, fake_tensor_inputs, options=options)


def aot_eager_default_partitioner(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """Trace forward and backward and run both eagerly; everything is saved, nothing recomputed.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=aot_eager_default_partitioner)(x)
    """
    _warn_of("aot_eager_default_partitioner", kwargs)
    return aot.aot_eager_default_partitioner(gm, fake_tensor_inputs)


def aot_eager_decomp_partition(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """Decompose and partition as Inductor does, and run the graphs eagerly.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=aot_eager_decomp_partition)(x)
    """
    _warn_of("aot_eager_decomp_partition", kwargs)
    return aot.aot_eager_decomp_partition(gm, fake_tensor_inputs)


def aot_eager_decomp_partition_with_mode(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], mode: Any, **kwarg: Any
) -> Compiled:
    """Decompose and partition as Inductor does, and run both graphs within a TorchDispatchMode.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        mode: The mode.
        **kwarg: Options, as in torch.

    Examples:
        >>> backend = functools.partial(aot_eager_decomp_partition_with_mode, mode=mode)
        >>> torch.compile(model, backend=backend)(x)
    """
    _warn_of("aot_eager_decomp_partition_with_mode", kwarg)
    return aot.aot_eager_decomp_partition_with_mode(gm, fake_tensor_inputs, options={"mode": mode})


def aot_eager_decomp_partition_crossref(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """Decompose and partition as Inductor does, and compare ops with their fakes.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=aot_eager_decomp_partition_crossref)(x)
    """
    _warn_of("aot_eager_decomp_partition_crossref", kwargs)
    return aot.aot_eager_decomp_partition_crossref(gm, fake_tensor_inputs)


def aot_ts(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """Run the forward and backward graphs of AOT autograd in TorchScript.

    Args:
        gm: The graph that dynamo captured.
        fake_tensor_inputs: Example inputs of the graph.
        **kwargs: Options, as in torch.

    Examples:
        >>> torch.compile(model, backend=aot_ts)(x)
    """
    _warn_of("aot_ts", kwargs)
    return graph_backends.aot_ts(gm, fake_tensor_inputs)


def relu_compile_error_TESTING_ONLY(  # noqa: N802
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Fail to compile a graph with a relu, however it is written.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.

    Examples:
        >>> torch.compile(model, backend=relu_compile_error_TESTING_ONLY)(x)
    """
    if _relus(gm):
        raise ReluCompileError
    return gm


def relu_runtime_error_TESTING_ONLY(  # noqa: N802
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Fail when a relu runs, however it is written.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.

    Examples:
        >>> torch.compile(model, backend=relu_runtime_error_TESTING_ONLY)(x)
    """
    return _with_relus(gm, _raise_for_relu)


def relu_accuracy_error_TESTING_ONLY(  # noqa: N802
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Add one instead of computing a relu, however it is written.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.

    Examples:
        >>> torch.compile(model, backend=relu_accuracy_error_TESTING_ONLY)(x)
    """
    return _with_relus(gm, _increment)


def non_leaf_compile_error_TESTING_ONLY(  # noqa: N802
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Fail to compile a graph that has a call and an input that is not an autograd leaf.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.

    Examples:
        >>> torch.compile(model, backend=non_leaf_compile_error_TESTING_ONLY)(x)
    """
    if has_non_leaf(gm, example_inputs):
        raise TestingOnlyCompileError
    return gm


def _warn_of(backend: str, kwargs: dict[str, Any]) -> None:
    if kwargs:
        _log.warning("%s ignores unknown options: %s.", backend, ", ".join(sorted(kwargs)))


def _relus(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if name_of_node(node) == "relu"]


def _with_relus(gm: fx.GraphModule, instead: Callable[..., Any]) -> fx.GraphModule:
    copy = copy_graph(gm)
    for node in _relus(copy):
        tensor = node.all_input_nodes[0]
        with copy.graph.inserting_before(node):
            new = copy.graph.call_function(instead, (tensor,), {"is_in_place": _is_in_place(node)})
        node.replace_all_uses_with(new)
        copy.graph.erase_node(node)
    copy.recompile()
    return copy


def _is_in_place(relu: fx.Node) -> bool:
    if relu.op == "call_module":
        module: Any = relu.graph.owning_module
        return bool(module.get_submodule(relu.target).inplace)
    name = getattr(relu.target, "__name__", str(relu.target))
    return name.endswith("_") or True in (*relu.args[1:], relu.kwargs.get("inplace"))


def _increment(tensor: torch.Tensor, *, is_in_place: bool) -> torch.Tensor:
    return tensor.add_(1) if is_in_place else tensor + 1


def _raise_for_relu(tensor: torch.Tensor, *, is_in_place: bool) -> torch.Tensor:
    raise AssertionError("ReluRuntimeError")
