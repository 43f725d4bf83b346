"""How each call of `torch.cuda`, `torch.accelerator` and their backends is answered without a GPU.

`CALLS` is the only list: `runtime` patches torch by it, the page docs/reference/simulated-gpu.md is
made from it, and a test calls all of it.

    python -m shardscope._torch.cuda.calls > docs/reference/simulated-gpu.md
"""

from __future__ import annotations

from contextlib import nullcontext
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, NamedTuple, final

import torch

from shardscope._torch.cuda import memory_statistics as memory
from shardscope._torch.cuda.host import (
    DEFAULT_STREAM,
    Event,
    OnDevice,
    Stream,
    answer_measurement,
    current_index,
    current_stream,
    host,
    note_use,
    num_devices,
    on_stream,
    read_index,
    set_device,
    set_stream,
)
from shardscope.errors import WorldError


class Kind(StrEnum):
    """How a call is answered."""

    ANSWERED = "answered"
    NOTHING = "does nothing"
    UNKNOWN = "nan, with a gap"
    REFUSED = "refused"


class Call(NamedTuple):
    """How a call is answered, and what the page says about it.

    Without an `answer`, a call that is not refused runs torch's own code.
    """

    kind: Kind
    note: str = ""
    answer: Any = None


@final
class RefusedObject:
    """An object whose attributes cannot be read without a GPU, except those that are named."""

    def __init__(self, name: str, **known: Any) -> None:
        vars(self).update(known, _name=name)

    def __getattr__(self, name: str) -> Any:
        raise refusal(f"{self._name}.{name}")


def refusal(name: str, note: str = "") -> WorldError:
    """The error of a call that has no result without a GPU."""
    reason = f" {note[0].upper()}{note[1:]}." if note else ""
    return WorldError(
        f"{name}() was called in a simulated world on a machine without a GPU, where it has no "
        f"result.{reason} Leave the call out, or run on a machine with a GPU."
    )


def _answered(note: str, answer: Any) -> Call:
    return Call(Kind.ANSWERED, note, answer)


def _own(note: str = "torch's own code") -> Call:
    return Call(Kind.ANSWERED, note)


def _unknown(name: str) -> Call:
    def call(*_: Any, **__: Any) -> float:
        return answer_measurement(name)

    return Call(Kind.UNKNOWN, "nothing is measured on a simulated GPU", call)


def _nothing(*_: Any, **__: Any) -> None: ...


def refuse_data() -> None:
    """Raise: torch calls this before it creates a tensor with data on the device."""
    raise WorldError(
        'A tensor with data was created on "cuda", on a machine without a GPU. In a simulated '
        "world, create it on the thread that entered the world, where tensors have no data."
    )


def _set_sync_debug_mode(mode: Any) -> None:
    host.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)


def _check_error(code: int) -> None:
    if code:
        raise WorldError(
            f"torch.cuda.check_error() got the error code {code}. In a simulated world, functions "
            "of torch.cuda.cudart() return 0: check where the code comes from."
        )


def _generator(device: Any = None) -> torch.Generator:
    note_use()
    generator: torch.Generator = torch.cuda.default_generators[read_index(device)]
    return generator


def _set_all_states(states: Any) -> None:
    for generator, state in zip(torch.cuda.default_generators, states, strict=False):
        generator.set_state(state)


def _seed_all(seed: int | None = None) -> None:
    generators: list[torch.Generator] = list(torch.cuda.default_generators)
    first = generators[0]
    seed = int(first.seed() if seed is None else first.manual_seed(int(seed)).initial_seed())
    for generator in generators[1:]:
        generator.manual_seed(seed)


def _properties(device: Any = None) -> Any:
    note_use()
    return host.gpu.at(read_index(device))


_CUDART = RefusedObject(
    "torch.cuda.cudart()",
    cudaError=SimpleNamespace(success=0),
    cudaGetErrorString=lambda code: "no error" if not code else "unknown error",
    cudaHostRegister=lambda *_: 0,
    cudaHostUnregister=lambda *_: 0,
    cudaMemGetInfo=memory.read_free_and_total,
    cudaProfilerStart=lambda *_: 0,
    cudaProfilerStop=lambda *_: 0,
)

_NOTHING = Call(Kind.NOTHING, answer=_nothing)
_REFUSED = Call(Kind.REFUSED)
_GRAPHS = Call(Kind.REFUSED, "CUDA graphs replay kernels, and none run here")
_POOLS = Call(Kind.REFUSED, "separate memory pools and allocators are not modelled")
_HISTORY = Call(
    Kind.REFUSED, "the recording of `shardscope run` has the memory by module and phase instead"
)
_PINNED = Call(Kind.REFUSED, "pinned memory of the host is not counted")
_SEVERAL = Call(Kind.REFUSED, "a simulated rank uses one GPU")
_MODEL = "by the model of the allocator"
_TENSOR_TYPES = {
    f"{name}Tensor": dtype
    for name, dtype in {
        "BFloat16": torch.bfloat16, "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8,
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "Int": torch.int32,
        "Long": torch.int64, "Short": torch.int16,
    }.items()
}  # fmt: skip
"""The classes of tensors on a GPU, such as `torch.cuda.FloatTensor`, with their dtypes."""

_STORAGES = tuple(
    f"{name}Storage"
    for name in (
        "BFloat16", "Bool", "Byte", "Char", "ComplexDouble", "ComplexFloat", "Double", "Float",
        "Half", "Int", "Long", "Short",
    )
)  # fmt: skip

_CUDA: dict[str, Call] = {
    # Devices
    "can_device_access_peer": _answered("True", lambda device, peer_device: True),
    "current_device": _answered("the current index", current_index),
    "device": _answered("makes a device current", OnDevice),
    "device_count": _answered("`--nproc-per-node`, or 8", num_devices),
    "device_of": _answered("makes a tensor's device current", OnDevice),
    "get_arch_list": _answered(
        "that of the GPU", lambda: [f"sm_{host.gpu.major}{host.gpu.minor}"]
    ),
    "get_device_capability": _answered(
        "that of the GPU", lambda device=None: (_properties(device).major, host.gpu.minor)
    ),
    "get_device_name": _answered("that of the GPU", lambda device=None: _properties(device).name),
    "get_device_properties": _answered(
        "those of the GPU; UUID and PCI bus ID are derived from the index", _properties
    ),
    "get_gencode_flags": _own("for the GPU's architecture"),
    "init": _answered("notes that the program uses a GPU", note_use),
    "ipc_collect": _NOTHING,
    "is_available": _answered("True", lambda: True),
    "is_bf16_supported": _answered("True", lambda including_emulation=True: True),
    "is_initialized": _answered("whether a GPU was used", lambda: host.is_initialized),
    "is_tf32_supported": _answered("True", lambda: True),
    "set_device": _answered("makes a device current", set_device),
    "synchronize": _NOTHING,
    "_sleep": _NOTHING,
    "_lazy_init": _answered("refuses tensors with data on a GPU", refuse_data),
    # Streams and events
    "Event": _answered("always complete; `elapsed_time` is nan, with a gap", Event),
    "ExternalStream": _REFUSED,
    "Stream": _answered("orders nothing", Stream),
    "StreamContext": _answered("makes a stream current", on_stream),
    "current_stream": _answered("the current stream", current_stream),
    "default_stream": _answered("a stream", lambda device=None: DEFAULT_STREAM),
    "get_stream_from_external": _REFUSED,
    "is_current_stream_capturing": _answered("False", lambda: False),
    "set_stream": _answered("makes a stream current", set_stream),
    "stream": _answered("makes a stream current", on_stream),
    "get_sync_debug_mode": _answered("as it was set", lambda: host.sync_debug_mode),
    "set_sync_debug_mode": _answered("remembered; nothing waits", _set_sync_debug_mode),
    # Memory
    "caching_allocator_alloc": _POOLS,
    "caching_allocator_delete": _POOLS,
    "caching_allocator_disabled": _POOLS,
    "caching_allocator_enable": _POOLS,
    "change_current_allocator": _POOLS,
    "CUDAPluggableAllocator": _POOLS,
    "MemPool": _POOLS,
    "use_mem_pool": Call(
        Kind.REFUSED, "only the pool of symmetric memory is accepted, and it has no effect"
    ),
    "device_memory_used": _answered(f"{_MODEL}, with CUDA's context", memory.read_used),
    "empty_cache": _answered("gives back free segments", memory.empty_cache),
    "get_allocator_backend": _answered("native", lambda: "native"),
    "get_per_process_memory_fraction": _answered(
        "as it was set", lambda device=None: host.memory_fraction
    ),
    "host_memory_stats": _PINNED,
    "host_memory_stats_as_nested_dict": _PINNED,
    "list_gpu_processes": _answered("this process", memory.list_processes),
    "max_memory_allocated": _answered(_MODEL, memory.read_peak_allocated),
    "max_memory_cached": _answered(_MODEL, memory.read_peak_reserved),
    "max_memory_reserved": _answered(_MODEL, memory.read_peak_reserved),
    "mem_get_info": _answered(f"{_MODEL}, with CUDA's context", memory.read_free_and_total),
    "memory_allocated": _answered(_MODEL, memory.read_allocated),
    "memory_cached": _answered(_MODEL, memory.read_reserved),
    "memory_reserved": _answered(_MODEL, memory.read_reserved),
    "memory_snapshot": _HISTORY,
    "memory_stats": _answered(_MODEL, memory.read_flat),
    "memory_stats_as_nested_dict": _answered(_MODEL, memory.read_nested),
    "memory_summary": _own(_MODEL),
    "reset_accumulated_host_memory_stats": _NOTHING,
    "reset_accumulated_memory_stats": _answered("resets sums", memory.reset_totals),
    "reset_max_memory_allocated": _answered("resets peaks", memory.reset_peaks),
    "reset_max_memory_cached": _answered("resets peaks", memory.reset_peaks),
    "reset_peak_host_memory_stats": _NOTHING,
    "reset_peak_memory_stats": _answered("resets peaks", memory.reset_peaks),
    "set_per_process_memory_fraction": _answered(
        "remembered; nothing is refused beyond it", memory.set_fraction
    ),
    # Random numbers
    "default_generators": _own("one for each GPU"),
    "get_rng_state": _answered("the seed", lambda device="cuda": _generator(device).get_state()),
    "get_rng_state_all": _answered(
        "the seeds", lambda: [generator.get_state() for generator in torch.cuda.default_generators]
    ),
    "initial_seed": _answered("the seed", lambda: _generator().initial_seed()),
    "manual_seed": _answered("sets the seed", lambda seed: _generator().manual_seed(int(seed))),
    "manual_seed_all": _answered("sets the seeds", _seed_all),
    "seed": _answered("sets the seed", lambda: _generator().seed()),
    "seed_all": _answered("sets the seeds", _seed_all),
    "set_rng_state": _answered(
        "sets the seed", lambda new_state, device="cuda": _generator(device).set_state(new_state)
    ),
    "set_rng_state_all": _answered("sets the seeds", _set_all_states),
    # Graphs
    "CUDAGraph": _GRAPHS,
    "export_dot": _GRAPHS,
    "export_graph_data": _GRAPHS,
    "graph": _GRAPHS,
    "graph_pool_handle": _GRAPHS,
    "make_graphed_callables": _GRAPHS,
    # Measurements
    "clock_rate": _unknown("torch.cuda.clock_rate"),
    "memory_usage": _unknown("torch.cuda.memory_usage"),
    "power_draw": _unknown("torch.cuda.power_draw"),
    "temperature": _unknown("torch.cuda.temperature"),
    "utilization": _unknown("torch.cuda.utilization"),
    # CUDA's libraries
    "check_error": _answered("raises if the code is not 0", _check_error),
    "cudart": _answered("profiler, host registration and memory", lambda: _CUDART),
    "current_blas_handle": _REFUSED,
    "current_solver_handle": _REFUSED,
    "GreenContext": _REFUSED,
    "has_half": _own("True"),
    "has_magma": _own(),
    # Classes
    **{
        name: _answered("makes tensors on the GPU", dtype) for name, dtype in _TENSOR_TYPES.items()
    },
    **dict.fromkeys(_STORAGES, _REFUSED),
    **dict.fromkeys(
        (
            "AcceleratorError", "CudaError", "DeferredCudaCallError", "OutOfMemoryError",
            "cudaStatus",
        ),
        _own(),
    ),
}  # fmt: skip

_ACCELERATOR: dict[str, Call] = {
    "Graph": _GRAPHS,
    "current_accelerator": _answered(
        'torch.device("cuda")', lambda *_, **__: torch.device("cuda")
    ),
    **dict.fromkeys(("current_device_idx", "current_device_index"), _CUDA["current_device"]),
    "current_stream": _CUDA["current_stream"],
    "device_count": _CUDA["device_count"],
    "device_index": _CUDA["device"],
    "empty_cache": _CUDA["empty_cache"],
    "empty_host_cache": _NOTHING,
    "get_device_capability": _REFUSED,
    "get_memory_info": _CUDA["mem_get_info"],
    "is_available": _CUDA["is_available"],
    **{
        name: _CUDA[name]
        for name in (
            "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved",
            "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
        )
    },
    "set_device_idx": _CUDA["set_device"],
    "set_device_index": _CUDA["set_device"],
    "set_stream": _CUDA["set_stream"],
    "synchronize": _NOTHING,
}  # fmt: skip

CALLS: dict[str, dict[str, Call]] = {
    "torch.cuda": _CUDA,
    "torch.cuda.memory": {
        "_dump_snapshot": _HISTORY,
        "_record_memory_history": _HISTORY,
        "_save_memory_usage": _HISTORY,
        "_save_segment_usage": _HISTORY,
        "_set_allocator_settings": _NOTHING,
        "_snapshot": _HISTORY,
    },
    "torch.accelerator": _ACCELERATOR,
    "torch.cuda.amp": dict.fromkeys(
        ("GradScaler", "autocast", "custom_bwd", "custom_fwd"), _own("as on a GPU")
    ),
    "torch.cuda.nvtx": {
        **dict.fromkeys(
            ("mark", "range_end", "range_pop", "range_push", "range_start"),
            Call(Kind.NOTHING, "returns 0", lambda *_, **__: 0),
        ),
        "range": Call(Kind.NOTHING),
    },
    "torch.cuda.profiler": {
        **dict.fromkeys(("start", "stop"), _NOTHING),
        "init": _REFUSED,
        "profile": Call(Kind.NOTHING),
    },
    "torch.cuda.nccl": {
        "version": _answered("(2, 27, 3)", lambda: (2, 27, 3)),
        **dict.fromkeys(
            (
                "all_gather", "all_reduce", "broadcast", "init_rank", "is_available", "reduce",
                "reduce_scatter", "unique_id",
            ),
            Call(Kind.REFUSED, "use torch.distributed"),
        ),
    },
    "torch.cuda.comm": dict.fromkeys(
        (
            "broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced",
            "scatter",
        ),
        _SEVERAL,
    ),
    "torch.cuda.graphs": dict.fromkeys(
        (
            "register_graph_capture_end_hook", "register_graph_capture_start_hook",
            "register_graph_destroy_hook", "register_graph_instantiate_hook",
            "register_graph_replay_end_hook", "register_graph_replay_start_hook",
        ),
        _GRAPHS,
    ),
    "torch.cuda.tunable": {
        **dict.fromkeys(
            (
                "enable", "record_untuned_enable", "set_cublaslt_requested_algo_count",
                "set_filename", "set_max_tuning_duration", "set_max_tuning_iterations",
                "set_numerical_check_tolerances", "set_rotating_buffer_size", "tuning_enable",
                "wildcard_fallback_enable",
            ),
            Call(Kind.NOTHING, "kernels are not tuned", _nothing),
        ),
        **dict.fromkeys(
            (
                "dynamic_dims_mask", "get_cublaslt_requested_algo_count", "get_filename",
                "get_max_tuning_duration", "get_max_tuning_iterations", "get_results",
                "get_rotating_buffer_size", "get_validators", "is_enabled",
                "mgpu_tune_gemm_in_file", "read_file", "record_untuned_is_enabled",
                "tune_gemm_in_file", "tuning_is_enabled", "wildcard_fallback_is_enabled",
            ),
            _REFUSED,
        ),
    },
    "torch.cuda.jiterator": dict.fromkeys(
        ("_create_jit_fn", "_create_multi_output_jit_fn"), _REFUSED
    ),
    "torch.cuda.gds": {
        **dict.fromkeys(("GdsFile", "gds_deregister_buffer", "gds_register_buffer"), _REFUSED),
        "is_available": _answered("False", lambda: False),
    },
    "torch.cuda.green_contexts": dict.fromkeys(
        ("SMPartition", "get_num_locality_domains", "is_localization_supported"), _REFUSED
    ),
    "torch.cuda.sparse": dict.fromkeys(
        (name for name in _TENSOR_TYPES if name != "BoolTensor"), _REFUSED
    ),
    "torch.backends.cuda": {
        "cufft_plan_cache": _answered(
            "its attributes are refused", RefusedObject("torch.backends.cuda.cufft_plan_cache")
        ),
        "is_built": _own("whether this torch was built with CUDA"),
        "is_ck_sdpa_available": _answered("False", lambda: False),
        "is_flash_attention_available": _answered("True", lambda: True),
        **dict.fromkeys(
            ("can_use_cudnn_attention", "can_use_efficient_attention", "can_use_flash_attention"),
            Call(Kind.REFUSED, "the attention kernel is chosen by a model of torch's rules"),
        ),
        **dict.fromkeys(
            ("blas_workspace_size", "cublas_workspace_size", "cublaslt_workspace_size"), _REFUSED
        ),
        **dict.fromkeys(
            (
                "SDPAParams", "allow_fp16_bf16_reduction_math_sdp", "cuBLASModule",
                "cuFFTPlanCache", "cuFFTPlanCacheAttrContextProp", "cuFFTPlanCacheManager",
                "cudnn_sdp_enabled", "enable_cudnn_sdp", "enable_flash_sdp", "enable_math_sdp",
                "enable_mem_efficient_sdp", "flash_sdp_enabled",
                "fp16_bf16_reduction_math_sdp_allowed", "math_sdp_enabled", "matmul",
                "mem_efficient_sdp_enabled", "preferred_blas_library", "preferred_linalg_library",
                "preferred_rocm_fa_library", "sdp_kernel",
            ),
            _own(),
        ),
    },
    "torch.backends.cudnn": {
        # nn.LSTM asks before it lays out its weights, and would warn that cuDNN is missing.
        "is_acceptable": _answered("False", lambda tensor: False),
        "is_available": _answered("True", lambda: True),
        "version": _answered("91900", lambda: 91900),
        **dict.fromkeys(
            ("allow_tf32", "benchmark", "benchmark_limit", "deterministic", "enabled", "flags"),
            _own(),
        ),
    },
    "torch.autograd.profiler": {
        "emit_nvtx": Call(Kind.NOTHING, "no profiler reads ranges", lambda *_, **__: nullcontext()),
    },
    "torch.version": {"cuda": _answered('that of torch, or "13.0"', torch.version.cuda or "13.0")},
}  # fmt: skip
"""Every call, by its module and name. A public name that is missing here is refused."""

_HEADER = """# The simulated GPU

How each call of `torch.cuda`, `torch.accelerator` and their backends is answered in a program that
`shardscope run` starts, and in `simulate(device="cuda")`, on a machine without a GPU. This page is
generated by `python -m shardscope._torch.cuda.calls` from the table that the simulation uses.

- **answered**: the call returns the described result, or runs torch's own code.
- **does nothing**: the call has no effect.
- **nan, with a gap**: the call measures something. It returns `nan`, and the recording has a gap
  with the line. `simulate()`, which makes no recording, refuses it.
- **refused**: the call raises an error with its name, and a launched program ends there.

Memory is counted by a model of CUDA's caching allocator, from the program's first tensor on: the
storages of tensors on the GPU, and the workspaces of kernels. Nothing is refused for lack of
memory: a program that does not fit finds 0 bytes free, and the summary says so.
"""


def make_page() -> str:
    """The page of the documentation that lists all calls, as Markdown."""
    parts = [_HEADER]
    for module, calls in CALLS.items():
        rows = [f"| `{name}` | {call.kind} | {call.note} |" for name, call in calls.items()]
        header = [f"## `{module}`", "", "| name | how | result |", "|---|---|---|"]
        parts.append("\n".join([*header, *sorted(rows, key=str.casefold), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(make_page(), end="")
