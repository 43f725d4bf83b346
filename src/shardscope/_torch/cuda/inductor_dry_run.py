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

from shardscope._torch.cuda.runtime import has_cuda, replace_attribute

__all__ = ["inductor_without_codegen"]


_MODULE = "torch._inductor.compile_fx"
# Padding is decided by timing kernels, cached code would be run on tensors without data, and
# folded constants would be computed on the device.
_SETTINGS = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "shape_padding": False,
    "joint_graph_constant_folding": False,
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
    graph.recompile()
    boxed: Callable[..., Any] = make_boxed_func(graph)
    return boxed
