"""Autocast as CUDA has it, for fake tensors that C++ takes for the CPU's.

CUDA and the CPU cast different ops, and `torch.autocast("cuda")` does nothing to tensors of the
CPU.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

from shardscope._torch.dispatch import has_fakes

__all__ = ["cuda_autocast"]

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

_IN_FP32 = (  # as the documentation of torch.amp lists them for CUDA
    _aten.cosine_similarity.default,
    _aten.erfinv.default,
    _aten.exp.default,
    _aten.expm1.default,
    _aten.group_norm.default,
    _aten.layer_norm.default,
    _aten.log.default,
    _aten.log10.default,
    _aten.log1p.default,
    _aten.log2.default,
    _aten.logsumexp.default,
    _aten.pow.Scalar,
    _aten.pow.Tensor_Scalar,
    _aten.pow.Tensor_Tensor,
    _aten.reciprocal.default,
    _aten.renorm.default,
    _aten.rms_norm.default,
    _aten.rsqrt.default,
    _aten.softplus.default,
    _aten.tan.default,
)
# The kernels of these cast as they read: no copy in fp32 is made.
_TO_FP32 = (
    _aten.cumprod.default,
    _aten.cumsum.default,
    _aten.log_softmax.int,
    _aten.softmax.int,
    _aten.sum.default,
    _aten.sum.dim_IntList,
)


@contextmanager
def cuda_autocast(*, device_type: str) -> Iterator[None]:
    """Make `torch.autocast("cuda")` cast fake tensors on `device_type` as it casts CUDA's."""
    library = Library("aten", "IMPL")
    autocast: Any = torch.autocast
    before = autocast.__init__, autocast.__enter__, autocast.__exit__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for op in _IN_FP32:
                _register(library, op, _run_in_fp32(op))
            for op in _TO_FP32:
                _register(library, op, _run_to_fp32(op))
        if device_type == "cpu":
            autocast.__init__ = _for_cpu(autocast.__init__)
        else:
            autocast.__enter__, autocast.__exit__ = _with_cpu(*before[1:])
        yield
    finally:
        autocast.__init__, autocast.__enter__, autocast.__exit__ = before
        library._destroy()


def _register(library: Library, op: Any, run: Callable[..., Any]) -> None:
    library.impl(op.name().removeprefix("aten::"), run, "AutocastCPU")


def _for_cpu(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_for_cpu(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        make(self, device_type, dtype, *args, **kwargs)

    return make_for_cpu


def _with_cpu(
    enter: Callable[..., Any], leave: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Enter autocast for the CPU inside of CUDA's: Python sees the one, C++ heeds the other."""

    @functools.wraps(enter)
    def enter_both(self: Any) -> Any:
        entered = enter(self)
        if self.device == "cuda":
            self.inner = torch.autocast(
                "cpu", self.fast_dtype, self._enabled, cache_enabled=self._cache_enabled
            )
            self.inner.__enter__()
        return entered

    @functools.wraps(leave)
    def leave_both(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            self.inner.__exit__(*error)
        return leave(self, *error)

    return enter_both, leave_both


def _run_in_fp32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if has_fakes(args):
                args = tuple(_in_fp32(arg) for arg in args)
            return op(*args, **kwargs)

    return run


def _run_to_fp32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if has_fakes(args) and args[0].dtype in _HALF and not _has_dtype(args, kwargs):
                kwargs = {**kwargs, "dtype": torch.float32}
                args = args[:-1] if args[-1] is None else args
            return op(*args, **kwargs)

    return run


def _has_dtype(args: Any, kwargs: Any) -> bool:
    return any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values()))


def _in_fp32(arg: Any) -> Any:
    is_half = isinstance(arg, torch.Tensor) and arg.dtype in _HALF
    return arg.float() if is_half else arg
