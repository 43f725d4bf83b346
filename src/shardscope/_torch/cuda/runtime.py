"""The parts of `torch.cuda` and `torch.accelerator` that can be simulated without a GPU.

Streams and events have no effect, since nothing is computed; the device's properties are those of
the GPU that `memory` models. A public function of `torch.cuda` that cannot be simulated raises
`WorldError` with its name.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import DefaultDeviceType

from shardscope._torch.cuda.gpus import DEFAULT_GPU, GPUS, GpuProperties
from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.dtensor import dtensor_random
from shardscope._torch.private import find_name, without_if_moved
from shardscope.errors import WorldError

_fsdp1_init = find_name(
    "torch.distributed.fsdp._init_utils", "let FSDP1 select a simulated CUDA device"
)
_SyncBatchNorm = find_name(
    "torch.nn.modules._functions.SyncBatchNorm", "gather the statistics of batches without data"
)


_NCCL_VERSION = (2, 27, 3)
_ABSENT = object()


class _Current(threading.local):
    index = 0
    stream: Stream | None = None


_current = _Current()


@final
class _Host:
    """The simulated host of this process: how many GPUs it has, and which."""

    num_devices = 8
    gpu: GpuProperties = GPUS[DEFAULT_GPU]
    is_initialized = True  # whether the program has used a GPU


_host = _Host()


def note_use() -> None:
    """Note that the program uses a GPU: torch initializes CUDA then.

    A mesh that is made before selects the GPU of the process by its local rank.
    """
    _host.is_initialized = True


def num_devices() -> int:
    """How many GPUs the simulated host has."""
    return _host.num_devices


def has_cuda() -> bool:
    """Whether this process uses CUDA on a real device."""
    return bool(torch.cuda.is_initialized()) and not is_simulated()


def is_simulated() -> bool:
    """Whether torch.cuda is patched for a simulated device."""
    stream_class: Any = torch.cuda.Stream
    return stream_class is Stream


def current_index() -> int:
    """The index of this thread's current CUDA device."""
    note_use()
    return _current.index


def replace_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class or module until the stack closes."""
    before = vars(owner).get(
        name, _ABSENT
    )  # not getattr: an inherited attribute is deleted, not set
    if before is _ABSENT:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, before)
    setattr(owner, name, value)


@contextmanager
def simulated_runtime(
    num_devices: int = 8, gpu: str = DEFAULT_GPU, *, is_initialized: bool = True
) -> Iterator[None]:
    """Patch torch.cuda and torch.accelerator for simulated devices until the context ends."""
    with ExitStack() as stack:
        replace_attribute(stack, _host, "num_devices", num_devices)
        replace_attribute(stack, _host, "gpu", GPUS[gpu])
        replace_attribute(stack, _host, "is_initialized", is_initialized)
        stack.callback(_set_current, _current.index, _current.stream)
        _set_current(0, None)
        for name in torch.cuda.__all__:
            function = getattr(torch.cuda, name, None)
            if callable(function) and not isinstance(function, type | ModuleType):
                refuse = _refuse(f"torch.cuda.{name}")
                if hasattr(function, "__wrapped__"):  # which dynamo reads of context managers
                    vars(refuse)["__wrapped__"] = function.__wrapped__
                replace_attribute(stack, torch.cuda, name, refuse)
        for name, answer in _CUDA.items():
            replace_attribute(stack, torch.cuda, name, _distinct(answer))
        for name, answer in _ACCELERATOR.items():
            if hasattr(torch.accelerator, name):
                replace_attribute(stack, torch.accelerator, name, _distinct(answer))
        replace_attribute(stack, torch._C, "_get_accelerator", _distinct(_current_accelerator))
        for module in (dist, distributed_c10d):
            replace_attribute(stack, module, "is_nccl_available", lambda: True)
        # torch logs it if a collective fails.
        make_fsdp1 = _with_device(FullyShardedDataParallel.__init__)
        replace_attribute(stack, FullyShardedDataParallel, "__init__", make_fsdp1)
        replace_attribute(stack, _fsdp1_init, "_get_compute_device", _current_cuda_device)
        stack.enter_context(without_if_moved(_hooks_in_bfloat16()))
        for name in _WITHOUT_ANSWER:
            replaced = getattr(torch.cuda, name, None)
            if replaced is not None:
                refuse = replacement_class(replaced, _refuse(f"torch.cuda.{name}"))
                replace_attribute(stack, torch.cuda, name, refuse)
        for name in ("mark", "range_end", "range_pop", "range_push", "range_start"):
            replace_attribute(stack, torch.cuda.nvtx, name, _distinct(_no_range))
        replace_attribute(stack, torch.cuda.nccl, "version", lambda: _NCCL_VERSION)
        for name in ("start", "stop"):
            replace_attribute(stack, torch.cuda.profiler, name, _distinct(_nothing))
        for name in ("Stream", "Event"):
            make = functools.partial(_make_on_cuda, getattr(torch, name), _CUDA[name], name)
            replace_attribute(stack, torch, name, replacement_class(getattr(torch, name), make))
        # nn.LSTM asks before it lays out its weights, and would warn that cuDNN is missing.
        replace_attribute(stack, torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        replace_attribute(stack, torch.nn.DataParallel, "__init__", _refuse_data_parallel)
        stack.callback(DefaultDeviceType.set_device_type, DefaultDeviceType.get_device_type())
        DefaultDeviceType.set_device_type("cuda")
        _answer_random_states(stack)
        _gather_statistics_without_reading_counts(stack)
        stack.enter_context(_cleared_function_cache())
        yield


def _distinct(answer: Any) -> Any:
    """A new function for each name: dynamo identifies torch's functions by identity."""
    if isinstance(answer, type):
        return answer

    def call(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    return call


@contextmanager
def _cleared_function_cache() -> Iterator[None]:
    """Clear dynamo's cache of torch's functions at both ends of the context."""
    try:
        _clear_function_cache()
        yield
    finally:
        _clear_function_cache()


def _clear_function_cache() -> None:
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()


def replacement_class(original: type, make: Callable[..., Any]) -> Any:
    """A class whose call runs `make` and that otherwise behaves as `original`.

    For C++ classes, which cannot be subclassed or patched.
    """

    @final
    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return subclass is stands_in or issubclass(subclass, original)

        def __eq__(cls, value: object) -> bool:
            return value is cls or value is original

        def __hash__(cls) -> int:
            return hash(original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    names = {"__module__": original.__module__, "__doc__": original.__doc__}
    stands_in = Meta(original.__name__, (), names)
    return stands_in


def _make_on_cuda(
    original: type, simulated: type, name: str, device: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """`torch.Stream` or `torch.Event`, on the accelerator if no device is given."""
    if device is None or torch.device(device).type == "cuda":
        return simulated(device, **kwargs) if name == "Stream" else simulated(**kwargs)
    return original(device, *args, **kwargs)


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise WorldError(
            f"{name}() was called in a simulated world on a machine without a GPU, where it "
            "has no result. Leave the call out, or run on a machine with a GPU."
        )

    return refuse


def _set_current(index: int, stream: Stream | None) -> None:
    _current.index, _current.stream = index, stream


def _read_index(device: Any) -> int:
    """The index of a device as torch.cuda accepts it: an int, a name, a device or None."""
    if device is None:
        return _current.index
    if isinstance(device, int):
        index = device
    else:
        named = torch.device(device)
        if named.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {named}")
        index = _current.index if named.index is None else named.index
    if not -1 <= index < _host.num_devices:
        raise WorldError(
            f"CUDA device {index} was named, but a simulated host has devices 0 to "
            f"{_host.num_devices - 1}. Choose one of those."
        )
    return index


def _set_device(device: Any) -> None:
    index = _read_index(device)
    note_use()
    if index >= 0:
        _current.index = index


@final
class Event:
    """A CUDA event that is always complete: nothing runs on a simulated device."""

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        self.enable_timing = enable_timing
        self.device = torch.device("cuda", _current.index)

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        raise WorldError(
            "torch.cuda.Event.elapsed_time() was called in a simulated world, where nothing runs "
            "and no time passes on a device. Leave the call out."
        )


@final
class Stream:
    """A CUDA stream on which nothing runs."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", _read_index(device))
        self.device_index = self.device.index
        self.priority = priority
        self.device_type = 1  # CUDA's, in C++
        self.cuda_stream = self.stream_id = 0
        self._before: list[Stream | None] = []

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Self:
        self._before.append(_current.stream)
        _current.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.stream = self._before.pop()


_DEFAULT_STREAM = Stream()


def _current_stream(device: Any = None) -> Stream:
    return _current.stream or _DEFAULT_STREAM


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with stream:
            yield


@final
class _OnDevice:
    """`with torch.cuda.device(…)` or `device_of(…)`: without effect for a CPU tensor."""

    def __init__(self, device: Any) -> None:
        self.idx = device.get_device() if isinstance(device, torch.Tensor) else _read_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _current.index
        _set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _set_device(self.prev_idx)


def _read_random_state(device: Any = "cuda") -> torch.Tensor:
    """The state of a CUDA generator: a seed and an offset."""
    with disable_dispatch_modes():
        return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _current_cuda_device(*_: Any) -> torch.device:
    return torch.device("cuda", _current.index)


def _current_accelerator(*_: Any, **__: Any) -> torch.device:
    return torch.device("cuda")


def _answer_random_states(stack: ExitStack) -> None:
    """Give data to the random states that DTensor compares between ranks, on the CPU."""
    tracker = dtensor_random.OffsetBasedRNGTracker
    make = tracker.__init__

    @functools.wraps(make)
    def make_with_data(self: Any, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as patches:
            replace_attribute(patches, tracker, "_get_device_state", lambda _: _read_random_state())
            patches.enter_context(disable_dispatch_modes())
            make(self, *args, **kwargs)

    replace_attribute(stack, tracker, "__init__", make_with_data)


def _gather_statistics_without_reading_counts(stack: ExitStack) -> None:
    """Make SyncBatchNorm gather the statistics of all ranks, whose counts have no data.

    torch omits ranks without elements, except during graph capture.
    """
    forward = _SyncBatchNorm.forward

    @functools.wraps(forward)
    def gather(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as patches:
            replace_attribute(patches, torch.cuda, "is_current_stream_capturing", lambda: True)
            return forward(*args, **kwargs)

    replace_attribute(stack, _SyncBatchNorm, "forward", staticmethod(gather))


def _with_device(make: Callable[..., None]) -> Callable[..., None]:
    """FSDP1's constructor, accepting a device's index, which torch does only with a GPU."""

    @functools.wraps(make)
    def make_with_device(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        if isinstance(device_id, int):
            device_id = torch.device("cuda", device_id)
        make(*args, device_id=device_id, **kwargs)

    return make_with_device


@contextmanager
def _hooks_in_bfloat16() -> Iterator[None]:
    """Make DDP accept hooks that reduce in bfloat16, which torch without CUDA and NCCL rejects."""
    check = DistributedDataParallel._check_comm_hook

    @functools.wraps(check)
    def check_with_nccl(*args: Any, **kwargs: Any) -> None:
        with ExitStack() as patches:
            replace_attribute(patches, torch.version, "cuda", "12.8")
            check(*args, **kwargs)

    with ExitStack() as stack:
        replace_attribute(stack, DistributedDataParallel, "_check_comm_hook", check_with_nccl)
        yield


def _refuse_data() -> None:
    """Raise: torch calls this before it creates a tensor with data on the device."""
    raise WorldError(
        'A tensor with data was created on "cuda", on a machine without a GPU. In a simulated '
        "world, create it on the thread that entered the world, where tensors have no data."
    )


def _refuse_data_parallel(*_: Any, **__: Any) -> None:
    raise WorldError(
        "torch.nn.DataParallel was made in a simulated world on a machine without a GPU. It copies "
        "the model to all devices of one process, where a simulated rank has one. Use "
        "torch.nn.parallel.DistributedDataParallel, with a rank for each device."
    )


def _nothing(*_: Any, **__: Any) -> None: ...


def _no_range(*_: Any, **__: Any) -> int:
    """The depth of an NVTX range, which no profiler reads."""
    return 0


def _zero_bytes(*_: Any, **__: Any) -> int:
    """0 for memory statistics, with a warning: `memory` computes what a step takes."""
    warnings.warn(
        "torch.cuda's memory statistics are 0 in a simulated world: shardscope.memory() computes "
        "what a step takes",
        stacklevel=3,
    )
    return 0


def _zero_statistics(*_: Any, **__: Any) -> dict[str, int]:
    return defaultdict(int, {"allocated_bytes.all.peak": _zero_bytes()})


def _all_free(*_: Any, **__: Any) -> tuple[int, int]:
    _zero_bytes()
    return _host.gpu.total_memory, _host.gpu.total_memory


# Classes that need a device; functions that need one are found automatically.
_WITHOUT_ANSWER = ("CUDAGraph", "ExternalStream", "MemPool", "graph")
_CUDA: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": _refuse_data,
    "can_device_access_peer": lambda device, peer_device: True,
    "current_device": current_index,
    "current_stream": _current_stream,
    "default_stream": lambda device=None: _DEFAULT_STREAM,
    "device": _OnDevice,
    "device_count": num_devices,
    "device_of": _OnDevice,
    "empty_cache": _nothing,
    "get_arch_list": lambda: [f"sm_{_host.gpu.major}{_host.gpu.minor}"],
    "get_device_capability": lambda device=None: (_host.gpu.major, _host.gpu.minor),
    "get_device_name": lambda device=None: _host.gpu.name,
    "get_device_properties": lambda device=None: _host.gpu,
    "get_rng_state": _read_random_state,
    "get_rng_state_all": lambda: [_read_random_state() for _ in range(_host.num_devices)],
    "initial_seed": lambda: 0,
    "init": note_use,
    "ipc_collect": _nothing,
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: _host.is_initialized,
    "is_tf32_supported": lambda: True,
    "max_memory_allocated": _zero_bytes,
    "max_memory_reserved": _zero_bytes,
    "memory_allocated": _zero_bytes,
    "mem_get_info": _all_free,
    "memory_reserved": _zero_bytes,
    "memory_stats": _zero_statistics,
    "manual_seed": _nothing,
    "manual_seed_all": _nothing,
    "reset_accumulated_memory_stats": _nothing,
    "reset_peak_memory_stats": _nothing,
    "seed": _nothing,
    "seed_all": _nothing,
    "set_device": _set_device,
    "set_rng_state": _nothing,
    "set_rng_state_all": _nothing,
    "set_stream": lambda stream: setattr(_current, "stream", stream),
    "stream": _on_stream,
    "synchronize": _nothing,
}

_ACCELERATOR: dict[str, Any] = {
    "current_accelerator": _current_accelerator,
    "current_device_idx": current_index,
    "current_device_index": current_index,
    "current_stream": _current_stream,
    "device_count": num_devices,
    "device_index": _OnDevice,
    "empty_cache": _nothing,
    "is_available": lambda: True,
    "set_device_idx": _set_device,
    "set_device_index": _set_device,
    "set_stream": lambda stream: setattr(_current, "stream", stream),
    "synchronize": _nothing,
}
