"""CUDA's autocast for fake tensors that C++ dispatches as CPU tensors.

CUDA and the CPU cast different ops, and `torch.autocast("cuda")` does not affect CPU tensors. The
ops are listed by the casting policies of torch's `autocast_mode.h`: fp32, fp32_set_opt_dtype,
fp32_append_dtype, promote, lower_precision_fp, and ops that are banned.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

from shardscope._torch.dispatch import has_fake_tensors
from shardscope._torch.private import find_name
from shardscope._torch.tree import map_tensor_leaves, tensor_leaves

_HALF = (torch.float16, torch.bfloat16)
_WIDE = (*_HALF, torch.float32)

_get_registrations = find_name(
    "torch._C._dispatch_get_registrations_for_dispatch_key", "list the ops that autocast casts"
)

# Ops by their policy under torch.autocast("cuda"), named without their overload.
FP32 = frozenset(
    [
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "acos",
        "asin",
        "binary_cross_entropy_with_logits",
        "cdist",
        "cosh",
        "cosine_embedding_loss",
        "cosine_similarity",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "frobenius_norm",
        "group_norm",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "linalg_matrix_sqrth",
        "log",
        "log10",
        "log1p",
        "log2",
        "logsumexp",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "native_layer_norm",
        "nll_loss",
        "nll_loss2d",
        "nuclear_norm",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "reciprocal",
        "renorm",
        "rms_norm",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softplus",
        "tan",
        "triplet_margin_loss",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "upsample_trilinear3d",
    ]
)
# These get dtype=torch.float32: their kernels cast while they read, without an fp32 copy.
FP32_SET_OPT_DTYPE = frozenset(
    [
        "cumprod",
        "cumsum",
        "linalg_matrix_norm",
        "linalg_vector_norm",
        "log_softmax",
        "prod",
        "softmax",
        "sum",
    ]
)
FP32_APPEND_DTYPE = frozenset({"norm"})  # runs the overload that takes a dtype
PROMOTE = frozenset(
    [
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "grid_sampler",
        "index_put",
        "scatter_add",
        "tensordot",
        "vdot",
    ]
)
BANNED = frozenset({"binary_cross_entropy"})
LOWER_PRECISION_FP = frozenset(
    [
        "_convolution",
        "_cudnn_rnn",
        "_scaled_dot_product_flash_attention",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "einsum",
        "gru_cell",
        "linalg_multi_dot",
        "linalg_vecdot",
        "linear",
        "lstm_cell",
        "matmul",
        "mm",
        "mv",
        "prelu",
        "rnn_relu_cell",
        "rnn_tanh_cell",
        "scaled_dot_product_attention",
    ]
)


# Ops that torch lists for CUDA only if it was built with cuDNN.
_OF_CUDNN = {"_cudnn_rnn"}


@contextmanager
def cuda_autocast(*, device_type: str) -> Iterator[None]:
    """Apply `torch.autocast("cuda")` to fake tensors on `device_type` as to CUDA tensors."""
    library = Library("aten", "IMPL")
    destroy = library._destroy
    autocast: Any = torch.autocast
    before = autocast.__init__, autocast.__enter__, autocast.__exit__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            _cast_as_cuda_does(library, device_type)
        if device_type == "cpu":
            autocast.__init__ = _for_cpu(autocast.__init__)
        else:
            autocast.__enter__, autocast.__exit__ = _with_cpu(*before[1:])
        yield
    finally:
        autocast.__init__, autocast.__enter__, autocast.__exit__ = before
        destroy()


def _cast_as_cuda_does(library: Library, device_type: str) -> None:
    """Register CUDA's ops and policies for AutocastCPU, the key that C++ uses for fake tensors."""
    on_cuda = _list_ops("AutocastCUDA") | _OF_CUDNN
    on_cpu = _list_ops("AutocastCPU")
    for name in on_cpu - on_cuda:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
    for name in on_cuda:
        cast = _find_policy(name.partition(".")[0], is_on_cpu=name in on_cpu)
        if cast is not None:
            library.impl(name, _run(_find_op(name), cast, device_type), "AutocastCPU")


def _list_ops(key: str) -> set[str]:
    """The ops, with their overloads, that have a kernel for a dispatch key."""
    return {
        name.removeprefix("aten::")
        for name in _get_registrations(key)
        if name.startswith("aten::") and "ame" not in name.partition(".")[2]  # named dims
    }


def _find_op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # an op and its arguments
Cast = Callable[[Any, tuple[Any, ...], dict[str, Any], torch.dtype], Call]


def _find_policy(packet: str, *, is_on_cpu: bool) -> Cast | None:
    """The cast of an op; None if torch's own AutocastCPU kernel does the same."""
    if packet in LOWER_PRECISION_FP:
        return None if is_on_cpu else _cast_to_lower_precision
    for names, cast in (
        (FP32, _cast_to_fp32),
        (FP32_SET_OPT_DTYPE, _set_opt_dtype),
        (FP32_APPEND_DTYPE, _append_dtype),
        (PROMOTE, _cast_to_widest),
        (BANNED, _raise_banned),
    ):
        if packet in names:
            return cast
    return None


def _run(op: Any, cast: Cast, device_type: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            tensors = tensor_leaves(args) if has_fake_tensors(args) else []
            if not any(tensor.device.type == device_type for tensor in tensors):
                return op(*args, **kwargs)
            called, args, kwargs = cast(op, args, kwargs, dtype)
            return called(*args, **kwargs)

    return run


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
    """Enter CPU autocast inside CUDA autocast: Python reads the latter, C++ uses the former."""

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


def _cast_to_lower_precision(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Call:
    return op, _cast_all(args, dtype), kwargs


def _cast_to_fp32(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Call:
    return op, _cast_all(args, torch.float32), kwargs


def _set_opt_dtype(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Call:
    has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    if args[0].dtype not in _HALF or has_dtype:
        return op, args, kwargs
    return op, args, {**kwargs, "dtype": torch.float32}


def _append_dtype(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Call:
    if args[0].dtype not in _WIDE:
        return op, args, kwargs
    norm = torch.ops.aten.norm
    tensor, p, *dims = args if len(args) > 1 else (*args, 2)
    if not dims:
        return norm.ScalarOpt_dtype, (tensor, p), {"dtype": torch.float32}
    dim, keepdim = dims if len(dims) > 1 else (*dims, False)
    return norm.ScalarOpt_dim_dtype, (tensor, p, dim, keepdim), {"dtype": torch.float32}


def _cast_to_widest(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Call:
    if any(tensor.dtype == torch.float32 for tensor in tensor_leaves(args)):
        dtype = torch.float32
    return op, _cast_all(args, dtype), kwargs


def _raise_banned(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Call:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss cannot be run under "
        "torch.autocast on CUDA. Use torch.nn.functional.binary_cross_entropy_with_logits or "
        "torch.nn.BCEWithLogitsLoss."
    )


def _cast_all(args: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """The arguments with their floating-point tensors, except float64, cast to `dtype`."""
    return map_tensor_leaves(
        lambda tensor: tensor.to(dtype) if tensor.dtype in _WIDE else tensor, args
    )
