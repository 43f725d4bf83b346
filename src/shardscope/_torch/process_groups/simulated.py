"""Simulated worlds: torch's fake process group, fake tensors, and results of collectives.

Each context changes process-wide state of torch, and restores it on leaving.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.library import Library
from torch.nn.attention.bias import CausalBias
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardscope._torch.ddp import reducers_without_data
from shardscope._torch.dispatch import detect_fake_mode, disable_dispatch_modes, has_fake_tensors
from shardscope._torch.dtensor import dtensor_random, forget_decisions
from shardscope._torch.fake import NO_DATA
from shardscope._torch.logs import FAKE_TENSOR_LOG
from shardscope._torch.private import find_name, require, without_if_moved
from shardscope.errors import ShardscopeError, WorldError

# Loading it registers the backend "fake".
_FAKE_GROUPS = find_name(
    "torch.testing._internal.distributed.fake_pg", "make a process group of any size"
)

_PLAIN = (torch.Tensor, nn.Parameter, UninitializedBuffer, UninitializedParameter)
_MAX_CONSTANT = 4096  # elements of a tensor of Python numbers up to which it stays readable
_COPY = find_name("torch.ops.aten._to_copy.default", "keep constants readable after they are moved")
if TYPE_CHECKING:
    from torch._C._distributed_c10d import FakeWork, _create_work_from_future
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
    from torch.distributed.tensor import _redistribute
else:
    FakeWork = find_name(
        "torch._C._distributed_c10d.FakeWork", "answer collectives on tensors without data"
    )
    _create_work_from_future = find_name(
        "torch._C._distributed_c10d._create_work_from_future",
        "return a future with its bucket to DDP",
    )
    fake_tensor = find_name(
        "torch._subclasses.fake_tensor", "build models whose tensors have no data"
    )
    _FakeTensor = find_name(
        "torch._subclasses.fake_tensor.FakeTensor", "recognise tensors without data"
    )
    _redistribute = find_name(
        "torch.distributed.tensor._redistribute",
        "start worlds of different ranks one after another",
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
def simulated_group(rank: int, size: int, *, backend: str) -> Iterator[None]:
    """Make this process `rank` of a fake default group of `size` until the context ends.

    `torch.distributed.get_backend` returns `backend` for it, by which torch and programs choose
    collectives.
    """
    require(_FAKE_GROUPS, FakeWork, _create_work_from_future, _redistribute, dtensor_random)
    tracker, excepthook = dtensor_random._rng_tracker, sys.excepthook
    level = dist.get_debug_level()
    forget_placements()
    # At level DETAIL, torch first checks each collective with the other ranks; there are none.
    dist.set_debug_level(
        min(level, dist.DebugLevel.INFO, key=lambda debug_level: debug_level.value)
    )
    try:
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
        with _only_fake_groups(backend):
            yield
    finally:
        dist.set_debug_level(level)
        if dist.is_initialized():  # many programs close it themselves
            dist.destroy_process_group()
        dtensor_random._rng_tracker, sys.excepthook = tracker, excepthook
        forget_placements()


@contextmanager
def _only_fake_groups(default_backend: str) -> Iterator[None]:
    """Create fake groups for any backend: a real group would wait for its other ranks.

    `torch.distributed.get_backend` returns the backend that was asked for. The function of the same
    name in `distributed_c10d`, which torch's own set-up calls, still returns "fake".
    """
    make_group, read_backend = distributed_c10d._new_process_group_helper, dist.get_backend
    check_ranks = dist.monitored_barrier
    backends: dict[Any, str] = {}  # by group, if it was made with a backend
    signature = inspect.signature(make_group)

    def make_fake_group(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        made = make_group(**{**arguments, "backend": "fake", "backend_options": None})
        backend = str(arguments.get("backend") or "fake")
        if backend != "fake":
            backends[made[0]] = backend
        return made

    @functools.wraps(read_backend)
    def get_backend(group: dist.ProcessGroup | None = None) -> dist.Backend:
        if read_backend(group) != "fake":
            return read_backend(group)
        return dist.Backend(backends.get(group, default_backend))

    @functools.wraps(check_ranks)
    def monitored_barrier(group: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any) -> Any:
        if get_backend(group) != "gloo":
            return check_ranks(group, *args, **kwargs)  # raises
        return dist.barrier(group)

    distributed_c10d._new_process_group_helper = make_fake_group
    dist.get_backend, dist.monitored_barrier = get_backend, monitored_barrier
    try:
        yield
    finally:
        distributed_c10d._new_process_group_helper = make_group
        dist.get_backend, dist.monitored_barrier = read_backend, check_ranks


def forget_placements() -> None:
    """Clear DTensor's caches: their keys lack the rank, and shards of ranks may differ in size."""
    forget_decisions(thoroughly=True)
    for name in ("_gen_transform_infos", "get_redistribute_planner"):
        clear = getattr(getattr(_redistribute, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()


@contextmanager
def fake_tensors() -> Iterator[fake_tensor.FakeTensorMode]:
    """Create fake tensors until the context ends; ops may mix them with real ones."""
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    log = logging.getLogger(FAKE_TENSOR_LOG)
    log.addFilter(_should_log)
    try:
        with (
            _unpinned_fakes(),
            _readable_fakes(),
            without_if_moved(_initialized_fakes()),
            without_if_moved(_steps_without_overflow()),
            without_if_moved(_causal_biases()),
            without_if_moved(reducers_without_data()),
            _swappable_fakes(),
            _refused_lazy_fakes(),
            _refused_saves(),
            _plain_tensors_on_meta(mode),
            mode,
        ):
            yield mode
    finally:
        log.removeFilter(_should_log)


@contextmanager
def _plain_tensors_on_meta(mode: fake_tensor.FakeTensorMode) -> Iterator[None]:
    """Leave meta tensors unchanged, which the mode would convert to fake ones.

    A model is built and sharded on meta: as fake tensors, its parameters would take several times
    as long to chunk, and `to_empty()` could not convert them. The method of the class is patched,
    because torch finds functions registered for a mode by the mode's exact type.
    """
    dispatch = fake_tensor.FakeTensorMode.__torch_dispatch__

    def dispatch_off_meta(
        self: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self is not mode:
            return dispatch(self, op, types, args, kwargs)
        device = kwargs.get("device")
        is_on_meta = device.type == "meta" if device is not None else any(map(_is_on_meta, args))
        # With a fake tensor among the arguments the mode would be called again.
        if is_on_meta and not any(issubclass(kind, _FakeTensor) for kind in types):
            return op(*args, **kwargs)
        result = dispatch(self, op, types, args, kwargs)
        if op is _COPY and isinstance(result, _FakeTensor) and result.constant is None:
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
    """Keep the values of a tensor of Python numbers readable after it is moved to a GPU."""
    constant = getattr(source, "constant", None)
    if constant is not None:
        copy.constant = _COPY(constant, **{**kwargs, "device": torch.device("cpu")})
        mode.fake_tensor_converter.add_constant_storage_mapping(copy)


def _is_on_meta(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_on_meta, value))
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

    fake_tensor.CONSTANT_NUMEL_LIMIT = _MAX_CONSTANT
    _FakeTensor.__format__ = format_value
    _FakeTensor.tolist = tolist  # type: ignore[assignment]
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit
        del _FakeTensor.__format__  # it is inherited
        _FakeTensor.tolist = make_list


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
                f"A {layout}nested tensor was to be made in a simulated world whose tensors have "
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
_UNREADABLE = ("its data is not allocated yet", ".numpy() is not supported for tensor subclasses")

# Parts of torch's messages to a program that uses CUDA on a machine without it.
_WITHOUT_CUDA = ("not compiled with CUDA", "no NVIDIA driver", "has no attribute '_cuda_")


@contextmanager
def explained_lack_of_data() -> Iterator[None]:
    """Add a note to torch's errors about missing values, a missing GPU or sharding rule."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NO_DATA[:2]) or any(words in str(error) for words in _UNREADABLE):
            error.add_note(
                "In a simulated world, tensors have no data after materialize(), nor ever on a "
                "CUDA device that is not there, so that nothing can depend on a value (.item(), "
                ".tolist(), if loss > …; DDP's join()). Leave that out, or simulate "
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


def complete_work(tensors: list[torch.Tensor]) -> Any:
    """Finished work whose future holds `tensors`; the fake group's own future holds None."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


@final
class ReceivedFrom(FakeWork):
    """Finished work of a receive from any rank; `sender` is a rank of the group.

    The Python object must be kept alive: its C++ part does not know the sender.
    """

    def __init__(self, sender: int) -> None:
        super().__init__()
        self._sender = sender

    def _source_rank(self) -> int:
        return self._sender

    def is_completed(self) -> bool:
        return True


_UNANSWERED = (
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_coalesced_",
    "gather_into_tensor_",
    "reduce_scatter_tensor_coalesced_",
)


@contextmanager
def coalesced_ops_on_fake_tensors() -> Iterator[None]:
    """Register empty kernels for ops that have none for fake tensors."""
    library = Library("c10d", "IMPL")
    destroy = library._destroy
    try:
        for name in _UNANSWERED:
            if hasattr(torch.ops.c10d, name) and not _has_kernel(f"c10d::{name}", "Meta"):
                library.impl(name, _answer_nothing(name), "Meta")
        yield
    finally:
        destroy()


@contextmanager
def answered_collectives() -> Iterator[None]:
    """Fill the outputs of collectives from this rank's data, equally in every version of torch.

    Other ranks are assumed to hold the same data as this rank, and to send it what it sends.
    """
    library = Library("c10d", "IMPL")
    destroy = library._destroy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name, fill in _FILLS.items():
                for key in ("CPU", "CUDA"):
                    if _has_kernel(f"c10d::{name}", key):
                        library.impl(name, _answer(name, fill), key)
        yield
    finally:
        destroy()


def _answer_nothing(name: str) -> Callable[..., Any]:
    """A kernel that leaves the outputs as they are."""
    has_outputs = len(getattr(torch.ops.c10d, name).default._schema.returns) > 1

    def answer(outputs: Any, *_: Any) -> Any:
        work = FakeWork().boxed()
        return (outputs, work) if has_outputs else work

    return answer


def _answer(name: str, fill: Callable[..., None]) -> Callable[..., Any]:
    has_outputs = len(getattr(torch.ops.c10d, name).default._schema.returns) > 1

    def answer(outputs: Any, sources: Any, group: Any, *rest: Any) -> Any:
        fill(outputs, sources, dist.ProcessGroup.unbox(group), *rest)
        work = FakeWork().boxed()
        return (outputs, work) if has_outputs else work

    return answer


def _copy(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the elements of `source` to `output` in order; missing ones become zero."""
    if output.shape == source.shape:
        output.copy_(source)
        return
    size = min(output.numel(), source.numel())
    filled = torch.zeros(output.numel(), dtype=output.dtype, device=output.device)
    filled[:size] = source.reshape(-1)[:size]
    output.copy_(filled.view(output.shape))


def _fill_gathered(output: torch.Tensor, source: torch.Tensor, group: Any, *_: Any) -> None:
    copies = source.reshape(-1).repeat(group.size())
    _copy(output, copies.view(output.shape) if copies.numel() == output.numel() else copies)


def _fill_gathered_lists(outputs: Any, sources: Any, group: Any, *_: Any) -> None:
    for shards, source in zip(outputs, sources, strict=False):
        for shard in shards:
            _copy(shard, source)


def _fill_scattered(output: torch.Tensor, source: torch.Tensor, group: Any, *_: Any) -> None:
    size = output.numel()
    start = group.rank() * size
    _copy(output, source.reshape(-1)[start : start + size])


def _fill_scattered_lists(outputs: Any, sources: Any, group: Any, *_: Any) -> None:
    for output, shards in zip(outputs, sources, strict=False):
        _copy(output, shards[group.rank()])


def _fill_exchanged(
    output: torch.Tensor,
    source: torch.Tensor,
    group: Any,
    output_rows: list[int],
    input_rows: list[int],
    *_: Any,
) -> None:
    parts = zip(
        _split(output, output_rows, group.size()),
        _split(source, input_rows, group.size()),
        strict=True,
    )
    for received, sent in parts:
        _copy(received, sent)


def _split(tensor: torch.Tensor, rows: list[int], size: int) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = tensor.split(list(rows) or tensor.shape[0] // size)
    return parts


def _fill_exchanged_lists(outputs: Any, sources: Any, *_: Any) -> None:
    for output, source in zip(outputs, sources, strict=True):
        _copy(output, source)


def _fill_each(fill: Callable[..., None]) -> Callable[..., None]:
    def fill_each(outputs: Any, sources: Any, *rest: Any) -> None:
        for output, source in zip(outputs, sources, strict=True):
            fill(output, source, *rest)

    return fill_each


_FILLS: dict[str, Callable[..., None]] = {
    "_allgather_base_": _fill_gathered,
    "_reduce_scatter_base_": _fill_scattered,
    "allgather_": _fill_gathered_lists,
    "allgather_coalesced_": lambda lists, sources, *rest: _fill_gathered_lists(
        zip(*lists, strict=True), sources, *rest
    ),
    "allgather_into_tensor_coalesced_": _fill_each(_fill_gathered),
    "alltoall_": _fill_exchanged_lists,
    "alltoall_base_": _fill_exchanged,
    "gather_": _fill_gathered_lists,
    "gather_into_tensor_": _fill_gathered,
    "reduce_scatter_": _fill_scattered_lists,
    "reduce_scatter_tensor_coalesced_": _fill_each(_fill_scattered),
}


def _has_kernel(op: str, key: str) -> bool:
    """Whether this torch has the op, and a kernel for it at the dispatch key."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    except RuntimeError:
        return False
