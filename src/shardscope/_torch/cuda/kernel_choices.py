"""Makes torch choose CUDA's ops for fake tensors, which C++ treats as CPU tensors.

torch chooses by device between fused and composite ops: the two have different DTensor rules and
save different tensors for backward. Until the context ends, fake tensors get the ops for CUDA.
Tensors with data are not affected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.library import Library, get_kernel
from torch.nn.attention import SDPBackend
from torch.optim import optimizer

from shardscope._torch.cuda.autocast import cuda_autocast
from shardscope._torch.dispatch import has_fake_tensors
from shardscope._torch.fake import FakeTensor
from shardscope._torch.private import find_name, is_missing, without_if_moved
from shardscope._torch.skip_dynamo import skip_dynamo

_foreach_utils = find_name(
    "torch.utils._foreach_utils", "clip gradients on lists of tensors, as on CUDA"
)
_has_kernel = find_name(
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key",
    "compare the values of ops that have a kernel for the CPU",
)

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MAX_CUDNN_HEAD = 256  # on Hopper
_MAX_FLASH_HEAD = 256
_priority_order = find_name(
    "torch._C._get_sdp_priority_order", "try attention kernels in the order of sdpa_kernel"
)
_sdp: Any = SDPBackend  # an enum of C++, whose members mypy does not know as numbers
_BACKENDS = {
    int(_sdp.CUDNN_ATTENTION): "cudnn",
    int(_sdp.FLASH_ATTENTION): "flash",
    int(_sdp.EFFICIENT_ATTENTION): "efficient",
    int(_sdp.MATH): "math",
}
_UNCHANGED_ORDER = None if is_missing(_priority_order) else _priority_order()
# Dtypes of input and weight with cuDNN kernels; torch uses its own kernels for larger batches.
_CUDNN_NORM_DTYPES = {
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, torch.float32),
}
_MAX_CUDNN_TRAINING, _MAX_CUDNN_EVAL = 880801, 65535
_CUDNN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CUDNN_GRID_DTYPES = (torch.float64, torch.float32, torch.float16)
_MAX_CUDNN_GRID_CHANNELS = 1024


@contextmanager
def cuda_choices(*, device_type: str) -> Iterator[None]:
    """Make torch choose ops for fake tensors on `device_type` as for CUDA tensors.

    `device_type` is "cuda" in a world with a simulated CUDA device, and "cpu" where the CPU stands
    for the GPU, as in `memory(model, step)` of a model on the CPU.
    """
    with ExitStack() as stack:
        stack.enter_context(without_if_moved(foreach_by_default(device_type)))
        stack.enter_context(without_if_moved(cuda_autocast(device_type=device_type)))
        library = Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name, choose in _CHOICES.items():
                answer = _for_fakes(choose, _find_own(name), device_type)
                library.impl(name, answer, "CompositeImplicitAutograd", with_keyset=True)
            # With a kernel for this device torch uses the op's own backward, as on CUDA.
            library.impl("_fused_rms_norm", _no_kernel, "CPU")
            for name, infer in _INFERRED.items():
                library.impl(name, infer, "Meta")
        yield


def _find_own(name: str) -> Callable[..., Any]:
    """torch's own kernel of an op for CPU tensors."""
    torchs_own: Callable[..., Any] = get_kernel(f"aten::{name}", "CPU").call_boxed
    if name != "rms_norm":
        return torchs_own
    composed = get_kernel("aten::_fused_rms_norm", "CPU")

    def compose(keyset: Any, x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        """Use torch's composite kernel, not the one that we register, which raises."""
        if x.device.type == "cpu":
            return composed.call_boxed(keyset, x, shape, weight, eps)[0]
        return torchs_own(keyset, x, shape, weight, eps)

    return compose


def _for_fakes(
    choose: Callable[..., Any], torchs_own: Callable[..., Any], device_type: str
) -> Callable[..., Any]:
    def dispatch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if has_fake_tensors(args) and args[0].device.type == device_type:
            result = choose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return torchs_own(keyset, *args, **kwargs)

    # Dynamo would compile it when it runs a graph on fake tensors, as it does for DDP.
    skip_dynamo(dispatch.__code__)
    return dispatch


def has_cpu_kernel(op: Any) -> bool:
    """Whether `op` runs on CPU tensors with data while `cuda_choices` is active."""
    if is_missing(_has_kernel):
        return True
    return op is not _aten._fused_rms_norm.default and bool(_has_kernel(op.name(), "CPU"))


def _no_kernel(*_: Any) -> Any:
    raise NotImplementedError(
        "torch.ops.aten._fused_rms_norm was called on a CPU tensor with data inside memory() or "
        'simulate(device="cuda"), which replace its kernel. Call torch.nn.functional.rms_norm '
        "instead."
    )


@contextmanager
def foreach_by_default(device_type: str) -> Iterator[None]:
    """Make optimizers use their foreach implementation, the default on CUDA, on fake tensors."""
    devices = optimizer._get_foreach_kernels_supported_devices
    lists: list[list[Any]] = [
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    ]
    extended = [types for types in lists if FakeTensor not in types]
    optimizer._get_foreach_kernels_supported_devices = lambda: [*devices(), device_type]
    for types in extended:
        types.append(FakeTensor)
    try:
        yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = devices
        for types in extended:
            types.remove(FakeTensor)


def _choose_rms_norm(
    x: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if weight is not None and weight.dtype != x.dtype:
        return NotImplemented
    return _aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]


def _choose_dropout(x: torch.Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1 or x.numel() == 0:
        return NotImplemented
    return _aten.native_dropout(x, p, train)[0]


def _choose_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if weight is None or bias is None or (running_mean is None and not training):
        return NotImplemented
    is_known = (x.dtype, weight.dtype) in _CUDNN_NORM_DTYPES and x.dim() > 2
    is_small = x.shape[0] <= (_MAX_CUDNN_TRAINING if training else _MAX_CUDNN_EVAL)
    if not (cudnn_enabled and is_known and is_small):
        return NotImplemented
    return _aten.cudnn_batch_norm(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )[0]


def _infer_stats(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the mean and inverse standard deviation of each channel."""
    dtype = torch.float32 if x.dtype in _HALF else x.dtype
    mean, deviation = (x.new_empty(x.shape[1], dtype=dtype) for _ in range(2))
    return mean, deviation


def _infer_normalized(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _infer_reduced_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor | None,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Shapes of two sums over the batch, and of the gradients of weight and bias."""
    scale = mean if weight is None else weight
    sums = [torch.empty_like(mean) if needs_input else None for _ in range(2)]
    scales = [torch.empty_like(scale) if needed else None for needed in (needs_weight, needs_bias)]
    return *sums, *scales


def _choose_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run the first of cuDNN, flash, memory-efficient and math attention that is usable."""
    inputs = (query, key, value)
    if query.dim() != 4 or any(tensor.numel() == 0 for tensor in inputs):
        return NotImplemented
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    mask = _as_bias(attn_mask, query)
    backend = _choose_backend(query, key, value, mask is not None)
    if backend == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend == "math":
        return _aten._scaled_dot_product_attention_math(
            *inputs, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    attend = _aten._scaled_dot_product_cudnn_attention
    if backend == "efficient":
        attend = _aten._scaled_dot_product_efficient_attention
        mask = None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])
    return attend(*inputs, mask, keeps, dropout_p, is_causal, scale=scale)[0]


def _choose_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, has_mask: bool
) -> str:
    """The attention backend that torch would choose on a Hopper GPU."""
    may_use = torch.backends.cuda
    heads = {query.shape[-1], key.shape[-1], value.shape[-1]}
    is_half = query.dtype in _HALF
    is_known = is_half or query.dtype == torch.float32
    shares_heads = not query.shape[1] == key.shape[1] == value.shape[1]
    is_usable = {
        "cudnn": may_use.cudnn_sdp_enabled()
        and is_half
        and query.shape[-1] == key.shape[-1]
        and max(heads) <= _MAX_CUDNN_HEAD
        and not any(head % 8 for head in heads),
        "flash": may_use.flash_sdp_enabled()
        and is_half
        and len(heads) == 1
        and not has_mask
        and max(heads) <= _MAX_FLASH_HEAD,
        "efficient": may_use.mem_efficient_sdp_enabled() and is_known and not shares_heads,
        "math": may_use.math_sdp_enabled(),
    }
    for backend in _order_backends():
        if is_usable[backend]:
            return backend
    raise RuntimeError(
        "No available kernel: none of the backends that are enabled for "
        f"scaled_dot_product_attention takes {query.dtype} with {max(heads)} elements per head on "
        "a Hopper GPU. Enable another with torch.nn.attention.sdpa_kernel, or cast the inputs."
    )


def _order_backends() -> tuple[str, ...]:
    """The backends in the order in which torch tries them; `sdpa_kernel` can set another one."""
    order = None if is_missing(_priority_order) else _priority_order()
    if order in (None, _UNCHANGED_ORDER):
        return "cudnn", "flash", "efficient", "math"
    return tuple(_BACKENDS[number] for number in order if number in _BACKENDS)


def _as_bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, never = (query.new_empty(()) for _ in range(2))
    return torch.where(mask, zero, never)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    head = query.shape[-1]
    padding = -head % 8
    if padding:
        query, key, value = (
            torch.nn.functional.pad(tensor, (0, padding)) for tensor in (query, key, value)
        )
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )[0]
    return out[..., :head] if padding else out


def _choose_softmax(op: Callable[..., Any]) -> Callable[..., Any]:
    """float16 becomes float32 inside CUDA's softmax kernels, without a copy of the input."""

    def choose(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if (x.dtype, dtype) != (torch.float16, torch.float32):
            return NotImplemented
        return op(x, dim, True)

    return choose


def _choose_grid_sampler(
    x: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool
) -> Any:
    is_known = all(tensor.dtype in _CUDNN_GRID_DTYPES for tensor in (x, grid))
    is_bilinear_with_zeros = mode == padding == 0
    if not (is_known and is_bilinear_with_zeros and align_corners and _may_use_cudnn(x)):
        return NotImplemented
    if x.dim() != 4 or x.shape[1] > _MAX_CUDNN_GRID_CHANNELS:
        return NotImplemented
    return _aten.cudnn_grid_sampler(x, grid)


def _infer_sampled(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], *grid.shape[1:3])


def _infer_sampled_gradients(
    x: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), grid.new_empty(grid.shape)


def _choose_lstm_cell(
    x: torch.Tensor,
    state: list[torch.Tensor],
    input_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> Any:
    hidden, cell = state
    gates = x @ input_weight.t(), hidden @ hidden_weight.t()
    return _aten._thnn_fused_lstm_cell(*gates, cell, input_bias, hidden_bias)[:2]


def _choose_gru_cell(
    x: torch.Tensor,
    hidden: torch.Tensor,
    input_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> Any:
    gates = x @ input_weight.t(), hidden @ hidden_weight.t()
    return _aten._thnn_fused_gru_cell(*gates, hidden, input_bias, hidden_bias)[0]


def _infer_gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hidden: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the new hidden state and of what backward needs: five values for each element."""
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape[0], 5 * hidden.shape[1])


def _infer_gru_cell_gradients(
    grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """Shapes of the gradients of the gates, of the hidden state and of the biases."""
    gates = grad.shape[0], 3 * grad.shape[1]
    biases = [grad.new_empty(gates[1]) if has_bias else None for _ in range(2)]
    return grad.new_empty(gates), grad.new_empty(gates), grad.new_empty(grad.shape), *biases


def _choose_recurrent(mode: int) -> Callable[..., Any]:
    """cuDNN's kernel of a recurrent layer; `mode` is cuDNN's number of the kind of layer."""

    def choose(
        x: torch.Tensor,
        state: torch.Tensor | list[torch.Tensor],
        weights: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not _may_use_cudnn(x):
            return NotImplemented
        hidden, cell = (state, None) if isinstance(state, torch.Tensor) else state
        size = (hidden if cell is None else cell).shape[2]
        projected = 0 if hidden.shape[2] == size else hidden.shape[2]
        weights_per_layer = (4 if has_biases else 2) + bool(projected)
        shape = size, projected, num_layers, batch_first, dropout, train, bidirectional
        flat_weights = x.new_empty(0)  # on a GPU, the storage of the weights
        output, *states = _aten._cudnn_rnn(
            x, weights, weights_per_layer, flat_weights, hidden, cell, mode, *shape, [], None
        )[:3]
        return (output, *states) if cell is not None else (output, states[0])

    return choose


def _infer_recurrent_gradients(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    weights_per_layer: int,
    flat_weights: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """Shapes of the gradients of the input, of both states and of the weights."""
    is_training, needed = rest[10], rest[-1]
    if not is_training:
        raise RuntimeError(
            "cuDNN computes the gradients of a recurrent layer in training mode only. Call "
            "train() on it, or disable cuDNN with torch.backends.cudnn.flags(enabled=False)."
        )
    inputs = [
        tensor.new_empty(tensor.shape) if tensor is not None and is_needed else None
        for tensor, is_needed in zip((x, hidden, cell), needed[:3], strict=True)
    ]
    return inputs[0], inputs[1], inputs[2], [torch.empty_like(weight) for weight in weights]


def _may_use_cudnn(x: torch.Tensor) -> bool:
    return torch.backends.cudnn.enabled and x.dtype in _CUDNN_DTYPES and x.numel() > 0


# Ops that have kernels for CUDA only, and none for fake tensors.
_INFERRED: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _infer_stats,
    "batch_norm_gather_stats_with_counts": _infer_stats,
    "batch_norm_elemt": _infer_normalized,
    "batch_norm_backward_reduce": _infer_reduced_gradients,
    "batch_norm_backward_elemt": _infer_normalized,
    "cudnn_grid_sampler": _infer_sampled,
    "cudnn_grid_sampler_backward": _infer_sampled_gradients,
    "_cudnn_rnn_backward": _infer_recurrent_gradients,
    "_thnn_fused_gru_cell": _infer_gru_cell,
    "_thnn_fused_gru_cell_backward": _infer_gru_cell_gradients,
}
_CHOICES: dict[str, Callable[..., Any]] = {
    "batch_norm": _choose_batch_norm,
    "dropout": _choose_dropout,
    "grid_sampler": _choose_grid_sampler,
    "gru.input": _choose_recurrent(3),
    "gru_cell": _choose_gru_cell,
    "log_softmax.int": _choose_softmax(_aten._log_softmax),
    "lstm.input": _choose_recurrent(2),
    "lstm_cell": _choose_lstm_cell,
    "rms_norm": _choose_rms_norm,
    "rnn_relu.input": _choose_recurrent(0),
    "rnn_tanh.input": _choose_recurrent(1),
    "scaled_dot_product_attention": _choose_attention,
    "softmax.int": _choose_softmax(_aten._softmax),
}
