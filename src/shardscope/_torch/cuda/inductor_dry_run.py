"""Inductor without code generation, for fake tensors, on which kernels cannot run.

A graph goes through all of Inductor's graph passes (those that bucket collectives or pipeline them
with matrix products included, where they are enabled) and is then run op by op.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from shardscope._torch.cuda.runtime import has_cuda, replace_attribute
from shardscope._torch.dispatch import is_overload, op_schema
from shardscope._torch.tree import tensor_leaves

_MODULE = "torch._inductor.compile_fx"
# Padding is decided by timing kernels, cached code would be run on tensors without data, and
# folded constants would be computed on the device. Processes that compile kernels would have
# nothing to do, but a program may wait minutes for them at its end.
_SETTINGS = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "shape_padding": False,
    "joint_graph_constant_folding": False,
    "compile_threads": 1,
}
# The passes that overlap collectives with computation would time kernels and collectives.
_ESTIMATORS = ("compute_estimator", "collective_estimator")
# Of an H200, the simulated device, by its data sheet and without sparsity.
_DRAM_GBPS = 4800
_TFLOPS = {torch.float64: 67.0, torch.float32: 67.0, torch.float16: 989.5, torch.bfloat16: 989.5}


@contextmanager
def inductor_without_codegen() -> Iterator[None]:
    """Make `torch.compile` interpret Inductor's graphs op by op until the context ends."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    compile_graph = wrapper.__call__

    def compile_without_codegen(*args: Any, **kwargs: Any) -> Any:
        with _interpreting():  # not earlier: Inductor takes seconds to load
            return compile_graph(*args, **kwargs)

    wrapper.__call__ = compile_without_codegen
    try:
        # The user's backend may call Inductor directly.
        with _interpreting() if _MODULE in sys.modules else ExitStack():
            yield
    finally:
        wrapper.__call__ = compile_graph


@contextmanager
def _interpreting() -> Iterator[None]:
    from torch._functorch import config as aot_config
    from torch._inductor import compile_fx, config

    compile_function: Any = compile_fx.compile_fx
    defaults = compile_function.__defaults__
    with config.patch(_SETTINGS), aot_config.patch(enable_autograd_cache=False):
        # The function object is changed, since users may have imported it by name.
        compile_function.__defaults__ = (_interpret, *defaults[1:])
        try:
            yield
        finally:
            compile_function.__defaults__ = defaults


@contextmanager
def _estimating() -> Iterator[None]:
    """Make Inductor estimate the times of ops and collectives, on a simulated device.

    Its overlap passes would otherwise run and time them, and query Triton for the device's speed.
    """
    from torch._inductor import config
    from torch.utils import _runtime_estimation

    section = "aten_distributed_optimizations"
    options = getattr(config, section, None)
    settings = {f"{section}.{name}": "analytical" for name in _ESTIMATORS if hasattr(options, name)}
    if getattr(options, "enable_overlap_scheduling", False):
        warnings.warn(
            "Inductor's overlap scheduling goes by estimates for an H200 in a simulated world, "
            "where kernels cannot be timed: on a GPU, collectives may be ordered and bucketed "
            "differently",
            stacklevel=2,
        )
    with ExitStack() as stack:
        stack.enter_context(config.patch(settings))
        if options is not None and not hasattr(options, "compute_estimator"):
            _estimate_ops_without_setting(stack)
        if not has_cuda():
            speeds = {
                "get_gpu_dram_gbps": _estimate_dram_gbps,  # until torch 2.14
                "get_device_dram_gbps": _estimate_dram_gbps,
                "get_device_tflops": _estimate_tflops,
            }
            for name, speed in speeds.items():
                if hasattr(_runtime_estimation, name):
                    replace_attribute(stack, _runtime_estimation, name, speed)
        yield


def _estimate_ops_without_setting(stack: ExitStack) -> None:
    """Make the overlap pass of torch 2.11 and 2.12, which always times ops, estimate them."""
    from torch._inductor.fx_passes import overlap_scheduling

    def estimate_op(
        node: torch.fx.Node, custom_runtime_estimation: Any = None
    ) -> tuple[float, str | None]:
        custom = custom_runtime_estimation and custom_runtime_estimation(node, None)
        return (_estimate_ms(node) if custom is None else custom), None

    replace_attribute(stack, overlap_scheduling, "benchmark_node_with_cache_key", estimate_op)
    replace_attribute(stack, overlap_scheduling, "estimate_runtime_analytical", _estimate_ms)


def _estimate_ms(node: torch.fx.Node) -> float:
    """How long an op takes if either its arithmetic or its memory traffic limits it."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    result = node.meta["val"]
    tensors = tensor_leaves((args, kwargs, result))
    count_flops = flop_registry.get(getattr(node.target, "overloadpacket", None))
    num_flops = count_flops(*args, **kwargs, out_val=result) if count_flops else 0
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    tflops = _estimate_tflops(tensors[0].dtype) if tensors else 1.0
    return max(num_flops / (tflops * 1e9), num_bytes / (_DRAM_GBPS * 1e6))


def _estimate_dram_gbps(device: Any = None) -> float:
    return _DRAM_GBPS


def _estimate_tflops(dtype: torch.dtype, device: Any = None) -> float:
    return _TFLOPS.get(dtype, _TFLOPS[torch.float32])


def _interpret(
    graph: torch.fx.GraphModule, inputs: Any, *, is_inference: bool = False, **_: Any
) -> Callable[..., Any]:
    """Compile a graph of aten ops: run the passes that precede code generation."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    compile_fx.view_to_reshape(graph)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(graph, inputs)
    with V.set_fake_mode(fake_mode), _estimating():  # a backward graph may come later, alone
        compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)
    for node in graph.graph.nodes:
        # Wraps an op that must follow others; the graph is run in order, and before torch 2.13
        # the wrapper cannot be run.
        if str(node.target) == "control_deps":
            _, subgraph, *args = node.args
            node.op, node.target, node.args = "call_module", subgraph.target, tuple(args)
        # Inductor makes ops on lists of tensors write to their arguments; they then return None.
        elif node.users and is_overload(node.target) and not op_schema(node.target).returns:
            for item in tuple(node.users):
                item.replace_all_uses_with(node.args[0][item.args[1]])
                graph.graph.erase_node(item)
    graph.recompile()
    boxed: Callable[..., Any] = make_boxed_func(graph)
    return boxed
