"""GPUs that are the CPU: a program that says "cuda" computes with data on a machine without a GPU.

`torch.cuda` answers as for simulated GPUs. Where the program names a CUDA device for a tensor, the
CPU is used instead, so that a tensor's `device` is the CPU and torch makes its decisions for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import autocast_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import DefaultDeviceType

from shardscope._torch.cuda.gpus import DEFAULT_GPU
from shardscope._torch.cuda.runtime import replace_attribute, replacement_class, simulated_runtime
from shardscope._torch.dtensor import dtensor_random
from shardscope._torch.private import find_name
from shardscope.errors import WorldError

_fsdp1_init = find_name(
    "torch.distributed.fsdp._init_utils", "let FSDP1 compute on the CPU in place of a GPU"
)
_dynamo_utils = find_name(
    "torch._dynamo.utils", "let compiled code ask for the stream of a GPU that is the CPU"
)
_CPU = torch.device("cpu")
_make_device: Any = torch.device
_Generator: Any = torch.Generator
OnDifference = Callable[[str, str], None]
"""Called with what the program called, and how it differs on the CPU."""


@contextmanager
def cuda_on_host(
    num_devices: int, gpu: str = DEFAULT_GPU, *, on_difference: OnDifference
) -> Iterator[None]:
    """Let this thread use the CPU as its CUDA devices, with data, until the context ends.

    Args:
        num_devices: The number of GPUs of the host.
        gpu: Which GPU's properties `torch.cuda` returns: a key of `GPUS`.
        on_difference: Called when the program does what a GPU would do differently.
    """
    with ExitStack() as stack:
        # The simulated runtime replaces these for tensors without data; torch's own are put back.
        originals = [
            (owner, name, vars(owner)[name])
            for owner, name in (
                (torch._C, "_get_accelerator"),
                (_fsdp1_init, "_get_compute_device"),
                (FullyShardedDataParallel, "__init__"),
                (dtensor_random.OffsetBasedRNGTracker, "__init__"),
            )
        ]
        device_type = DefaultDeviceType.get_device_type()
        stack.enter_context(simulated_runtime(num_devices, gpu, is_initialized=False))
        for owner, name, value in originals:
            replace_attribute(stack, owner, name, value)
        DefaultDeviceType.set_device_type(device_type)
        replace_attribute(
            stack, nn.SyncBatchNorm, "forward", _refuse_sync(nn.SyncBatchNorm.forward)
        )
        _seed_the_cpu(stack, num_devices)
        _take_devices(stack)
        _wrap_models(stack)
        _load_to_the_cpu(stack)
        _autocast_on_the_cpu(stack, on_difference)
        if hasattr(_dynamo_utils, "get_current_stream"):  # of torch 2.15, which asks the driver
            current_stream = torch.accelerator.current_stream
            replace_attribute(stack, _dynamo_utils, "get_current_stream", current_stream)
        stack.enter_context(_DevicesOnHost())
        yield


def to_host(device: Any) -> Any:
    """The CPU for a CUDA device, its name or its index; anything else unchanged."""
    if type(device) is int or (
        isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))
    ):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


@final
class _DevicesOnHost(TorchFunctionMode):
    """Replaces CUDA devices by the CPU in every call of torch, also while dynamo traces it."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": to_host(kwargs["device"])}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], to_host(args[1]), *args[2:])
        return func(*args, **kwargs)


def _take_devices(stack: ExitStack) -> None:
    """Let functions that a TorchFunctionMode does not see accept CUDA devices too."""

    def make_device(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:  # torch would ask for the accelerator
            return _make_device("cuda", args[0])
        return _make_device(*args, **kwargs)

    replace_attribute(stack, torch, "device", replacement_class(_make_device, make_device))
    move: Any = nn.Module.to

    @functools.wraps(move)
    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_host(kwargs["device"])
        return move(module, *map(to_host, args[:1]), *args[1:], **kwargs)

    replace_attribute(stack, nn.Module, "to", to)
    replace_attribute(stack, torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor)
    replace_attribute(stack, torch.Tensor, "record_stream", lambda tensor, stream: None)
    replace_attribute(stack, torch.UntypedStorage, "cuda", lambda storage, *_, **__: storage)
    set_default: Any = torch.set_default_device
    replace_attribute(
        stack, torch, "set_default_device", lambda device: set_default(to_host(device))
    )
    stack.callback(set_default, None)
    make_mesh = DeviceMesh.__init__

    @functools.wraps(make_mesh)
    def make_on_host(self: DeviceMesh, device_type: Any, *args: Any, **kwargs: Any) -> None:
        make_mesh(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    replace_attribute(stack, DeviceMesh, "__init__", make_on_host)


def _wrap_models(stack: ExitStack) -> None:
    """Let DDP and FSDP1 wrap models on the CPU where the program names their GPUs."""
    make_ddp = DistributedDataParallel.__init__

    @functools.wraps(make_ddp)
    def make_on_host(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> None:
        make_ddp(self, module, **kwargs)

    replace_attribute(stack, DistributedDataParallel, "__init__", make_on_host)
    make_fsdp: Any = FullyShardedDataParallel.__init__

    @functools.wraps(make_fsdp)
    def make_fsdp_on_host(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        make_fsdp(*args, device_id=to_host(device_id), **kwargs)

    replace_attribute(stack, FullyShardedDataParallel, "__init__", make_fsdp_on_host)


def _load_to_the_cpu(stack: ExitStack) -> None:
    load = torch.load

    @functools.wraps(load)
    def load_to_the_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        where = map_location if callable(map_location) else to_host(map_location or _CPU)
        return load(f, _CPU if isinstance(where, dict) else where, *args, **kwargs)

    replace_attribute(stack, torch, "load", load_to_the_cpu)


def _autocast_on_the_cpu(stack: ExitStack, on_difference: OnDifference) -> None:
    autocast = autocast_mode.autocast
    make = autocast.__init__

    @functools.wraps(make)
    def make_on_host(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            on_difference("autocast()", "ops were cast by the CPU's list of ops, not by CUDA's")
            dtype = dtype or torch.get_autocast_dtype("cuda")
            device_type = "cpu"
        make(self, device_type, dtype, *args, **kwargs)

    replace_attribute(stack, autocast, "__init__", make_on_host)


def _seed_the_cpu(stack: ExitStack, num_devices: int) -> None:
    """Let the generators of the GPUs be that of the CPU."""
    generator = torch.default_generator

    def seed(value: int) -> None:
        generator.manual_seed(int(value))

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        generator.set_state(state)

    answers: dict[str, Any] = {
        "manual_seed": seed,
        "manual_seed_all": seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()] * num_devices,
        "set_rng_state": set_state,
        "set_rng_state_all": lambda states: set_state(states[0]),
        "default_generators": (generator,) * num_devices,
    }
    for name, answer in answers.items():
        replace_attribute(stack, torch.cuda, name, answer)
    make = replacement_class(_Generator, lambda device="cpu": _Generator(to_host(device)))
    replace_attribute(stack, torch, "Generator", make)


def _refuse_sync(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module.training and dist.is_initialized():
            raise WorldError(
                "SyncBatchNorm was called with data on a machine without a GPU, where torch has no "
                "kernel for it. Run without --data, or use BatchNorm."
            )
        return forward(module, *args, **kwargs)

    return call
