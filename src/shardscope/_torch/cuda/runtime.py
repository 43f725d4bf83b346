"""Patches `torch.cuda`, `torch.accelerator` and their callers in torch for simulated GPUs.

How each call is answered is in `calls`. A public function that is not listed there raises
`WorldError` with its name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import DefaultDeviceType

from shardscope._torch.cuda.calls import CALLS, Call, Kind, refusal
from shardscope._torch.cuda.device_memory import DeviceMemory
from shardscope._torch.cuda.gpus import DEFAULT_GPU, GPUS
from shardscope._torch.cuda.host import Event, OnUnknown, Stream, current, host, set_current
from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.dtensor import dtensor_random
from shardscope._torch.private import find_name
from shardscope._torch.tree import map_leaves
from shardscope.errors import WorldError

_fsdp1_init = find_name(
    "torch.distributed.fsdp._init_utils", "let FSDP1 select a simulated CUDA device"
)
_SyncBatchNorm = find_name(
    "torch.nn.modules._functions.SyncBatchNorm", "gather the statistics of batches without data"
)


_ABSENT = object()
_UNLISTED = Call(Kind.REFUSED)
# Modules that export names of the modules in `CALLS` as well.
_ALIASES = (
    "torch.accelerator.memory",
    "torch.cuda.random",
    "torch.cuda.streams",
)


def has_cuda() -> bool:
    """Whether this process uses CUDA on a real device."""
    return bool(torch.cuda.is_initialized()) and not is_simulated()


def is_simulated() -> bool:
    """Whether torch.cuda is patched for a simulated device."""
    stream_class: Any = torch.cuda.Stream
    return stream_class is Stream


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
    num_devices: int = 8,
    gpu: str = DEFAULT_GPU,
    *,
    is_initialized: bool = True,
    on_unknown: OnUnknown | None = None,
) -> Iterator[None]:
    """Patch torch.cuda and torch.accelerator for simulated devices until the context ends."""
    with ExitStack() as stack:
        memory = DeviceMemory(num_devices)
        for name, value in {
            "num_devices": num_devices,
            "gpu": GPUS[gpu],
            "is_initialized": is_initialized,
            "memory": memory,
            "on_unknown": on_unknown,
            "sync_debug_mode": 0,
            "memory_fraction": 1.0,
        }.items():
            replace_attribute(stack, host, name, value)
        stack.enter_context(memory.watching())
        stack.callback(set_current, current.index, current.stream)
        set_current(0, None)
        _answer_calls(stack)
        accelerator = CALLS["torch.accelerator"]["current_accelerator"].answer
        replace_attribute(stack, torch._C, "_get_accelerator", _distinct(accelerator))
        for module in (dist, distributed_c10d):
            replace_attribute(stack, module, "is_nccl_available", lambda: True)
        make_fsdp1 = _with_device(FullyShardedDataParallel.__init__)
        replace_attribute(stack, FullyShardedDataParallel, "__init__", make_fsdp1)
        replace_attribute(stack, _fsdp1_init, "_get_compute_device", _current_cuda_device)
        for name, simulated in (("Stream", Stream), ("Event", Event)):
            make = functools.partial(_make_on_cuda, getattr(torch, name), simulated, name)
            replace_attribute(stack, torch, name, replacement_class(getattr(torch, name), make))
        replace_attribute(stack, torch, "set_default_tensor_type", _set_default_tensor_type)
        _limit_data_parallel(stack)
        stack.callback(DefaultDeviceType.set_device_type, DefaultDeviceType.get_device_type())
        DefaultDeviceType.set_device_type("cuda")
        _answer_random_states(stack)
        _gather_statistics_without_reading_counts(stack)
        stack.enter_context(_cleared_function_cache())
        yield


def _answer_calls(stack: ExitStack) -> None:
    """Replace every public name of the modules of `CALLS`, also where torch exports it again."""
    modules = [import_module(name) for name in (*CALLS, *_ALIASES)]
    for module_name, calls in CALLS.items():
        module = import_module(module_name)
        unlisted = dict.fromkeys(_list_functions(module) - _list_known_names(), _UNLISTED)
        for name, call in {**unlisted, **calls}.items():
            original = getattr(module, name, _ABSENT)
            if original is _ABSENT:
                continue  # another torch has it
            value = _make_answer(f"{module_name}.{name}", call, original)
            if value is not original:
                owners = [owner for owner in modules if vars(owner).get(name) is original]
                for owner in {id(owner): owner for owner in (module, *owners)}.values():
                    replace_attribute(stack, owner, name, value)


def _list_functions(module: Any) -> set[str]:
    return {
        name
        for name in getattr(module, "__all__", ())
        if callable(getattr(module, name, None)) and not isinstance(getattr(module, name), type)
    }


def _list_known_names() -> set[str]:
    return {name for calls in CALLS.values() for name in calls}


def _make_answer(name: str, call: Call, original: Any) -> Any:
    """What takes the place of torch's function, class or object."""
    if isinstance(call.answer, torch.dtype):
        return _make_tensor_type(original, call.answer)
    if call.kind is Kind.REFUSED:
        refuse = _refuse(name, call.note)
        if isinstance(original, type):
            return replacement_class(original, refuse)
        if hasattr(original, "__wrapped__"):  # which dynamo reads of context managers
            vars(refuse)["__wrapped__"] = original.__wrapped__
        return refuse
    if call.answer is None:
        return original
    if isinstance(original, type) and not isinstance(call.answer, type):
        return replacement_class(original, call.answer)
    return _distinct(call.answer) if callable(call.answer) else call.answer


def _refuse(name: str, note: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise refusal(name, note)

    return refuse


def _make_tensor_type(original: Any, dtype: torch.dtype) -> Any:
    """A class such as `torch.cuda.FloatTensor`, which makes tensors of a dtype on the GPU."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], list | tuple) and not isinstance(args[0], torch.Size):
            return torch.tensor(args[0], dtype=dtype, device="cuda")
        if args and isinstance(args[0], torch.Tensor):
            return args[0].to("cuda", dtype)
        size = args[0] if args and isinstance(args[0], torch.Size) else args
        return torch.empty(size, dtype=dtype, device="cuda")

    def is_instance(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is dtype

    tensor_type = replacement_class(original, make, is_instance=is_instance)
    tensor_type.dtype, tensor_type.is_cuda = dtype, True
    return tensor_type


_set_default_type: Any = torch.set_default_tensor_type


def _set_default_tensor_type(kind: Any) -> None:
    """`torch.set_default_tensor_type`, also with a type of tensors on the GPU."""
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        kind = getattr(torch.cuda, kind.rpartition(".")[2])
    if getattr(kind, "is_cuda", False):
        torch.set_default_dtype(kind.dtype)
        torch.set_default_device("cuda")
    else:
        _set_default_type(kind)


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


def replacement_class(
    original: type,
    make: Callable[..., Any],
    *,
    is_instance: Callable[[Any], bool] | None = None,
) -> Any:
    """A class whose call runs `make` and that otherwise behaves as `original`.

    For C++ classes, which cannot be subclassed or patched.
    """

    @final
    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original) if is_instance is None else is_instance(value)

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


def _read_random_state(device: Any = "cuda") -> torch.Tensor:
    """The state of a CUDA generator: a seed and an offset."""
    with disable_dispatch_modes():
        return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _current_cuda_device(*_: Any) -> torch.device:
    return torch.device("cuda", current.index)


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


def _limit_data_parallel(stack: ExitStack) -> None:
    """Let `nn.DataParallel` call its model on one GPU, and refuse it on several."""
    make = torch.nn.DataParallel.__init__

    @functools.wraps(make)
    def make_limited(
        model: Any, module: Any, device_ids: Any = None, *rest: Any, **more: Any
    ) -> None:
        if (torch.cuda.device_count() if device_ids is None else len(device_ids)) > 1:
            raise WorldError(
                "torch.nn.DataParallel was made in a simulated world on a machine without a GPU. "
                "It copies the model to all devices of one process, where a simulated rank has "
                "one. Use torch.nn.parallel.DistributedDataParallel, with a rank for each device; "
                "with shardscope run, --nproc-per-node 1 gives the program a single GPU."
            )
        make(model, module, device_ids, *rest, **more)

    def scatter(model: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        def move(value: Any) -> Any:
            return value.cuda(device_ids[0]) if isinstance(value, torch.Tensor) else value

        return [map_leaves(move, inputs)], [map_leaves(move, kwargs)]

    replace_attribute(stack, torch.nn.DataParallel, "__init__", make_limited)
    replace_attribute(stack, torch.nn.DataParallel, "scatter", scatter)
