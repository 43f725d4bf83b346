"""PyTorch's names and signatures for the debugging backends, for `shardscope.compat`.

Extra keyword arguments are warned of and ignored, as PyTorch's backends do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from shardscope._torch.aot_backends import (
    Compiled,
    Compiler,
    crossref_setting,
    graph_run_error,
)
from shardscope._torch.checking_modes import check_fakes
from shardscope._torch.pre_dispatch import trace_pre_dispatch
from shardscope.compile.backends import aot, as_captured, boxed, script
from shardscope.compile.backends.faults.backends import has_non_leaf
from shardscope.compile.backends.graphs import copy_graph
from shardscope.compile.backends.spelling import name_of_node

__all__ = [
    "ReluCompileError",
    "TestingOnlyCompileError",
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_eager_decomp_partition_with_mode",
    "aot_eager_default_partitioner",
    "aot_ts",
    "boxed_nop",
    "boxed_nop_with_mode",
    "eager",
    "eager_debug",
    "eager_noexcept",
    "fake_crossref_boxed_nop",
    "get_nop_func",
    "ignore_builtins",
    "invoke_subgraph",
    "make_eager_backend_with_torch_function_mode",
    "make_eager_backend_with_torch_function_modes",
    "non_leaf_compile_error_TESTING_ONLY",
    "pre_dispatch_eager",
    "relu_accuracy_error_TESTING_ONLY",
    "relu_compile_error_TESTING_ONLY",
    "relu_runtime_error_TESTING_ONLY",
    "torchscript",
]

_log = logging.getLogger("shardscope")


class ReluCompileError(Exception):
    """What `relu_compile_error_TESTING_ONLY` raises."""


class TestingOnlyCompileError(Exception):
    """What `non_leaf_compile_error_TESTING_ONLY` raises."""


def eager(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """Run the graph as dynamo captured it."""
    _warn_of("eager", kwargs)
    return as_captured.eager(gm, fake_tensor_inputs)


def make_eager_backend_with_torch_function_mode(mode: TorchFunctionMode) -> Compiler:
    """A backend that runs graphs within `mode`."""
    return make_eager_backend_with_torch_function_modes([mode])


def make_eager_backend_with_torch_function_modes(modes: Iterable[TorchFunctionMode]) -> Compiler:
    """A backend that runs graphs within `modes`, the first one outermost."""
    # Once: whoever gives a generator wants it entered at every call.
    options = {"modes": list(modes)}

    def backend(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        _warn_of("eager", kwargs)
        return as_captured.eager_with_modes(gm, fake_tensor_inputs, options=options)

    return backend


def eager_noexcept(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """Run the graph; what it raises becomes dynamo's own error."""
    _warn_of("eager_noexcept", kwargs)

    def run(*args: Any) -> Any:
        try:
            return gm(*args)
        except Exception as error:
            raise graph_run_error(as_captured.explain_failure(error)) from error

    return run


def pre_dispatch_eager(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> fx.GraphModule:
    """Trace the graph to ATen ops before autograd sees them, print it, and run that."""
    _warn_of("pre_dispatch_eager", kwargs)
    traced = trace_pre_dispatch(gm, fake_tensor_inputs)
    traced.print_readable()
    return traced


def eager_debug(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """Run the graph, and hold each op to its schema."""
    _warn_of("eager_debug", kwargs)
    return as_captured.eager_debug(gm, fake_tensor_inputs)


def torchscript(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any]) -> Compiled:
    """Run the graph in TorchScript."""
    return script.torchscript(gm, fake_tensor_inputs)


def invoke_subgraph(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """Let forward and backward stay one call each where they are traced in their turn."""
    _warn_of("invoke_subgraph", kwargs)
    return aot.invoke_subgraph(gm, fake_tensor_inputs)


def boxed_nop(fx_g: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Run a graph as it is on a list of inputs, which is emptied."""
    return boxed.run_boxed(fx_g, example_inputs)


def boxed_nop_with_mode(
    fx_g: fx.GraphModule, example_inputs: Sequence[Any], *, mode: Any
) -> Compiled:
    """The same, within a mode."""
    return boxed.run_boxed_within(
        fx_g, example_inputs, surroundings=lambda: as_captured.enter_all([mode])
    )


def fake_crossref_boxed_nop(
    fx_g: fx.GraphModule,
    example_inputs: Sequence[Any],
    ignore_op_fn: Callable[[Any], bool] | None = None,
) -> Compiled:
    """The same, with each op that is not ignored held against its fake."""
    return boxed.run_boxed_within(
        fx_g, example_inputs, surroundings=lambda: check_fakes(ignore_op_fn)
    )


def ignore_builtins(op: Any) -> bool:
    """Whether the op is torch's own."""
    return boxed.is_builtin(op)


def get_nop_func() -> Compiler:
    """The compiler that torch's setting `fake_tensor_crossref` asks for."""
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
    """Trace forward and backward, and run both as they are."""
    _warn_of("aot_eager", kwargs)
    given = {"fw_compiler": fw_compiler, "bw_compiler": bw_compiler}
    options = {name: compiler for name, compiler in given.items() if compiler is not None}
    return aot.aot_eager(gm, fake_tensor_inputs, options=options)


def aot_eager_default_partitioner(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """The same, and what forward computes is saved, never recomputed."""
    _warn_of("aot_eager_default_partitioner", kwargs)
    return aot.aot_eager_default_partitioner(gm, fake_tensor_inputs)


def aot_eager_decomp_partition(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """Decompose and partition as Inductor does, and run the graphs as they are."""
    _warn_of("aot_eager_decomp_partition", kwargs)
    return aot.aot_eager_decomp_partition(gm, fake_tensor_inputs)


def aot_eager_decomp_partition_with_mode(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], mode: Any, **kwarg: Any
) -> Compiled:
    """The same, with forward and backward each run within a TorchDispatchMode."""
    _warn_of("aot_eager_decomp_partition_with_mode", kwarg)
    return aot.aot_eager_decomp_partition_with_mode(gm, fake_tensor_inputs, options={"mode": mode})


def aot_eager_decomp_partition_crossref(
    gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any
) -> Compiled:
    """The same, with ops held against their fakes: custom ones, or as torch's setting says."""
    _warn_of("aot_eager_decomp_partition_crossref", kwargs)
    return aot.aot_eager_decomp_partition_crossref(gm, fake_tensor_inputs)


def aot_ts(gm: fx.GraphModule, fake_tensor_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """Run the forward and backward graphs of AOT autograd in TorchScript."""
    _warn_of("aot_ts", kwargs)
    return script.aot_ts(gm, fake_tensor_inputs)


def relu_compile_error_TESTING_ONLY(  # noqa: N802
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Fail to compile a graph with a relu, however it is written."""
    if _relus(gm):
        raise ReluCompileError
    return gm


def relu_runtime_error_TESTING_ONLY(  # noqa: N802
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Fail when a relu is run, however it is written."""
    return _with_relus(gm, _raise_for_relu)


def relu_accuracy_error_TESTING_ONLY(  # noqa: N802
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Add one instead of a relu, however it is written."""
    return _with_relus(gm, _add_one)


def non_leaf_compile_error_TESTING_ONLY(  # noqa: N802
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Fail to compile a graph that calls something and has an input that is not a leaf."""
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


def _add_one(tensor: torch.Tensor, *, is_in_place: bool) -> torch.Tensor:
    return tensor.add_(1) if is_in_place else tensor + 1


def _raise_for_relu(tensor: torch.Tensor, *, is_in_place: bool) -> torch.Tensor:
    raise AssertionError("ReluRuntimeError")
