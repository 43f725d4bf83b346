"""Tensors without data in simulated worlds: fake tensors, and refusals where data is needed.

Each context changes process-wide state of torch, and restores it on leaving.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import CausalBias
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardscope._torch.cuda.host import simulated_memory
from shardscope._torch.ddp import reducers_without_data
from shardscope._torch.dispatch import (
    COPY,
    detect_fake_mode,
    disable_dispatch_modes,
    has_fake_tensors,
)
from shardscope._torch.fake import MAX_CONSTANT, NO_DATA
from shardscope._torch.logs import FAKE_TENSOR_LOG
from shardscope._torch.private import find_name, without_if_moved
from shardscope._torch.process_groups.host_data import HostData
from shardscope._torch.tree import leaves
from shardscope.errors import ShardscopeError, WorldError

_RNG_STATE_BYTES = torch.get_rng_state().numel()  # ranks send it each other on the GPU
_PLAIN = (torch.Tensor, nn.Parameter, UninitializedBuffer, UninitializedParameter)
if TYPE_CHECKING:
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
else:
    fake_tensor = find_name(
        "torch._subclasses.fake_tensor", "build models whose tensors have no data"
    )
    _FakeTensor = find_name(
        "torch._subclasses.fake_tensor.FakeTensor", "recognise tensors without data"
    )
_nested_tensor = find_name(
    "torch.nested._internal.nested_tensor", "refuse nested tensors where tensors have no data"
)
# torch.nested's functions for jagged tensors import these when they are called.
_JAGGED = (
    "jagged_from_list",
    "jagged_from_tensor_and_lengths",
    "nested_view_from_values_offsets",
    "nested_view_from_values_offsets_lengths",
)
# nn.TransformerEncoder calls this for a padding mask in inference.
_FROM_MASK = ("_nested_tensor_from_mask",)
_NESTED = ("as_nested_tensor", "nested_tensor")


@contextmanager
def fake_tensors(host: HostData | None = None) -> Iterator[fake_tensor.FakeTensorMode]:
    """Create fake tensors until the context ends; ops may mix them with real ones.

    With `host`, tensors on the CPU keep their data, and values that are read have stand-ins.
    """
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    log = logging.getLogger(FAKE_TENSOR_LOG)
    log.addFilter(_should_log)
    try:
        with (
            _unpinned_fakes(),
            _readable_fakes(),
            _copyable_fakes(),
            without_if_moved(_initialized_fakes()),
            without_if_moved(_steps_without_overflow()),
            without_if_moved(_causal_biases()),
            without_if_moved(reducers_without_data()),
            _swappable_fakes(),
            _refused_lazy_fakes(),
            _refused_saves(),
            _plain_tensors_on_meta(mode, host),
            nullcontext() if host is None else host.parameters_without_data(mode),
            mode,
        ):
            yield mode
    finally:
        log.removeFilter(_should_log)


@contextmanager
def _plain_tensors_on_meta(
    mode: fake_tensor.FakeTensorMode, host: HostData | None
) -> Iterator[None]:
    """Leave meta tensors unchanged, which the mode would convert to fake ones.

    A model is built and sharded on meta: as fake tensors, its parameters would take several times
    as long to chunk, and `to_empty()` could not convert them. The method of the class is patched,
    because torch finds functions registered for a mode by the mode's exact type.
    """
    dispatch = fake_tensor.FakeTensorMode.__torch_dispatch__
    running = threading.local()

    def dispatch_off_meta(
        self: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self is not mode:
            return dispatch(self, op, types, args, kwargs)
        device = kwargs.get("device") or next(
            (arg for arg in args if isinstance(arg, torch.device)), None
        )
        is_on_meta = (
            device.type == "meta" if device is not None else any(map(_is_on_meta, leaves(args)))
        )
        # With a fake tensor among the arguments the mode would be called again.
        if is_on_meta and not any(issubclass(kind, _FakeTensor) for kind in types):
            return op(*args, **kwargs)
        is_part = getattr(running, "is_on", False)  # of an op on tensors without data
        if host is not None and not is_part:
            is_moved = device is not None and any(map(_is_on_meta, args))  # off the meta device
            answer = NotImplemented if is_moved else host.answer(op, types, args, kwargs)
            if answer is not NotImplemented:
                return answer
        running.is_on = True
        try:
            result = dispatch(self, op, types, args, kwargs)
        finally:
            running.is_on = is_part
        if not is_part:
            memory = simulated_memory()
            if memory is not None:
                memory.note_op(op, args, result)
        if host is not None:
            host.mark(op, args, kwargs, result)
        if op is COPY and isinstance(result, _FakeTensor) and result.constant is None:
            _keep_constant(mode, result, args[0], kwargs)
        return result

    mode_class: Any = fake_tensor.FakeTensorMode
    # Dynamo would compile it between two graphs of a module.
    mode_class.__torch_dispatch__ = torch.compiler.disable(dispatch_off_meta)
    try:
        yield
    finally:
        mode_class.__torch_dispatch__ = dispatch


def _keep_constant(mode: Any, copy: _FakeTensor, source: Any, kwargs: dict[str, Any]) -> None:
    """Keep the values of a small tensor readable after it is moved to a GPU."""
    constant = getattr(source, "constant", None)
    if constant is None and type(source) in _PLAIN and not source.is_meta:
        limit = _RNG_STATE_BYTES if source.dtype is torch.uint8 else MAX_CONSTANT
        constant = source if source.numel() <= limit else None
    if constant is not None:
        copy.constant = COPY(constant, **{**kwargs, "device": torch.device("cpu")})
        mode.fake_tensor_converter.add_constant_storage_mapping(copy)


def _is_on_meta(value: Any) -> bool:
    return type(value) in _PLAIN and value.is_meta


@contextmanager
def _swappable_fakes() -> Iterator[None]:
    """Make `module.to(…)` change fake parameters in place, where torch would swap two objects.

    torch refuses to swap tensors that the mode has weak references to.
    """
    swap = torch.utils.swap_tensors

    @functools.wraps(swap)
    def set_or_swap(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, _FakeTensor) and isinstance(second, _FakeTensor):
            first.data = second
            first.fake_device, first.constant = second.fake_device, second.constant
        elif isinstance(first, _FakeTensor) and _is_on_meta(second):
            first.data = first.to(second.dtype)
            first.fake_device = second.device
        else:
            swap(first, second)

    torch.utils.swap_tensors = set_or_swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextmanager
def _readable_fakes() -> Iterator[None]:
    """Make `f"{loss:.3f}"` and `tolist()` read the constant of a fake tensor, or raise."""

    def format_value(tensor: torch.Tensor, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.dim() == 0 else format(repr(tensor), spec)

    make_list, limit = _FakeTensor.tolist, fake_tensor.CONSTANT_NUMEL_LIMIT

    def tolist(tensor: _FakeTensor) -> Any:
        return make_list(tensor) if tensor.constant is None else tensor.constant.tolist()

    fake_tensor.CONSTANT_NUMEL_LIMIT = MAX_CONSTANT
    _FakeTensor.__format__ = format_value
    _FakeTensor.tolist = tolist  # type: ignore[assignment]
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit
        del _FakeTensor.__format__  # it is inherited
        _FakeTensor.tolist = make_list


@contextmanager
def _copyable_fakes() -> Iterator[None]:
    """Make `copy.deepcopy` copy a fake tensor alone; torch would copy its mode as well.

    The mode has weak references to storages, which crash the process when they are freed twice.
    """
    copy_with_mode = _FakeTensor.__deepcopy__

    def copy_alone(tensor: _FakeTensor, memo: dict[int, Any]) -> Any:
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad():
            duplicate: Any = tensor.detach().clone()
        for name, value in vars(tensor).items():
            if name not in vars(duplicate):
                setattr(duplicate, name, copy.deepcopy(value, memo))
        duplicate.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            duplicate.grad = copy.deepcopy(tensor.grad, memo)
        memo[id(tensor)] = duplicate
        return duplicate

    fake_class: Any = _FakeTensor
    fake_class.__deepcopy__ = copy_alone
    try:
        yield
    finally:
        if "__deepcopy__" in vars(torch.Tensor) and copy_with_mode is torch.Tensor.__deepcopy__:
            del fake_class.__deepcopy__  # it is inherited
        else:
            fake_class.__deepcopy__ = copy_with_mode


@contextmanager
def _initialized_fakes() -> Iterator[None]:
    """Make `nn.init.trunc_normal_`, which reads the values it draws, draw only once."""
    draw = nn.init._no_grad_trunc_normal_

    @functools.wraps(draw)
    def draw_once(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return (
                tensor.normal_() if has_fake_tensors((tensor,)) else draw(tensor, *args, **kwargs)
            )

    nn.init._no_grad_trunc_normal_ = draw_once
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = draw


@contextmanager
def _causal_biases() -> Iterator[None]:
    """Allow `CausalBias`, a tensor subclass that represents a mask, to be created."""

    def make(cls: type[CausalBias], *args: Any) -> Any:
        with disable_dispatch_modes():
            return torch.Tensor.__new__(cls, *args)

    bias_class: Any = CausalBias
    bias_class.__new__ = make
    try:
        yield
    finally:
        del bias_class.__new__  # it is inherited


@contextmanager
def _steps_without_overflow() -> Iterator[None]:
    """Make gradient scalers, which check for infinite gradients, step as if there were none."""
    step_if_finite = torch.amp.GradScaler._maybe_opt_step

    @functools.wraps(step_if_finite)
    def step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if has_fake_tensors(tuple(state["found_inf_per_device"].values())):
            return optimizer.step(*args, **kwargs)
        return step_if_finite(scaler, optimizer, state, *args, **kwargs)

    torch.amp.GradScaler._maybe_opt_step = step  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.amp.GradScaler._maybe_opt_step = step_if_finite


@contextmanager
def _refused_lazy_fakes() -> Iterator[None]:
    """Refuse lazy modules off the meta device: a fake tensor must have a shape."""
    with ExitStack() as stack:
        for kind in (UninitializedParameter, UninitializedBuffer):
            stack.callback(setattr, kind, "__new__", kind.__new__)
            kind.__new__ = _refused_lazy(kind.__new__)
        yield


def _refused_lazy(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_on_meta(cls: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return make(cls, *args, **kwargs)
        except RuntimeError as error:
            if "FakeTensor" not in str(error):
                raise
            raise WorldError(
                f"A lazy module ({cls.__name__}) was made in a simulated world, where tensors have "
                "no data and must have a shape. Give the layer its sizes (Linear for LazyLinear), "
                "or make it on the meta device and call it with meta tensors before materialize()."
            ) from error

    return make_on_meta


@contextmanager
def _refused_saves() -> Iterator[None]:
    """Explain the error of saving tensors without data, which pickle cannot do."""
    save = torch.save

    @functools.wraps(save)
    def save_data(*args: Any, **kwargs: Any) -> None:
        try:
            save(*args, **kwargs)
        except (AttributeError, RuntimeError, TypeError) as error:
            if "pickle" not in str(error):
                raise
            raise WorldError(
                "torch.save() was called in a simulated world, where tensors have no data to save. "
                'Leave it out, or simulate with device="cpu" and without materialize(); with the '
                "command line, add --data."
            ) from error

    torch.save = save_data
    try:
        yield
    finally:
        torch.save = save


@contextmanager
def _unpinned_fakes() -> Iterator[None]:
    """Make `pin_memory` return fake tensors unchanged, which torch cannot pin."""
    pin = torch.Tensor.pin_memory
    is_inherited = "pin_memory" not in vars(torch.Tensor)

    @functools.wraps(pin)
    def pin_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if isinstance(tensor, _FakeTensor) else pin(tensor, *args, **kwargs)

    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_inherited:
            del torch.Tensor.pin_memory
        else:
            torch.Tensor.pin_memory = pin


@contextmanager
def refused_nested_tensors() -> Iterator[None]:
    """Refuse to create nested tensors from fake tensors.

    torch would fail inside C++ and corrupt memory. Threads without a fake mode are not affected.
    """
    with ExitStack() as stack:
        owners: tuple[tuple[Any, tuple[str, ...]], ...] = (
            (_nested_tensor, _JAGGED),
            (torch, _FROM_MASK),
            (torch.nested, _NESTED),
        )
        for owner, names in owners:
            for name in names:
                make = getattr(owner, name, None)
                if make is not None:
                    stack.callback(setattr, owner, name, make)
                    setattr(owner, name, _refused_nested(make))
        yield


def _refused_nested(make: Callable[..., Any]) -> Callable[..., Any]:
    is_encoder = make.__name__ in _FROM_MASK
    option = " (enable_nested_tensor=False for nn.TransformerEncoder)" if is_encoder else ""

    @functools.wraps(make)
    def make_with_data(*args: Any, **kwargs: Any) -> Any:
        mode = detect_fake_mode()
        if mode is not None and mode.shape_env is None:  # a compiler's mode has one
            is_jagged = make.__name__ in _JAGGED or kwargs.get("layout") is torch.jagged
            layout = "jagged " if is_jagged else ""
            raise WorldError(
                f"A {layout}nested tensor was created in a simulated world whose tensors have "
                f"no data, which torch does not support. Use padded tensors{option}, or simulate "
                'with device="cpu" and without materialize(), so that tensors have data; with the '
                "command line, add --data."
            )
        return make(*args, **kwargs)

    return make_with_data


_MESH_METHODS = ("__init__", "_flatten", "_unflatten", "from_group", "mesh")


@contextmanager
def meshes_with_data() -> Iterator[None]:
    """Give data to the tensors of ranks inside meshes, where other tensors have none."""
    with ExitStack() as stack:
        for name in _MESH_METHODS:
            if name in vars(DeviceMesh):
                method = vars(DeviceMesh)[name]
                stack.callback(setattr, DeviceMesh, name, method)
                setattr(DeviceMesh, name, _with_data(method))
        yield


def _with_data(function: Any) -> Any:
    if isinstance(function, property):
        return property(_with_data(function.fget))
    if isinstance(function, staticmethod):
        return staticmethod(_with_data(function.__func__))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with disable_dispatch_modes():
            if isinstance(kwargs.get("_rank_map"), _FakeTensor):  # init_device_mesh() made it
                kwargs["_rank_map"] = torch.arange(kwargs["_rank_map"].numel())
            return function(*args, **kwargs)

    return call


# Parts of torch's messages where C++ or numpy reads a tensor without data.
_UNREADABLE = (
    "its data is not allocated yet",
    "with unallocated storage",
    ".numpy() is not supported for tensor subclasses",
)

# Parts of torch's messages to a program that uses CUDA on a machine without it.
_WITHOUT_CUDA = (
    "not compiled with CUDA",
    "no NVIDIA driver",
    "No CUDA GPUs are available",
    "has no attribute '_cuda_",
)


@contextmanager
def explained_lack_of_data() -> Iterator[None]:
    """Add a note to torch's errors about missing values, a missing GPU or sharding rule."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NO_DATA[:2]) or any(words in str(error) for words in _UNREADABLE):
            error.add_note(
                "In a simulated world, tensors have no data after materialize(), or on a CUDA "
                "device that this machine does not have, so nothing can depend on a value "
                "(.item(), .tolist(), if loss > …; DDP's join()). Leave that out, or simulate "
                'with device="cpu", build the model with real tensors and do not call '
                "materialize(); with the command line, add --data."
            )
        elif any(words in str(error) for words in _WITHOUT_CUDA):
            error.add_note(
                'The world is simulated on "cpu", on a machine without a GPU. Simulate with '
                'device="cuda", which needs none, or use world.mesh.device_type for "cuda".'
            )
        elif "attention_for_cpu" in str(error) and isinstance(error, NotImplementedError):
            error.add_note(
                "DTensor has no sharding rule for this kernel, which torch chooses on the CPU "
                'alone. Simulate with device="cuda", which needs no GPU, to run the kernels of one.'
            )
        raise


def _should_log(record: logging.LogRecord) -> bool:
    """Whether to keep a log record: torch logs errors of ops, of which ours need no traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], ShardscopeError))
