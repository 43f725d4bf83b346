"""Fake tensors on a simulated CUDA device.

torch can create fake tensors on "cuda" without a GPU, but C++ then queries the CUDA driver:
autograd for the device's queue, device guards for the current device. So each such tensor has a CPU
device that nothing else uses in C++, cpu:1 for cuda:0, and cuda:0 in Python. Decisions that torch
takes in Python (DTensor, FSDP, optimizers) are those for CUDA; `cuda_choices` replaces C++'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self, final

import torch

from shardscope._torch.cuda.gpus import DEFAULT_GPU
from shardscope._torch.cuda.host import OnUnknown, current_index, note_use, num_devices
from shardscope._torch.cuda.kernel_choices import cuda_choices
from shardscope._torch.cuda.runtime import replace_attribute, replacement_class, simulated_runtime
from shardscope._torch.cuda.tensor_memory import answer_about_memory, mark_pinned
from shardscope._torch.dispatch import COPY, disable_dispatch_modes, has_modes
from shardscope._torch.fake import MAX_CONSTANT, FakeTensor, FakeTensorMode
from shardscope._torch.private import find_name, is_missing, require
from shardscope._torch.tree import leaves

_prim_device = torch.ops.prim.device.default
_fake_tensor = find_name("torch._subclasses.fake_tensor", "create fake tensors on a CUDA device")
_TensorBase = find_name("torch._C.TensorBase", "read a fake tensor's device as C++ reads it")
_MOVE = torch.ops.aten.to.dtype_layout
_RECOMPILE = "recompile a function for tensors on another simulated device"
_GuardManager = find_name("torch._dynamo.guards.GuardManagerWrapper", _RECOMPILE)
_GuardDebugInfo = find_name("torch._dynamo.guards.GuardDebugInfo", _RECOMPILE)
_WithoutTorchFunctions = find_name("torch._C.DisableTorchFunction", _RECOMPILE)
_DEVICE_ARGUMENTS = ("device", "fake_device", "_fake_device")
_list_factories = find_name(
    "torch.utils._device._device_constructors", "make tensors on the device of an index"
)
_list_builtins = find_name(
    "torch.jit._builtins._get_builtin_table", "script functions that make tensors"
)
_LIKE = tuple(
    f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
)
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_Generator = torch.Generator


@contextmanager
def simulated_cuda(
    num_devices: int = 8,
    gpu: str = DEFAULT_GPU,
    *,
    is_initialized: bool = True,
    on_unknown: OnUnknown | None = None,
) -> Iterator[None]:
    """Allow fake tensors on "cuda" on a machine without a GPU until the context ends.

    Args:
        num_devices: The number of GPUs of the host.
        gpu: Which GPU: a key of `GPUS`.
        is_initialized: Whether the program has used a GPU before.
        on_unknown: Called when the program measures something on a GPU, which then is NaN.
    """
    require(FakeTensor, FakeTensorMode, _fake_tensor, _TensorBase)
    with ExitStack() as stack:
        stack.enter_context(
            simulated_runtime(
                num_devices, gpu, is_initialized=is_initialized, on_unknown=on_unknown
            )
        )
        _show_host_device_to_cpp(stack)
        _show_cuda_device_to_python(stack)
        _take_cuda_devices(stack)
        _take_indices_of_devices(stack)
        _make_generators(stack)
        _avoid_driver(stack)
        run = functools.partial(_run_on_host, _fake_tensor.run_fallback_kernel)
        replace_attribute(stack, _fake_tensor, "run_fallback_kernel", run)
        stack.enter_context(cuda_choices(device_type="cuda"))
        yield


@contextmanager
def recompiles_across_devices() -> Iterator[None]:
    """Allow dynamo to recompile a function for tensors on "cuda" after "cpu", or the reverse.

    In C++ the two differ only in the device's index. Dynamo's description of such a failed guard
    has both indices as bytes, and -1, the index of "cpu", cannot be decoded: the error would end
    the program, and leave torch functions disabled on this thread.
    """
    if is_missing(_GuardManager) or is_missing(_GuardDebugInfo):
        yield
        return
    check = _GuardManager.check_verbose

    @functools.wraps(check)
    def check_verbose(manager: Any, scope: Any) -> Any:
        try:
            with _WithoutTorchFunctions():  # as torch does itself, but restored after an error
                return check(manager, scope)
        except UnicodeDecodeError:
            manager.check(scope)  # ends the check, which resets its record of tensors
            return _GuardDebugInfo(False, ["a tensor is on another device"], 0)

    with ExitStack() as stack:
        replace_attribute(stack, _GuardManager, "check_verbose", check_verbose)
        yield


def _to_host(device: Any) -> Any:
    """The CPU device that C++ sees instead of a CUDA device: cpu:1 for cuda:0."""
    device = torch.device(device) if isinstance(device, str) else device
    if isinstance(device, torch.device) and device.type == "cuda":
        index = current_index() if device.index is None else device.index
        return torch.device("cpu", index + 1)
    return device


def _to_cuda(device: Any) -> Any:
    """The CUDA device, with its index, of a CPU device such as cpu:1; others are unchanged."""
    device = torch.device(device) if isinstance(device, str) else device
    if isinstance(device, torch.device):
        if device.type == "cpu" and device.index:
            return torch.device("cuda", device.index - 1)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", current_index())
    return device


def _show_host_device_to_cpp(stack: ExitStack) -> None:
    """Return a CPU device where C++ asks a tensor for its device or creates a subclass."""
    for name in ("_make_subclass", "_make_wrapper_subclass"):
        make = staticmethod(_on_host(getattr(torch.Tensor, name)))
        replace_attribute(stack, torch.Tensor, name, make)

    dispatch = vars(FakeTensor)["__torch_dispatch__"].__func__

    def dispatch_on_host(cls: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        result = dispatch(cls, op, *args, **kwargs)
        return _to_host(result) if op is _prim_device else result

    # Dynamo would compile it between two graphs of a module.
    answer: Any = classmethod(torch.compiler.disable(dispatch_on_host))
    replace_attribute(stack, FakeTensor, "__torch_dispatch__", answer)
    handlers: dict[Any, Any] = _fake_tensor._DISPATCH_META_HANDLERS
    read_device = handlers[_prim_device]
    handlers[_prim_device] = lambda args: _to_host(read_device(args))
    stack.callback(handlers.__setitem__, _prim_device, read_device)


def _on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: _device_to_host(value) for name, value in kwargs.items()}
        return make(*map(_device_to_host, args), **kwargs)

    return call


def _device_to_host(value: Any) -> Any:
    return _to_host(value) if isinstance(value, torch.device) else value


def _show_cuda_device_to_python(stack: ExitStack) -> None:
    """Return the CUDA device where Python asks for the device of a tensor.

    Patches methods and properties, because C++ would query the driver before any dispatch mode sees
    the op.
    """
    replace = functools.partial(replace_attribute, stack, torch.Tensor)
    read_device = _TensorBase.device.__get__
    replace("device", property(lambda tensor: _to_cuda(read_device(tensor))))
    replace("is_cuda", property(lambda tensor: tensor.device.type == "cuda"))
    replace("is_cpu", property(lambda tensor: tensor.device.type == "cpu"))
    replace("get_device", _read_index)

    replace_attribute(stack, FakeTensor, "data", property(_TensorBase.data.__get__, _set_data))
    make_fake = FakeTensor.__new__

    def make_on_cuda(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for name in _DEVICE_ARGUMENTS:
            if name in kwargs:
                kwargs[name] = _to_cuda(kwargs[name])
        fake = make_fake(cls, *args[:2], *map(_to_cuda, args[2:3]), *args[3:], **kwargs)
        if fake.fake_device.type == "cuda":
            note_use()
        return fake

    replace_attribute(stack, FakeTensor, "__new__", staticmethod(make_on_cuda))

    dispatch: Any = FakeTensorMode.__torch_dispatch__

    def dispatch_on_cuda(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") is not None:
            # With its index: results are cached by the arguments.
            kwargs = {**kwargs, "device": _to_cuda(kwargs["device"])}
            if op is _MOVE and not types and kwargs["device"].type == "cuda":
                # Otherwise moved before it becomes fake.
                fake = mode.from_tensor(args[0])
                moved = dispatch(mode, op, types, (fake, *args[1:]), kwargs)
                return _with_constant(moved, args[0])
            constant = getattr(args[0], "constant", None) if args else None
            if op is _MOVE and kwargs["device"].type == "cuda" and constant is not None:
                # torch would move the known values to a GPU that is not there.
                args[0].constant = None
                try:
                    moved = dispatch(mode, op, types, args, kwargs)
                finally:
                    args[0].constant = constant
                return _with_constant(moved, constant)
        result = dispatch(mode, op, types, args, kwargs or {})
        if not kwargs or "device" not in kwargs:
            result = _move_constants(functools.partial(dispatch, mode), result, args)
        return result

    answer = torch.compiler.disable(dispatch_on_cuda)
    replace_attribute(stack, FakeTensorMode, "__torch_dispatch__", answer)


def _with_constant(fake: Any, source: torch.Tensor) -> Any:
    """The fake tensor, with the values of the small tensor with data that it was made from."""
    if source.numel() <= MAX_CONSTANT and not source.is_meta:
        with disable_dispatch_modes():
            fake.constant = source.detach().to(fake.dtype, copy=True)
        fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    return fake


def _take_cuda_devices(stack: ExitStack) -> None:
    """Make methods that move tensors and modules accept a CUDA device, or its index."""
    replace = functools.partial(replace_attribute, stack, torch.Tensor)
    move = torch.Tensor.to

    @functools.wraps(move)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_read_target(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _read_target(kwargs["device"])
        return move(tensor, *args, **kwargs)

    def cuda(
        tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> Any:
        target = "cuda" if device is None else device
        return to(tensor, device=target, non_blocking=non_blocking, **kwargs)

    move_module: Any = torch.nn.Module.to

    @functools.wraps(move_module)
    def to_of_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        args = (*map(_read_device, args[:1]), *args[1:])
        return move_module(module, *args, **_with_device(kwargs))

    replace_attribute(stack, torch.nn.Module, "to", to_of_module)
    replace("to", to)
    replace("cuda", cuda)


def _take_indices_of_devices(stack: ExitStack) -> None:
    """Make `torch.device` and factory functions accept an index, 0 for cuda:0."""
    make_device: Any = torch.device

    def device(*args: Any, **kwargs: Any) -> Any:
        return make_device(*map(_read_device, args[:1]), *args[1:], **_with_device(kwargs))

    factories = frozenset(_list_factories())
    builtins = {} if is_missing(_list_builtins) else _list_builtins()
    for name in (*(make.__name__ for make in factories), *_LIKE):
        make = getattr(torch, name, None)
        if make is not None:
            factory = _Factory(make)
            replace_attribute(stack, torch, name, factory)
            if id(make) in builtins:  # torch.jit.script looks functions up by identity
                builtins[id(factory)] = builtins[id(make)]
                stack.callback(builtins.pop, id(factory), None)
    # `with torch.device(...)` affects the functions in this set: torch's own. Dynamo traces this,
    # and cannot hash functions that it never traces.
    dense = frozenset(make for make in factories if not make.__name__.startswith("sparse_"))

    def list_own() -> frozenset[Any]:
        return dense if torch.compiler.is_dynamo_compiling() else factories

    replace_attribute(stack, torch.utils._device, "_device_constructors", list_own)
    for name in _NEW:
        replace_attribute(stack, torch.Tensor, name, _by_index(getattr(torch.Tensor, name)))
    replace_attribute(stack, torch, "device", replacement_class(torch.device, device))


@final
class _Factory:
    """A factory function that also accepts the index of a device.

    It equals the original function, which dynamo looks up in dictionaries.
    """

    mode: Any = None  # the fake tensor mode of the simulated world

    def __init__(self, make: Callable[..., Any]) -> None:
        functools.update_wrapper(self, make)
        self._make = make
        self._reads_values = make in (torch.tensor, torch.as_tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = _with_device(kwargs)
        if kwargs.pop("pin_memory", False):
            return mark_pinned(self(*args, **kwargs))
        if self._reads_values:
            if args and isinstance(args[0], list | tuple):
                args = _read_values(args[0]), *args[1:]
            if str(kwargs.get("device")) == "cuda":  # torch would take the first GPU
                kwargs["device"] = torch.device("cuda", current_index())
        device = kwargs.get("device")
        is_traced = torch.compiler.is_dynamo_compiling()
        if self.mode is None or device is None or is_traced or has_modes():
            return self._make(*args, **kwargs)
        with self.mode if torch.device(device).type == "cuda" else nullcontext():
            return self._make(*args, **kwargs)

    def __eq__(self, value: object) -> bool:
        return value is self or value is self._make

    def __hash__(self) -> int:
        return hash(self._make)


def _read_values(values: Any) -> Any:
    """Nested lists in which tensors without data are replaced by the values that they read as."""
    if isinstance(values, list | tuple):
        return [_read_values(value) for value in values]
    is_scalar = isinstance(values, FakeTensor) and values.numel() == 1
    return values.item() if is_scalar else values


@contextmanager
def tensors_without_modes(mode: Any) -> Iterator[None]:
    """Create tensors on "cuda" in a fake tensor mode also where no mode is active.

    So dynamo calls the code of optimizers that initializes their state.
    """
    with ExitStack() as stack:
        replace_attribute(stack, _Factory, "mode", mode)
        yield


def _by_index(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        tensor = make(*args, **_with_device(kwargs))
        return mark_pinned(tensor) if is_pinned else tensor

    return call


def _with_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    if type(kwargs.get("device")) is not int:
        return kwargs
    return {**kwargs, "device": _read_device(kwargs["device"])}


def _read_device(value: Any) -> Any:
    return torch.device("cuda", value) if type(value) is int else value


_HALF_RANGE = 1 << 63  # seeds are unsigned


@final
class _CudaGenerator(_Generator):
    """A generator whose device is a CUDA device; nothing is drawn from it."""

    def __new__(cls, device: torch.device) -> Self:
        generator = super().__new__(cls)
        generator.shown_device = device
        return generator

    shown_device: torch.device
    device = property(lambda generator: generator.shown_device)

    def get_state(self) -> torch.Tensor:
        """The seed, and an offset of 0."""
        with disable_dispatch_modes():
            seed = (self.initial_seed() + _HALF_RANGE) % (2 * _HALF_RANGE) - _HALF_RANGE
            return torch.tensor([seed, 0], device="cpu").view(torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> Self:
        with disable_dispatch_modes():
            self.manual_seed(int(new_state.view(torch.int64)[0]) % (2 * _HALF_RANGE))
        return self

    def clone_state(self) -> Self:
        return type(self)(self.device).set_state(self.get_state())

    def graphsafe_get_state(self) -> Self:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> Self:
        return self.set_state(state.get_state())


def _make_generators(stack: ExitStack) -> None:
    def make(device: Any = "cpu") -> torch.Generator:
        device = _to_cuda(_read_device(device))
        is_cuda = isinstance(device, torch.device) and device.type == "cuda"
        return _CudaGenerator(device) if is_cuda else _Generator(device)

    defaults = tuple(make(index) for index in range(num_devices()))
    replace_attribute(stack, torch, "Generator", replacement_class(_Generator, make))
    replace_attribute(stack, torch.cuda, "default_generators", defaults)


def _move_constants(dispatch: Callable[..., Any], result: Any, args: Any) -> Any:
    """Move constants that torch computed on the CPU to the device of the arguments."""
    if isinstance(result, list | tuple):
        if not any(map(_is_constant, result)):
            return result
        moved = [_move_constants(dispatch, item, args) for item in result]
        return moved if isinstance(result, list) else tuple(moved)
    if not _is_constant(result):
        return result
    devices = (leaf.device for leaf in leaves(args) if isinstance(leaf, FakeTensor))
    device = next((device for device in devices if device.type == "cuda"), None)
    if device is None or result.device.type != "cpu":
        return result
    copy = dispatch(COPY, (), (result,), {"device": device})
    copy.constant = result.constant
    copy.fake_mode.fake_tensor_converter.add_constant_storage_mapping(copy)
    return copy


def _is_constant(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.constant is not None


def _set_data(tensor: FakeTensor, value: torch.Tensor) -> None:
    """`tensor.data = value` that also updates the fake device, which torch does not."""
    _TensorBase.data.__set__(tensor, value)
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device


def _read_index(tensor: torch.Tensor) -> int:
    index = tensor.device.index
    return -1 if index is None else index


def _read_target(target: Any) -> Any:
    """The first argument of `Tensor.to`, with a CUDA device or index replaced for C++."""
    if isinstance(target, int) and not isinstance(target, bool):
        return torch.device("cpu", target + 1)
    return _to_host(target)


def _avoid_driver(stack: ExitStack) -> None:
    """Keep fake tensors from initializing the GPU with a real tensor."""
    replace_attribute(stack, _fake_tensor, "init_gpu_context", lambda device: None)
    replace_attribute(stack, FakeTensorMode, "avoid_device_init", property(lambda mode: True))
    answer_about_memory(stack)
    # Compiled code creates tensors of numbers outside a fake mode: on the CPU, and moves them.
    stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
    torch._C._set_only_lift_cpu_tensors(True)


def _run_on_host(run: Callable[..., Any], mode: Any, op: Any, flat_args: Any, *rest: Any) -> Any:
    """Run an op without a fake kernel by its real one, on the CPU."""
    fakes = [(arg, arg.device) for arg in flat_args if isinstance(arg, FakeTensor)]
    device = next((device for _, device in fakes if device.type == "cuda"), None)
    if device is None:
        return run(mode, op, flat_args, *rest)
    for fake, _ in fakes:
        fake.fake_device = torch.device("cpu")
    try:
        result = run(mode, op, flat_args, *rest)
    finally:
        for fake, before in fakes:
            fake.fake_device = before
    input_ids = {id(fake) for fake, _ in fakes}
    for output in leaves(result):
        if isinstance(output, FakeTensor) and id(output) not in input_ids:
            output.fake_device = device
    return result
