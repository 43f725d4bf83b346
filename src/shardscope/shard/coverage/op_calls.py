"""Records the op calls of a model's forward and backward, each as a signature without data."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardscope._torch.autograd import (
    current_node,
    is_in_backward,
    next_sequence_number,
    node_origin,
)
from shardscope._torch.dispatch import TorchDispatchMode, is_higher_order, op_schema
from shardscope._torch.dtensor import op_handlers
from shardscope._torch.frames import Role
from shardscope._torch.tree import leaves
from shardscope.attribution.call_sites import Stack, read_stack
from shardscope.attribution.module_calls import ModuleCalls
from shardscope.attribution.module_names import NO_MODULE
from shardscope.record import Source

Frozen = Any  # TensorSpec, _Items or _Constant, nested


class TensorSpec(NamedTuple):
    """A tensor argument. `placements` is None for a plain tensor, and then so is `mesh`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None = None
    mesh: DeviceMesh | None = None
    layout: torch.layout = torch.strided  # others have no strides


class _Items(NamedTuple):
    kind: type
    values: tuple[Frozen, ...]


class _Constant(NamedTuple):
    kind: type  # 1, 1.0 and True are equal and mean different things
    value: Any


@final
class _Object:
    """An argument that is compared by identity: a generator, a script object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_VALUES = (
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Signature(NamedTuple):
    """An op and its arguments; calls with equal signatures are judged once."""

    op: Any
    args: tuple[Frozen, ...]
    kwargs: tuple[tuple[str, Frozen], ...] = ()

    def arguments(self, make: Callable[[TensorSpec], Any]) -> Arguments:
        """Arguments to call the op with; `make` creates each tensor from its spec."""
        return (
            tuple([_unfreeze(value, make) for value in self.args]),
            {name: _unfreeze(value, make) for name, value in self.kwargs},
        )

    def tensors(self) -> Iterator[tuple[tuple[int, ...], TensorSpec]]:
        """Every tensor with its index: the number of its argument, then its number in a list.

        Keyword arguments have their number in the schema.
        """
        yield from _tensors(self.args, ())
        numbers = {
            argument.name: index for index, argument in enumerate(op_schema(self.op).arguments)
        }
        for name, value in self.kwargs:
            for index, spec in _tensors((value,), ()):
                yield (numbers.get(name, len(self.args)), *index[1:]), spec

    def change(self, change: Callable[[tuple[int, ...], TensorSpec], TensorSpec]) -> Signature:
        """The same call with changed tensor specs, in the order of `tensors()`."""
        changed = iter([change(index, spec) for index, spec in self.tensors()])
        return Signature(
            self.op,
            tuple([_exchange(value, changed) for value in self.args]),
            tuple([(name, _exchange(value, changed)) for name, value in self.kwargs]),
        )

    def change_sizes(self, change: Callable[[int], int]) -> Signature:
        """The same call with changed sizes, in its tensors and its integer arguments."""
        return Signature(
            self.op,
            tuple([_resize(value, change) for value in self.args]),
            tuple([(name, _resize(value, change)) for name, value in self.kwargs]),
        )

    def to_fp64(self) -> Signature:
        """The same call in double precision, in its tensors and its dtypes."""
        return Signature(
            self.op,
            tuple([_to_fp64(value) for value in self.args]),
            tuple([(name, _to_fp64(value)) for name, value in self.kwargs]),
        )

    def on_device(self, device: torch.device) -> Signature:
        """The same call with `device` in place of other devices among its arguments."""
        return Signature(
            self.op,
            tuple([_to_device(value, device) for value in self.args]),
            tuple([(name, _to_device(value, device)) for name, value in self.kwargs]),
        )

    def constant(self, name: str) -> Any:
        """An argument that is not a tensor, or its default; None if the op has no such argument."""
        for index, argument in enumerate(op_schema(self.op).arguments):
            if argument.name == name:
                value = self.args[index] if index < len(self.args) else dict(self.kwargs).get(name)
                return value.value if isinstance(value, _Constant) else argument.default_value
        return None

    def pattern(self, num_ranks: int) -> Pattern:
        """What sharding rules depend on: small sizes, which sizes are equal or divide evenly."""
        known: dict[int, Any] = {}

        def name(size: int) -> Any:
            is_small = -_SMALL < size < _SMALL
            return size if is_small else known.setdefault(size, (len(known), size % num_ranks == 0))

        values = [value for _, value in self.kwargs]
        kinds = tuple([_pattern(value, name) for value in (*self.args, *values)])
        return self.op, kinds, tuple([key for key, _ in self.kwargs])

    def plain(self) -> Signature:
        """The same call on plain tensors."""
        return self.change(lambda _, spec: spec._replace(placements=None, mesh=None))

    def name_argument(self, index: tuple[int, ...]) -> str:
        """`mat2`, or `tensors[1]` for a tensor of a list."""
        arguments = op_schema(self.op).arguments
        name = arguments[index[0]].name if index[0] < len(arguments) else f"#{index[0]}"
        return name + "".join(f"[{number}]" for number in index[1:])


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Pattern = tuple[Any, ...]
_SMALL = 8  # sizes below are distinguished
_FP64_DTYPES = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def freeze_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call: tensors become specs, so that repeated calls are equal."""
    return Signature(
        op,
        tuple([_freeze(value) for value in args]),
        tuple([(name, _freeze(kwargs[name])) for name in sorted(kwargs)]) if kwargs else (),
    )


def _freeze(value: Any) -> Frozen:
    if isinstance(value, torch.Tensor):
        stride = tuple(value.stride()) if value.layout is torch.strided else ()
        spec = TensorSpec(tuple(value.shape), stride, value.dtype, layout=value.layout)
        if isinstance(value, DTensor):
            return spec._replace(placements=tuple(value.placements), mesh=value.device_mesh)
        return spec
    if isinstance(value, list | tuple):
        return _Items(type(value), tuple([_freeze(item) for item in value]))
    return _Constant(type(value), value if isinstance(value, _VALUES) else _Object(value))


def _unfreeze(value: Frozen, make: Callable[[TensorSpec], Any]) -> Any:
    if isinstance(value, TensorSpec):
        return make(value)
    if isinstance(value, _Items):
        return [_unfreeze(item, make) for item in value.values]
    return value.value.value if isinstance(value.value, _Object) else value.value


def _tensors(
    values: tuple[Frozen, ...], index: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], TensorSpec]]:
    for position, value in enumerate(values):
        if isinstance(value, TensorSpec):
            yield (*index, position), value
        elif isinstance(value, _Items):
            yield from _tensors(value.values, (*index, position))


def _exchange(value: Frozen, changed: Iterator[TensorSpec]) -> Frozen:
    if isinstance(value, TensorSpec):
        return next(changed)
    if isinstance(value, _Items):
        return _Items(value.kind, tuple([_exchange(item, changed) for item in value.values]))
    return value


def _resize(value: Frozen, change: Callable[[int], int]) -> Frozen:
    if isinstance(value, TensorSpec):
        shape = tuple([change(size) for size in value.shape])
        return value._replace(shape=shape, stride=_dense_stride(shape, value.stride))
    if isinstance(value, _Items):
        return _Items(value.kind, tuple([_resize(item, change) for item in value.values]))
    return value._replace(value=change(value.value)) if value.kind is int else value


def _to_fp64(value: Frozen) -> Frozen:
    if isinstance(value, TensorSpec):
        return value._replace(dtype=_FP64_DTYPES.get(value.dtype, value.dtype))
    if isinstance(value, _Items):
        return _Items(value.kind, tuple([_to_fp64(item) for item in value.values]))
    is_dtype = value.kind is torch.dtype
    return value._replace(value=_FP64_DTYPES.get(value.value, value.value)) if is_dtype else value


def _to_device(value: Frozen, device: torch.device) -> Frozen:
    if isinstance(value, _Items):
        return _Items(value.kind, tuple([_to_device(item, device) for item in value.values]))
    is_device = isinstance(value, _Constant) and isinstance(value.value, torch.device)
    return value._replace(value=device) if is_device else value


def _dense_stride(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without holes, in the order of `like`; expanded dims stay expanded."""
    strides, step = list(like), 1
    for dim in sorted(range(len(like)), key=lambda dim: (like[dim], -dim)):
        if like[dim]:
            strides[dim] = step
            step *= max(1, shape[dim])
    return tuple(strides)


def _pattern(value: Frozen, name: Callable[[int], Any]) -> Any:
    if isinstance(value, TensorSpec):
        order = sorted(range(len(value.stride)), key=lambda dim: (value.stride[dim], -dim))
        zeros = tuple([step == 0 for step in value.stride])
        shape = tuple([name(size) for size in value.shape])
        return shape, tuple(order), zeros, value.dtype, value.placements
    if isinstance(value, _Items):
        return tuple([_pattern(item, name) for item in value.values])
    return (int, name(value.value)) if value.kind is int else value


# Ops that communicate, query or synchronize tensors are not ops of the model.
NON_MODEL_NAMESPACES = (
    "prim",
    "profiler",
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "fsdp",
)
_NO_CALL_SITE: tuple[int, Source | None] = (NO_MODULE, None)

CallLocation = tuple[int, Source | None]  # a module, as an index of its name, and a line


@dataclass
class Use:
    """How often a call is made by each call site, in forward and in backward."""

    forward: Counter[CallLocation] = field(default_factory=Counter)
    backward: Counter[CallLocation] = field(default_factory=Counter)

    @property
    def num_calls(self) -> int:
        """The number of calls in forward and backward."""
        return self.forward.total() + self.backward.total()

    @property
    def locations(self) -> Counter[CallLocation]:
        """Where it is called from, in either direction."""
        return self.forward + self.backward

    def add(self, added: Use, times: int = 1) -> None:
        """Add the counts of `added`, multiplied by `times`."""
        for counts, added_counts in (
            (self.forward, added.forward),
            (self.backward, added.backward),
        ):
            for location, count in added_counts.items():
                counts[location] += count * times


Capture = dict[Signature, Use]


@final
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the op calls of a forward and the backward that follows.

    Higher-order ops are run and reported: the ops of their functions are not judged.

    `run` calls an op; it may continue where the op would raise. `is_placed` says that the model is
    on a mesh, so that some calls only redistribute its tensors.
    """

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(
        self,
        calls: ModuleCalls,
        run: Callable[..., Any],
        report: Callable[[str, str], None],
        *,
        is_placed: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.captured: Capture = {}
        self.higher_order_ops: set[str] = set()  # ops that take functions
        self.handlers: dict[Any, Any] = {}  # of ops that a context such as loss_parallel() runs
        self._usual_handlers = dict(op_handlers())
        self._calls = calls
        self._run = run
        self._report = report
        self._is_placed = is_placed
        self._node_origins: dict[int, CallLocation] = {}  # by sequence number of the autograd node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count the call, and run it."""
        kwargs = kwargs or {}
        if is_higher_order(func):
            self.higher_order_ops.add(str(func))
            self._report(str(func), "it takes functions, whose ops were not tested")
            return func(*args, **kwargs)
        if func.namespace not in NON_MODEL_NAMESPACES:
            self._note(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_backward = is_in_backward()
        running = self._calls.running()
        if is_backward and running == NO_MODULE:
            location = self._find_node_location()
            # Accumulating or redistributing gradients is not an op of the model.
            if location is None or (self._is_placed and _is_moving(args)):
                return
        else:  # also the recomputation of checkpointing
            stack = read_stack(sys._getframe(2))
            if self._is_placed and _is_moving(args, stack):
                return
            if stack.boundary is Role.OPTIMIZER:
                return
            location = (running, stack.source)
            self._node_origins.setdefault(next_sequence_number() - 1, location)
        handler = op_handlers().get(func)
        if handler is not None and handler is not self._usual_handlers.get(func):
            self.handlers[func] = handler
        signature = freeze_call(func, args, kwargs)
        use = self.captured.get(signature)
        if use is None:
            use = self.captured[signature] = Use()
        (use.backward if is_backward else use.forward)[location] += 1

    def _find_node_location(self) -> CallLocation | None:
        node = current_node()
        origin = None if node is None else node_origin(node)
        if isinstance(origin, torch.Tensor):
            return None
        return _NO_CALL_SITE if origin is None else self._node_origins.get(origin, _NO_CALL_SITE)


def _is_moving(args: tuple[Any, ...], stack: Stack | None = None) -> bool:
    """Whether the op redistributes a local tensor."""
    if _has_dtensor(args):
        return False
    stack = stack or read_stack(sys._getframe(3))
    return Role.REDISTRIBUTE in stack.frame_locals or stack.asked_by is not None


def _has_dtensor(values: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in leaves(values))
